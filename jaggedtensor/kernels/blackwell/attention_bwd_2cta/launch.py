"""Launches the backward kernel of pairs of CTAs. Its arguments are checked already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_bwd_2cta.config import ADDED, HALF, KEYS, ROWS, select
from jaggedtensor.kernels.blackwell.attention_bwd_2cta.device import pair_kernel
from jaggedtensor.kernels.shared.delta import row_statistics
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.gradients import Gradients, addressable, chosen, flat, key_of, new_key_gradient
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
    problem, (tiles, worker_offsets) = args.problem, args.schedule
    config = select(problem)
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        some = bool(tiles.shape[0] and q.numel())
        dk, dv = (new_key_gradient(x, args, some) for x in (k, v))
        if not some:
            return chosen(torch.zeros_like(q, memory_format=torch.contiguous_format), dk, dv, needs)
        lse, delta, steps = row_statistics(out, grad_out, grad_lse, lse)
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        queries, grads, rows, heads = flat(q), flat(grad_out), ROWS // config.group, config.group
        launch(
            pair_kernel,
            worker_offsets.shape[0] - 1,
            key_of(args),
            (
                ragged(k, KEYS, 1, config.block_d, "rows"),
                ragged(k, KEYS, 1, config.block_d, "columns"),
                ragged(v, KEYS, 1, config.block_dv, "rows"),
                ragged(queries, rows, heads, config.block_d, "rows"),
                ragged(queries, rows, heads, config.block_d, "columns"),
                ragged(grads, rows, heads, config.block_dv, "rows"),
                ragged(grads, rows, heads, config.block_dv, "columns"),
                ragged(dk, KEYS, 1, HALF, "rows"),
                ragged(dv, KEYS, 1, HALF, "rows"),
                ragged(flat(total), rows, heads, ADDED, "rows"),
            ),
            (
                lse,
                delta,
                *steps,
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
        dq = torch.mul(total, args.scale, out=torch.empty_like(total, dtype=q.dtype))
        return chosen(dq, dk, dv, needs)
