"""Launching a compiled variant of a kernel without binding its arguments anew, which costs more than all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from jaggedtensor import env

_COMPILED: dict[tuple[Any, ...], Any] = {}

Place = Callable[[Tensor], Any]


def itself(x: Tensor) -> Tensor:
    return x


def launch(
    kernel: Any, programs: int, key: tuple[Any, ...] | None, arguments: Callable[[Place], tuple[Any, ...]],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """`kernel[(programs,)](*arguments, **options)` on the current device.

    `key` names the device and says all that Triton specialises on (types, divisible and unit strides, alignment of
    pointers, constants); the variant compiled for it is kept and launched directly. None: Triton looks for itself.
    `arguments(place)` gives the arguments with `place(x)` for each tensor: a launcher takes addresses without asking
    the driver whose they are.
    """
    if key is None or env.INTERPRETING:
        kernel[(programs,)](*arguments(itself), **options)
        return
    key = (kernel, *key)
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[(programs,)](*arguments(itself), **options)
    elif _is_watched():
        compiled[(programs, 1, 1)](*arguments(itself))
    else:
        driver = _runtime().driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments(Tensor.data_ptr),
        )  # fmt: skip


def _runtime() -> Any:
    from triton import runtime

    return runtime


def _is_watched() -> bool:
    """Whether a profiler wants to hear of launches."""
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
