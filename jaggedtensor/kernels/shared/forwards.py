"""What launchers of forward passes have in common."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jaggedtensor.errors import fail
from jaggedtensor.kernels.shared.direct import Variant
from jaggedtensor.kernels.shared.ragged import MOST_ROWS
from jaggedtensor.problem import AttentionArgs

SMALLEST_SCALE = 1e-30  # in place of 0: scores count for nothing, and -inf stays -inf
MANY = 512  # calls that are remembered
Parts = tuple[Tensor | None, Tensor | None]  # of O and lse of tiles that are cut


class Call(NamedTuple):
    """What calls of the same problem, strides and scale have in common."""

    variant: Variant
    blocks: tuple[tuple[int, int, int], ...]  # of q, k, v and out: rows, heads, columns
    steps: tuple[int, int, int]  # of lse: batch, row, head
    ends: tuple[Any, ...]  # the last arguments
    merge: Variant
    config: Any
    redo: tuple[Variant, Any] | None = None  # launched after it, see shared.anchor, and its config, the last argument


def log2_units(scale: float) -> tuple[float, float]:
    """What raw scores are multiplied by for the base 2, and the power of two next to it."""
    factor = max(abs(scale) * math.log2(math.e), SMALLEST_SCALE)
    return factor, 2.0 ** round(math.log2(factor))


def check_rows(args: AttentionArgs) -> None:
    """Raises NotImplementedError where a tensor has more rows than a ragged descriptor tells apart."""
    most = max(args.k.shape[0], args.q.shape[0], args.batch_size * (args.problem.q_len or 0))
    if most > MOST_ROWS.value:
        fail(
            "rows of a tensor", f"at most {MOST_ROWS.value}", most, "use backend='portable'", error=NotImplementedError
        )


def new_parts(q: Tensor, programs: int, config: Any, splits: bool) -> Parts:
    """Scratch, if tiles are cut: a CTA has two parts at most."""
    if not splits:
        return None, None
    rows = 2 * programs * config.block_m
    return q.new_empty(rows, config.block_dv, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


def merge_parts(
    call: Call, args: AttentionArgs, out: Tensor, lse: Tensor, parts: Parts, merges: Tensor, places: int
) -> None:
    """Launches the kernel that makes one of the parts of each tile. `places`: of the other pointers, or-ed."""
    ends = (args.q_offsets, args.k_offsets, args.problem.q_len or 0, call.config)
    programs = merges.shape[0] * (call.config.block_m // call.config.merge_rows)
    call.merge.launch(
        programs, (), (out, lse, *call.steps, *parts, merges, *ends), not (places | merges.data_ptr()) % 16
    )
