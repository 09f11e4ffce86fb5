"""Blocks of the forward kernel: measured on an H200 for half precision and D <= 128 (docs/kernels/portable.md),
elsewhere such as compile without spills to speak of (benchmarks/compile_check.py)."""

from __future__ import annotations

import torch

from jaggedtensor.kernels.portable.tiling import Tiling, block_of, single_side, tiling_of, widest
from jaggedtensor.problem import AttentionProblem


def select(problem: AttentionProblem) -> Tiling:
    """A pure function of the problem; never tuned at a user's first call."""
    wide = widest(problem)
    m = 128 if problem.rows is None else block_of(problem.rows, 128)  # no padding of a short query
    if problem.dtype == torch.float32:
        side = single_side(wide)
        blocks = Tiling(min(m, side), side, num_warps=8 if wide > 64 else 4, num_stages=2 if wide <= 64 else 1)
    elif wide > 128:
        blocks = Tiling(min(m, 64), 64, num_warps=8 if m > 32 else 4, num_stages=2)
    elif m == 128:
        blocks = Tiling(128, 64, num_warps=8 if wide > 64 else 4, num_stages=3)
    else:
        blocks = Tiling(m, 64, num_warps=4, num_stages=3 if m == 64 else 2)
    size = problem.dtype.itemsize

    def bytes_of(t: Tiling) -> int:
        """Q, a ring of K and V, and barriers."""
        return size * (t.block_m * t.block_d + t.num_stages * t.block_n * (t.block_d + t.block_dv)) + 2048

    return tiling_of(problem, blocks, bytes_of)
