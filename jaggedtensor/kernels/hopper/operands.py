"""Tensors as TMA sees them."""

from __future__ import annotations

from torch import Tensor

from jaggedtensor.kernels.shared.dsl import TensorDescriptor, gl

MOST_ROWS = 1 << 30
_UNBOUNDED = 0x7FFF0000


def takes(x: Tensor) -> bool:
    """Whether TMA can address it: columns together, all else at multiples of 16 bytes."""
    unit = 16 // x.itemsize
    steps = [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1][: x.dim() - 1]
    return x.stride(-1) == 1 and not x.data_ptr() % 16 and not any(step % unit for step in steps)


def ragged(x: Tensor, rows: int, heads: int, columns: int) -> TensorDescriptor:
    """Of `[tokens, H, D]`, for blocks of some rows, heads and columns that end where a sequence does.

    As `triton.tools.ragged_tma`: the rows get 2 ** 30 as their bound, and two coordinates in front, whose strides come to
    0 modulo 2 ** 64 together with that bound, tell where a sequence ends. Row r of a sequence of n that begins at s is at
    (2 ** 30, s + n, 2 ** 30 - n + r): before the bound if and only if r < n.
    """
    tokens, h, d = x.shape
    row, head = x.stride(0), x.stride(1)
    head = head if h > 1 else d
    row = row if tokens > 1 else h * d
    layout = gl.NVMMASharedLayout(128, 8 * x.itemsize, 5)
    shape = [_UNBOUNDED, _UNBOUNDED, MOST_ROWS, h, d]
    return TensorDescriptor(x, shape, [2**34 - row, row, row, head, 1], [1, 1, rows, heads, columns], layout)
