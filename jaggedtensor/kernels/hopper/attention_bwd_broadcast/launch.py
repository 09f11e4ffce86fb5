"""Launches the backward kernel for a broadcast query. Its arguments are checked already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd_broadcast.config import ROWS, select
from jaggedtensor.kernels.hopper.attention_bwd_broadcast.device import broadcast_kernel
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.gradients import Gradients, addressable, chosen, key_of, new_gradient, sum_of_slots
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
    problem, (tiles, worker_offsets, merges) = args.problem, args.schedule
    config = select(problem)
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        dk, dv = (new_gradient(x, args) for x in (k, v))
        if not tiles.shape[0]:
            return chosen(torch.zeros_like(q, memory_format=torch.contiguous_format), dk, dv, needs)
        programs = (worker_offsets.shape[0] - 1) * config.parts
        rows, heads = ROWS // config.group, config.group
        slots = config.workers + problem.kv_heads - 1  # of the schedule, at most
        shares = k.new_empty(slots, config.parts * ROWS, config.block_d, dtype=torch.float32)
        progress = worker_offsets if config.parts == 1 else k.new_zeros(2 * programs, dtype=torch.int32)
        launch(
            broadcast_kernel,
            programs,
            key_of(args, grad_lse is not None),
            (
                ragged(q, rows, heads, config.block_d),
                ragged(k, config.block_n, 1, config.block_d),
                ragged(v, config.block_n, 1, config.block_dv),
                ragged(grad_out.flatten(0, 1), rows, heads, config.block_dv),
                ragged(dk, config.block_n, 1, config.block_d),
                ragged(dv, config.block_n, 1, config.block_dv),
            ),
            (
                lse.contiguous(),
                None if grad_lse is None else grad_lse.contiguous(),
                out.contiguous(),
                shares,
                progress,
                tiles,
                worker_offsets,
                args.k_offsets,
                problem.q_len,
                args.scale * math.log2(math.e),
                args.scale,
                config,
            ),
            config.options,
        )
        return chosen(sum_of_slots(shares, merges, q, config.group), dk, dv, needs)
