"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_fwd.config import ROWS, Config, anchors_pay, select
from jaggedtensor.kernels.blackwell.attention_fwd.device import forward_kernel, merge_kernel
from jaggedtensor.kernels.shared.direct import Descriptor, Variant
from jaggedtensor.kernels.shared.fill import outputs
from jaggedtensor.kernels.shared.forwards import (
    MANY,
    SMALLEST_SCALE,
    Call,
    check_rows,
    log2_units,
    merge_parts,
    new_parts,
)
from jaggedtensor.kernels.shared.ragged import device_of, ragged, takes
from jaggedtensor.problem import AttentionArgs, Quantised

_CALLS: dict[Any, Call] = {}  # a model has a few


def tables_of(args: AttentionArgs, by: Quantised) -> tuple[Tensor, Tensor]:
    """What raw scores of a head are in log2 units, [Hq], and the scales of values, [Hkv]."""
    problem = args.problem
    scores = by.q.expand(problem.q_heads).unflatten(0, (problem.kv_heads, problem.group))
    units = (scores * by.k.expand(problem.kv_heads)[:, None]).flatten() * (abs(args.scale) * math.log2(math.e))
    return units.clamp(min=SMALLEST_SCALE), by.v.expand(problem.kv_heads).contiguous()


def forward(
    args: AttentionArgs, config: Config | None = None, quantised: Quantised | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse, 0 and -inf for a row that sees no key.

    Operands that TMA cannot address (columns apart, rows not at multiples of 16 bytes) are copied first, and so is the
    query for a negative scale.
    """
    problem, (tiles, worker_offsets, *more) = args.problem, args.schedule
    splits = bool(more) and not problem.masked
    q, k, v = (x if takes(x) else x.clone(memory_format=torch.contiguous_format) for x in (args.q, args.k, args.v))
    if args.scale < 0:
        q = -q if quantised is None else (q.view(torch.uint8) ^ 0x80).view(q.dtype)
    q_offsets, k_offsets = args.q_offsets, args.k_offsets
    check_rows(args)
    with device_of(k):
        out, lse = outputs(args, None if quantised is None else quantised.out_dtype)
        if out.numel() == 0 or not tiles.shape[0]:
            return out, lse
        if q.dim() == 4:
            q = q.flatten(0, 1)
        rows = out if out.dim() == 3 else out.flatten(0, 1)
        places = tiles.data_ptr() | worker_offsets.data_ptr() | k_offsets.data_ptr()
        places |= 0 if q_offsets is None else q_offsets.data_ptr()
        tables = _NO_TABLES if quantised is None else tables_of(args, quantised)
        for table in tables:
            places |= 0 if table is None else table.data_ptr()
        queries = q.shape[0] if problem.q_len is None else args.batch_size * problem.q_len
        anchored = not splits and quantised is None and anchors_pay(problem, queries, k.shape[0], args.batch_size)
        key = (
            problem, config, splits, anchored, k.device, args.scale, q.stride(), k.stride(), v.stride(),
            q.shape[0] == 1, k.shape[0] == 1, rows.shape[0] == 1,
            k_offsets.dtype, None if q_offsets is None else q_offsets.dtype, out.dtype,
        )  # fmt: skip
        call = _CALLS.get(key)
        if call is None:
            if len(_CALLS) > MANY:
                _CALLS.clear()
            chosen = config
            if chosen is None:
                chosen = select(problem, anchored=1) if anchored else select(problem)
            call = _CALLS[key] = _prepare(args, lse, replace(chosen, splits=splits))
        descriptors = [_descriptor(x, block) for x, block in zip((q, k, v, rows), call.blocks, strict=True)]
        programs = tiles.shape[0] if call.config.answers else worker_offsets.shape[0] - 1
        parts = new_parts(q, programs, call.config, splits)
        flags = None
        if call.config.anchored:  # of each lane of each tile
            flags = torch.empty(tiles.shape[0], 2, dtype=torch.int32, device=k.device)
        ends = (q_offsets, k_offsets, problem.q_len or 0)
        listed = more[0] if problem.masked else None
        scale, coarse, *rest = call.ends
        arguments = (
            out, lse, *call.steps, *parts, flags, tiles, worker_offsets, listed, *ends, scale, coarse, *tables, *rest
        )  # fmt: skip
        call.variant.launch(programs, descriptors, arguments, not places % 16)
        if call.redo is not None:
            variant, exact = call.redo
            variant.launch(programs, descriptors, (*arguments[:-1], exact), not places % 16)
        if splits:
            merge_parts(call, args, out, lse, parts, more[0], places)
    return out, lse


_NO_TABLES: tuple[Tensor | None, Tensor | None] = (None, None)


def _descriptor(x: Tensor, block: tuple[int, int, int]) -> Descriptor:
    """Its shape and strides are the call's."""
    return x.data_ptr(), lambda: ragged(x, *block)[1]()


def _prepare(args: AttentionArgs, lse: Tensor, config: Config) -> Call:
    problem = args.problem
    steps = (lse.stride(0), lse.stride(2), lse.stride(1)) if lse.dim() == 3 else (0, lse.stride(0), lse.stride(1))
    rows = (ROWS // config.group, config.group)
    query, keys, out = (*rows, config.block_d), (config.block_n, 1, config.block_d), (*rows, config.out_columns)
    ends = (*log2_units(args.scale), problem.left, problem.right, config)
    variant, merge = Variant(forward_kernel, config.options), Variant(merge_kernel, config.options)
    redo = (Variant(forward_kernel, config.options), select(problem, redoes=1)) if config.anchored else None
    return Call(variant, (query, keys, keys, out), steps, ends, merge, config, redo)
