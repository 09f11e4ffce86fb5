"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jaggedtensor.kernels.portable.attention_fwd.config import select
from jaggedtensor.kernels.portable.attention_fwd.device import forward_kernel
from jaggedtensor.kernels.portable.operands import (
    are_aligned,
    columns_together,
    device_of,
    of_keys,
    of_queries,
    of_statistics,
)
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.kernels.portable.variants import Place, launch
from jaggedtensor.kernels.shared.fill import SMALL, fill_kernel
from jaggedtensor.kernels.shared.rows import Operand
from jaggedtensor.problem import AttentionArgs

FEW = 1 << 16  # elements of a sequence that one program fills on the way
MANY = 512


class Call(NamedTuple):
    """What calls of the same problem, with the same strides and scale, have in common."""

    tiling: Tiling
    scale_log2: float
    steps: tuple[tuple[int, int, int], ...]  # of q, k, v, out and lse: batch, row, head
    variant: tuple[Any, ...]  # what the compiled kernel depends on, as long as pointers are aligned


_CALLS: dict[tuple[Any, ...], Call] = {}  # a model has a few


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out and lse; rows without a visible key are filled here (0 and -inf), the others by the kernel."""
    problem, q_offsets, k_offsets = args.problem, args.q_offsets, args.k_offsets
    tiles, listed = args.schedule if problem.masked else (args.schedule[0], None)
    q, k, v = columns_together(args.q), columns_together(args.k), columns_together(args.v)
    with device_of(args):
        out, lse, blind = _new_results(args, tiles.shape[0])
        if out.numel() == 0 or tiles.shape[0] == 0:
            return out, lse
        pointers = q.data_ptr() | k.data_ptr() | v.data_ptr()
        q_type = None if q_offsets is None else q_offsets.dtype
        key = (
            problem, k.device, args.scale, q.stride(), k.stride(), v.stride(), k_offsets.dtype, q_type, pointers % 16,
        )  # fmt: skip
        call = _CALLS.get(key)
        if call is None:
            if len(_CALLS) > MANY:
                _CALLS.clear()
            call = _CALLS[key] = _prepare(args, q, k, v, out, lse, key)

        def arguments(place: Place) -> tuple[Any, ...]:
            of_q, of_k, of_v, of_out, of_lse = call.steps
            return (
                Operand(place(q), *of_q),
                Operand(place(k), *of_k),
                Operand(place(v), *of_v),
                Operand(place(out), *of_out),
                Operand(place(lse), *of_lse),
                (place(tiles), None if listed is None else place(listed)),
                (None if q_offsets is None else place(q_offsets), place(k_offsets)),
                problem.q_len or 0,
                call.scale_log2,
                (problem.left, problem.right),
                blind,
                call.tiling,
            )

        for x in (tiles, k_offsets, q_offsets, listed):
            pointers |= 0 if x is None else x.data_ptr()
        variant = None if pointers % 16 else call.variant
        launch(forward_kernel, tiles.shape[0], variant, arguments, call.tiling.options)
    return out, lse


def _prepare(
    args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key: tuple[Any, ...]
) -> Call:
    tiling = replace(select(args.problem), flip=args.scale < 0, aligned=are_aligned(args.problem, q, k, v))
    operands = of_queries(q), of_keys(k), of_keys(v), of_queries(out), of_statistics(lse, args.q_offsets is not None)
    return Call(tiling, abs(args.scale) * math.log2(math.e), tuple(x[1:] for x in operands), key)


def _new_results(args: AttentionArgs, tiles: int) -> tuple[Tensor, Tensor, int]:
    """Filled where some rows see nothing. Without windows only empty sequences do: small results of theirs are left to
    the forward kernel, large ones to one of its own, as writing all rows twice would cost more than its launch.

    Returns:
        out, lse, and how many sequences the forward kernel has to look after.
    """
    q, out_shape, lse_shape = args.q, args.out_shape, args.lse_shape
    some_tiles = args.q_offsets is None and not args.problem.windowed and not args.problem.masked and tiles > 0
    size = math.prod(out_shape)
    by_forward = size <= SMALL and size <= FEW * args.batch_size
    if not some_tiles or not (args.complete or by_forward or size > SMALL):
        return q.new_zeros(out_shape), q.new_full(lse_shape, -math.inf, dtype=torch.float32), 0
    out, lse = q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)
    if args.complete or by_forward:
        return out, lse, 0 if args.complete else args.batch_size
    sizes = (out[0].numel(), lse[0].numel())
    fill_kernel[(args.batch_size,)](out, lse, args.k_offsets, *sizes, BLOCK=1024, num_warps=4, enable_fp_fusion=True)
    return out, lse, 0
