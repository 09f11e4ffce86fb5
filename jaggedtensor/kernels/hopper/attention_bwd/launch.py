"""Launches the backward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.columns import columns_of, divisible
from jaggedtensor.kernels.hopper.attention_bwd.config import COLUMNS, KEYS, ROWS, pays, select
from jaggedtensor.kernels.hopper.attention_bwd.device import backward_kernel
from jaggedtensor.kernels.hopper.attention_bwd.parts import merge, scratch
from jaggedtensor.kernels.hopper.attention_bwd.total import blocks_of, unpacked, workspace
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.gradients import (
    Gradients,
    addressable,
    chosen,
    flat,
    key_of,
    new_key_gradient,
    scaled,
)
from jaggedtensor.kernels.shared.ragged import device_of, ragged
from jaggedtensor.kernels.shared.slack import clear_slack
from jaggedtensor.problem import AttentionArgs


def new_query_gradient(args: AttentionArgs, some: bool) -> Tensor:
    """Of the last wave, which writes dQ of every sequence that has keys: 0 elsewhere."""
    itself = args.q_offsets is not None and args.q_offsets.data_ptr() == args.k_offsets.data_ptr()
    if not (some and (itself or args.complete)):
        return torch.zeros_like(args.q, memory_format=torch.contiguous_format)
    dq = torch.empty_like(args.q, memory_format=torch.contiguous_format)
    return clear_slack(dq, args.q_offsets) if args.slack and args.q_offsets is not None else dq


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """dQ, dK and dV, all of which come from one pass; those in `needs` are given back."""
    problem, schedule = args.problem, args.schedule
    waves = list(zip(schedule[::2], schedule[1::2], strict=False))  # tiles and worker offsets of each
    merges = schedule[-1] if len(schedule) % 2 else None
    config = select(problem)
    batch = args.k_offsets.shape[0] - 1
    rows = args.q.numel() // (args.q.shape[-1] * problem.kv_heads)  # packed ones of a head of keys
    config = replace(config, packed=not config.ordered and pays(rows, batch), cut=merges is not None)
    in_waves = len(waves) > 1
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        some = bool(any(tiles.shape[0] for tiles, _ in waves) and q.numel())
        dk, dv = (new_key_gradient(x, args, some) for x in (k, v))
        blocks = blocks_of(rows, batch) if config.packed else rows // ROWS + batch + 1  # of a head, at most
        if config.packed:
            total, added = workspace(problem.kv_heads, blocks, config, q.device, not in_waves)
        else:
            total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            added = ragged(flat(total), ROWS // config.group, config.group, config.half)
        dq = new_query_gradient(args, some) if in_waves else dk
        if some:
            scale = divisible(args.scale)
            q = q if scale == args.scale else torch.zeros_like(q)
            columns = columns_of(out, grad_out, grad_lse, lse, scale)
            rows, heads, workers = ROWS // config.group, config.group, waves[0][1].shape[0] - 1
            turns = q.new_zeros(problem.kv_heads * blocks, dtype=torch.int32) if config.ordered else waves[0][1]
            parts = scratch(workers, config, q.device) if config.cut else None
            descriptors = (
                ragged(flat(q), rows, heads, config.block_d),
                ragged(k, KEYS // 2, 1, config.block_d),
                ragged(v, KEYS // 2, 1, config.block_dv),
                ragged(flat(grad_out), rows, heads, config.block_dv),
                ragged(columns, rows, heads, COLUMNS),
                ragged(dk, KEYS // 2, 1, config.half),
                ragged(dv, KEYS // 2, 1, ROWS),
                ragged(flat(dq), rows, heads, config.half),
                added,
            )
            for wave, (tiles, worker_offsets) in enumerate(waves):
                last = wave == 2
                mine = replace(config, cut=False, last=True) if last else config
                if tiles.shape[0]:
                    launch(
                        backward_kernel,
                        workers,
                        key_of(args, mine),
                        descriptors,
                        (
                            turns,
                            blocks,
                            int(in_waves and wave == 0),
                            None if last else parts,
                            tiles,
                            worker_offsets,
                            args.q_offsets,
                            args.k_offsets,
                            problem.q_len or 0,
                            scale * math.log2(math.e),
                            args.scale,
                            problem.left,
                            problem.right,
                            mine,
                        ),
                        mine.options,
                    )
            if parts is not None and merges is not None:
                merge(parts, merges, dk, dv, args, config)
        if in_waves:
            return chosen(dq, dk, dv, needs)
        if needs[0]:
            total = unpacked(total, args, blocks, config) if config.packed else scaled(total, args.scale, q.dtype)
        return chosen(total, dk, dv, needs)
