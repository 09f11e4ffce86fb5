"""Launching a compiled Gluon variant directly: its arguments are not bound anew, and tensor maps are kept.

Triton binds the arguments of a launch, specialises on them, asks the driver whose each pointer is, and encodes a map
for each descriptor, every time: some 100 microseconds in all, where the launch itself takes five.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from jaggedtensor.kernels.shared.dsl import TensorDescriptor, assembling
from jaggedtensor.kernels.shared.hooks import is_watched

MOST_MAPS = 1024
Descriptor = tuple[Hashable, Callable[[], TensorDescriptor]]  # all that its map depends on; what makes it


class Variant:
    """A kernel compiled for what stays the same from call to call: the types, the constants, the device.

    Args:
        kernel: as Gluon's decorator made it; descriptors are its first arguments.
        options: of a launch, as `dsl.assembling` takes them.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: Any = None
        self._maps: dict[Hashable, Sequence[Any]] = {}

    def launch(
        self, programs: int, descriptors: Sequence[Descriptor], args: Sequence[Any], aligned: bool = True
    ) -> None:
        """`kernel[(programs,)](*descriptors, *args, **options)` on the current device and stream.

        aligned: whether all pointers are multiples of 16 bytes. Others are rare, and launched as Triton does.
        """
        if self._compiled is None or not aligned:
            with assembling(self.options) as options:
                compiled = self.kernel[(programs,)](*(make() for _, make in descriptors), *args, **options)
            if aligned:
                self._read(compiled)
        elif not self._plain or is_watched():
            self._compiled[(programs, 1, 1)](*(make() for _, make in descriptors), *args)
        else:
            arguments: list[Any] = []
            for i, (key, make) in enumerate(descriptors):
                known = self._maps.get((i, key))
                arguments += self._encode(i, key, make) if known is None else known
            arguments += [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
            stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
            driver.active.utils.launch(programs, 1, 1, stream, *self._fixed, tuple(arguments))

    def _encode(self, i: int, key: Hashable, make: Callable[[], TensorDescriptor]) -> Sequence[Any]:
        """A map, and the shape and strides that are arguments beside it."""
        if len(self._maps) >= MOST_MAPS:
            self._maps.clear()
        made = nvidia.make_tensordesc_arg(make(), self._compiled.metadata.tensordesc_meta[i], None)
        self._maps[i, key] = made
        return made

    def _read(self, compiled: Any) -> None:
        """What Triton hands to the driver besides the arguments."""
        self._compiled, run = compiled, compiled.run
        scratch = run.global_scratch_size or run.profile_scratch_size
        self._plain = not scratch and not knobs.compilation.instrumentation_mode
        kind = (run.launch_cooperative_grid, run.launch_pdl)
        no_hooks_nor_scratch = (None, None, None, None, None)
        types = (run.arg_annotations, run.kernel_signature)
        self._fixed = (compiled.function, *kind, compiled.packed_metadata, *no_hooks_nor_scratch, *types)


_VARIANTS: dict[Hashable, Variant] = {}


def launch(
    kernel: Any,
    programs: int,
    key: Hashable | None,
    descriptors: tuple[Descriptor, ...],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """`kernel[(programs,)](*descriptors, *args, **options)` on the current device and stream.

    `key` says all that Triton specialises on but for the descriptors' maps; None: Triton looks for itself.
    """
    place = (kernel, torch.cuda.current_device(), key)
    variant = _VARIANTS.get(place)
    if variant is None:
        variant = _VARIANTS[place] = Variant(kernel, options)
    variant.launch(programs, descriptors, args, key is not None)
