"""Launching a compiled Gluon variant directly: its arguments are not bound anew, and tensor maps are kept.

Triton binds the arguments of a launch, specialises on them, and encodes a map for each descriptor, every time: some 60
microseconds for four of them, where the launch itself takes five. Here the caller says by a key what the compiled code
depends on, and by another what each map does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from jaggedtensor.kernels.shared.dsl import TensorDescriptor

MOST_MAPS = 4096
Descriptor = tuple[Hashable, Callable[[], TensorDescriptor]]  # all that its map depends on; what makes it

_VARIANTS: dict[Hashable, _Variant] = {}
_MAPS: dict[Hashable, tuple[Any, ...]] = {}


def launch(
    kernel: Any,
    programs: int,
    key: Hashable | None,
    descriptors: tuple[Descriptor, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """`kernel[(programs,)](*descriptors, *args, **options)`.

    `key` says all that Triton specialises on but for the descriptors' maps; None: Triton looks for itself. Launches on
    the current device and stream.
    """
    if key is None:
        kernel[(programs,)](*(make() for _, make in descriptors), *args, **options)
        return
    device = torch.cuda.current_device()
    key = (kernel, device, key)
    variant = _VARIANTS.get(key)
    if variant is None:
        compiled = kernel[(programs,)](*(make() for _, make in descriptors), *args, **options)
        _VARIANTS[key] = _Variant(compiled)
    else:
        variant.launch(programs, device, descriptors, args)


class _Variant:
    """A compiled kernel whose first arguments are descriptors."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        run, metadata = compiled.run, compiled.metadata
        self.maps = list(metadata.tensordesc_meta)
        # What Triton passes to the driver before the arguments, and after grid, stream, function and grid kind.
        self.fixed = (
            run.launch_cooperative_grid,
            run.launch_pdl,
            compiled.packed_metadata,
            None,
            None,
            None,
            None,
            None,
        )
        self.types = (run.arg_annotations, run.kernel_signature)
        scratch = run.global_scratch_size or run.profile_scratch_size
        self.plain = not scratch and not knobs.compilation.instrumentation_mode

    def launch(self, programs: int, device: int, descriptors: tuple[Descriptor, ...], args: tuple[Any, ...]) -> None:
        if not self.plain or _watched():
            self.compiled[(programs, 1, 1)](*(make() for _, make in descriptors), *args)
            return
        arguments: list[Any] = []
        for i, (key, make) in enumerate(descriptors):
            place = (key, device)
            entry = _MAPS.get(place)
            if entry is None:
                if len(_MAPS) >= MOST_MAPS:
                    _MAPS.clear()
                entry = _MAPS[place] = tuple(nvidia.make_tensordesc_arg(make(), self.maps[i], None))
            arguments += entry
        stream = torch._C._cuda_getCurrentRawStream(device)
        function = self.compiled.function
        driver.active.utils.launch(programs, 1, 1, stream, function, *self.fixed, *self.types, (*arguments, *args))


def _watched() -> bool:
    """Whether a profiler wants to be told of launches."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)
