"""Launches the backward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.config import KEYS, ROWS, select
from jaggedtensor.kernels.hopper.attention_bwd.device import backward_kernel
from jaggedtensor.kernels.hopper.attention_bwd.parts import merge, scratch
from jaggedtensor.kernels.hopper.attention_bwd.total import blocks_of, pays, unpacked, workspace
from jaggedtensor.kernels.shared.delta import row_statistics
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.gradients import Gradients, addressable, chosen, flat, key_of, new_key_gradient, scaled
from jaggedtensor.kernels.shared.ragged import device_of, ragged
from jaggedtensor.problem import AttentionArgs


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """dQ, dK and dV, all of which come from one pass; those in `needs` are given back."""
    problem, (tiles, worker_offsets, *merges) = args.problem, args.schedule
    config = select(problem)
    batch = args.k_offsets.shape[0] - 1
    rows = args.q.numel() // (args.q.shape[-1] * problem.kv_heads)  # packed ones of a head of keys
    config = replace(config, packed=not config.ordered and pays(rows, batch), cut=bool(merges))
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        some = bool(tiles.shape[0] and q.numel())
        dk, dv = (new_key_gradient(x, args, some) for x in (k, v))
        blocks = blocks_of(rows, batch) if config.packed else rows // ROWS + batch + 1  # of a head, at most
        if config.packed:
            total, added = workspace(problem.kv_heads, blocks, config, q.device)
        else:
            total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            added = ragged(flat(total), ROWS // config.group, config.group, config.half)
        if some:
            lse, delta, steps = row_statistics(out, grad_out, grad_lse, lse)
            rows, heads = ROWS // config.group, config.group
            turns = q.new_zeros(problem.kv_heads * blocks, dtype=torch.int32) if config.ordered else tiles
            parts = scratch(worker_offsets.shape[0] - 1, config, q.device) if config.cut else None
            launch(
                backward_kernel,
                worker_offsets.shape[0] - 1,
                key_of(args, config.packed, config.cut),
                (
                    ragged(flat(q), rows, heads, config.block_d),
                    ragged(k, KEYS // 2, 1, config.block_d),
                    ragged(v, KEYS // 2, 1, config.block_dv),
                    ragged(flat(grad_out), rows, heads, config.block_dv),
                    ragged(dk, KEYS // 2, 1, config.block_d),
                    ragged(dv, KEYS // 2, 1, ROWS),
                    added,
                ),
                (
                    lse,
                    delta,
                    *steps,
                    turns,
                    blocks,
                    parts,
                    tiles,
                    worker_offsets,
                    args.q_offsets,
                    args.k_offsets,
                    problem.q_len or 0,
                    args.scale * math.log2(math.e),
                    args.scale,
                    problem.left,
                    problem.right,
                    config,
                ),
                config.options,
            )
            if parts is not None:
                merge(parts, merges[0], dk, dv, args, config)
        if needs[0]:
            total = unpacked(total, args, blocks, config) if config.packed else scaled(total, args.scale, q.dtype)
        return chosen(total, dk, dv, needs)
