"""Rows past the last sequence: gradients there are 0."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a program


def clear_slack(x: Tensor, offsets: Tensor) -> Tensor:
    """x, contiguous [rows, ...], with 0 in the rows from offsets[-1] on. On the current device."""
    if x.numel():
        clear_kernel[(triton.cdiv(x.shape[0], ROWS),)](
            x, offsets, offsets.shape[0] - 1, x.shape[0], WIDTH=x[0].numel(), BLOCK=ROWS, enable_fp_fusion=True
        )
    return x


@triton.jit(do_not_specialize=["batch", "rows"])
def clear_kernel(x, offsets, batch, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows past the last sequence of a contiguous [rows, WIDTH]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slack = (row >= tl.load(offsets + batch)) & (row < rows)
    if tl.max(slack.to(tl.int32), 0) > 0:
        for begin in range(0, WIDTH, 128):
            column = begin + tl.arange(0, 128)
            at = x + row[:, None] * WIDTH + column[None, :]
            tl.store(at, tl.zeros([BLOCK, 128], x.dtype.element_ty), mask=slack[:, None] & (column < WIDTH)[None, :])
