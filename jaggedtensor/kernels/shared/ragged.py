"""Jagged tensors as TMA sees them: blocks of rows that end where a sequence does, on the host and on the device."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from jaggedtensor.kernels.shared.direct import Descriptor
from jaggedtensor.kernels.shared.dsl import TensorDescriptor, gl, gluon

MOST_ROWS: gl.constexpr = gl.constexpr(1 << 30)
_UNBOUNDED = 0x7FFF0000
_SPLITS = {None: [], "rows": [[0, 0, 1, 0, 0]], "columns": [[0, 0, 0, 0, 1]]}  # of the five dimensions of a block
_ALIGNED = 256  # elements: a stride that nothing depends on, as torch gives any for a dimension of size 1


def takes(x: Tensor) -> bool:
    """Whether TMA can address it: columns together, all else at multiples of 16 bytes."""
    return strides_fit(x) and not x.data_ptr() % 16


def strides_fit(x: Tensor) -> bool:
    """The same for any address that is a multiple of 16 bytes."""
    unit = 16 // x.itemsize
    *steps, column = x.stride()
    return column == 1 and not any(
        not step or step % unit for size, step in zip(x.shape, steps, strict=False) if size > 1
    )


def ragged(x: Tensor, rows: int, heads: int, columns: int, split: str | None = None) -> Descriptor:
    """Of `[tokens, H, D]`, for blocks of some rows, heads and columns that end where a sequence does. Of two CTAs that
    share a block each has half of its rows or of its columns, as `split` says.

    As `triton.tools.ragged_tma`: the rows get 2 ** 30 as their bound, and two coordinates in front, whose strides come
    to 0 modulo 2 ** 64 together with that bound, tell where a sequence ends. Row r of a sequence of n that begins at s
    is at (2 ** 30, s + n, 2 ** 30 - n + r): before the bound if and only if r < n.
    """
    tokens, h, d = x.shape
    row, head, _ = x.stride()
    if h == 1:
        head = _ALIGNED
    if tokens == 1:
        row = _ALIGNED
    block = [1, 1, rows, heads, columns]

    def make() -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(min(128, columns * x.itemsize), 8 * x.itemsize, 5, cga_layout=_SPLITS[split])
        shape = [_UNBOUNDED, _UNBOUNDED, MOST_ROWS.value, h, d]
        return TensorDescriptor(x, shape, [2**34 - row, row, row, head, 1], block, layout)

    return (x.data_ptr(), row, head, h, d, x.dtype, rows, heads, columns, split), make


@gluon.jit
def ragged_place(start, count, row, head, column=0):
    """Coordinates of a ragged descriptor: row `row` of `head`, within the `count` rows that begin at `start`."""
    return [MOST_ROWS, start + count, MOST_ROWS - count + row, head, column]


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
