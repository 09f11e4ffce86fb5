"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.kernels.portable.attention_fwd.config import select
from jaggedtensor.kernels.portable.attention_fwd.device import fill_kernel, forward_kernel
from jaggedtensor.kernels.portable.operands import (
    are_aligned,
    columns_together,
    device_of,
    of_keys,
    of_queries,
    of_statistics,
)
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.kernels.portable.variants import launch
from jaggedtensor.problem import AttentionArgs, AttentionProblem

SMALL = 1 << 22  # elements that are filled in less time than a launch takes


@functools.lru_cache(maxsize=512)
def tiling_of(problem: AttentionProblem, flip: bool, aligned: bool) -> Tiling:
    return replace(select(problem), flip=flip, aligned=aligned)


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out and lse; rows without a visible key are filled here (0 and -inf), the others by the kernel."""
    problem, (tiles, *listed) = args.problem, args.schedule
    q, k, v = columns_together(args.q), columns_together(args.k), columns_together(args.v)
    tiling = tiling_of(problem, args.scale < 0, are_aligned(problem, q, k, v))
    jagged = args.q_offsets is not None
    # Without windows only empty sequences see nothing: then writing all rows twice is worth a launch to avoid.
    few_blind = not jagged and not problem.windowed and not problem.masked
    by_kernel = few_blind and not args.complete and math.prod(args.out_shape) > SMALL
    if not by_kernel and not (few_blind and args.complete):
        out = q.new_zeros(args.out_shape)
        lse = q.new_full(args.lse_shape, -math.inf, dtype=torch.float32)
    else:
        out, lse = q.new_empty(args.out_shape), q.new_empty(args.lse_shape, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    with device_of(args):
        if by_kernel:
            sizes = (out[0].numel(), lse[0].numel())
            fill_kernel[(args.batch_size,)](
                out, lse, args.k_offsets, *sizes, BLOCK=1024, num_warps=4, enable_fp_fusion=True
            )
        if tiles.shape[0]:
            arguments = (
                of_queries(q),
                of_keys(k),
                of_keys(v),
                of_queries(out),
                of_statistics(lse, jagged),
                (tiles, listed[0] if listed else None),
                (args.q_offsets, args.k_offsets),
                problem.q_len or 0,
                abs(args.scale) * math.log2(math.e),
                (problem.left, problem.right),
                tiling,
            )
            launch(forward_kernel, tiles.shape[0], _variant(args, q, k, v, *args.schedule), arguments, tiling.options)
    return out, lse


def _variant(args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, *schedule: Tensor) -> tuple[Any, ...] | None:
    """What the compiled kernel depends on; None if some pointer is not aligned. Results are new and aligned."""
    places = q.data_ptr() | k.data_ptr() | v.data_ptr() | args.k_offsets.data_ptr()
    for x in schedule:
        places |= x.data_ptr()
    q_type = None
    if args.q_offsets is not None:
        places |= args.q_offsets.data_ptr()
        q_type = args.q_offsets.dtype
    if places % 16:
        return None
    return args.problem, args.scale < 0, q.stride(), k.stride(), v.stride(), args.k_offsets.dtype, q_type
