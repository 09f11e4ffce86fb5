"""Launching a compiled variant of a kernel without binding its arguments anew, which costs more than all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime import driver

from jaggedtensor import env
from jaggedtensor.kernels.shared.hooks import is_watched

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
    elif is_watched():
        compiled[(programs, 1, 1)](*arguments(itself))
    else:
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *arguments(Tensor.data_ptr),
        )  # fmt: skip
