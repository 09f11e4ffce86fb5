"""Tiling: the compile-time constants of a portable kernel, and what fits into shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from jaggedtensor import env
from jaggedtensor.problem import UNLIMITED, AttentionProblem

SMALLEST_BLOCK = 16  # what tl.dot takes


@dataclass(frozen=True)
class Tiling:
    """Passed to kernels whole, as one constexpr."""

    block_m: int  # packed query rows
    block_n: int  # keys
    num_warps: int
    num_stages: int
    group: int = 1
    head_dim: int = 1
    value_dim: int = 1
    block_d: int = SMALLEST_BLOCK  # head_dim rounded up to a power of two
    block_dv: int = SMALLEST_BLOCK
    left: bool = False  # the window has a limit on this side
    right: bool = False
    flip: bool = False  # scale is negative
    precision: str = "ieee"
    widen: bool = False  # interpreted bf16
    aligned: bool = False  # every row begins at a multiple of 16 bytes, where Triton cannot tell from the strides
    reduces: bool = False  # memory adds 16 bytes at a time, of any dtype
    late: bool = False  # dK of a block of keys is stored once the next block's scores are known
    turned: bool = False  # dV and dK of a block of keys are products of [columns, keys]
    workers: int = 1  # programs that share a broadcast query's gradient, for each line of the schedule
    q_blocks: int = 1  # lines for each head: blocks of a broadcast query
    shared_memory: int = 0  # bytes that a block is estimated to take

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. FP fusion is named because its default differs between versions of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def block_of(size: int, most: int) -> int:
    """The smallest power of two that holds `size`, within 16..most."""
    return min(most, max(SMALLEST_BLOCK, 1 << max(size - 1, 0).bit_length()))


def single_side(wide: int) -> int:
    """Side of a block in fp32, whose products are unrolled into multiply-adds: larger ones compile for minutes."""
    return 32 if wide <= 128 else 16


def widest(problem: AttentionProblem) -> int:
    return max(block_of(problem.head_dim, 256), block_of(problem.value_dim, 256))


def tiling_of(problem: AttentionProblem, blocks: Tiling, bytes_of: Callable[[Tiling], int]) -> Tiling:
    """`blocks` with the problem's constants, fewer stages and smaller blocks where shared memory asks for it.

    `bytes_of` is the most that the kernel takes. The smallest blocks are taken as they are: what has so little shared
    memory is not from NVIDIA, and holds in registers what is counted here.
    """
    single = problem.dtype == torch.float32
    tiling = replace(
        blocks,
        group=problem.group,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        block_d=block_of(problem.head_dim, 256),
        block_dv=block_of(problem.value_dim, 256),
        left=problem.left != UNLIMITED,
        right=problem.right != UNLIMITED,
        precision="tf32" if single and problem.tf32 else "ieee",
        widen=env.INTERPRETING and problem.dtype == torch.bfloat16,
    )
    budget = problem.device.shared_memory
    while bytes_of(tiling) > budget and tiling.num_stages > 1:
        tiling = replace(tiling, num_stages=tiling.num_stages - 1)
    while bytes_of(tiling) > budget and tiling.block_n > SMALLEST_BLOCK:
        tiling = replace(tiling, block_n=tiling.block_n // 2)
    while bytes_of(tiling) > budget and tiling.block_m > SMALLEST_BLOCK:
        tiling = replace(tiling, block_m=tiling.block_m // 2)
    return replace(tiling, shared_memory=bytes_of(tiling))
