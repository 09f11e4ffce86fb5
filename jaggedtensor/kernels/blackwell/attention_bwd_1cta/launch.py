"""Launches the backward kernel that keeps a block of keys. Its arguments are checked already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_bwd_1cta.config import HALF, ROWS, SLICE, Config, select
from jaggedtensor.kernels.blackwell.attention_bwd_1cta.device import backward_kernel
from jaggedtensor.kernels.shared.delta import row_statistics
from jaggedtensor.kernels.shared.direct import Descriptor, launch
from jaggedtensor.kernels.shared.gradients import (
    Gradients,
    addressable,
    chosen,
    flat,
    key_of,
    new_key_gradient,
    sum_of_shares,
)
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
    problem = args.problem
    tiles, worker_offsets, *lists = args.schedule
    config = select(problem)
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        some = bool(tiles.shape[0] and q.numel())
        dk, dv = (new_key_gradient(x, args, some) for x in (k, v))
        if not some:
            return chosen(torch.zeros_like(q, memory_format=torch.contiguous_format), dk, dv, needs)
        lse, delta, steps = row_statistics(out, grad_out, grad_lse, lse)
        rows, heads = ROWS // config.group, config.group
        programs = worker_offsets.shape[0] - 1
        total, into = _query_sum(q, programs, config)
        stride = flat(q).shape[0] // rows + args.batch_size + 1
        done = k.new_zeros(problem.kv_heads, stride, dtype=torch.int32) if config.ordered else None
        launch(
            backward_kernel,
            programs,
            key_of(args),
            (
                ragged(flat(q), rows, heads, config.block_d),
                ragged(k, config.block_n, 1, config.block_d),
                ragged(v, config.block_n, 1, config.block_dv),
                ragged(flat(grad_out), rows, heads, config.block_dv),
                ragged(dk, config.block_n, 1, HALF),
                ragged(dv, config.block_n, 1, HALF),
                into,
            ),
            (
                lse,
                delta,
                *steps,
                tiles,
                worker_offsets,
                lists[0] if lists else None,
                args.q_offsets,
                args.k_offsets,
                problem.q_len or 0,
                done,
                stride,
                args.scale * math.log2(math.e),
                args.scale,
                problem.left,
                problem.right,
                config,
            ),
            config.options,
        )
        if config.workers:
            shares = total.view(problem.kv_heads, config.workers, -1, problem.head_dim)
            dq = sum_of_shares(shares, q, config.group, args.scale)
        else:
            dq = torch.mul(total, args.scale, out=torch.empty_like(total, dtype=q.dtype))
        return chosen(dq, dk, dv, needs)


def _query_sum(q: Tensor, programs: int, config: Config) -> tuple[Tensor, Descriptor]:
    """dQ in fp32, zeros to be added to: of all queries, or of a broadcast one a share for each CTA, in packed rows."""
    rows, dim = ROWS // config.group, q.shape[-1]
    if config.workers:
        total = q.new_zeros(programs * config.q_blocks * ROWS, 1, dim, dtype=torch.float32)
        return total, ragged(total, ROWS, 1, SLICE)
    total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    return total, ragged(flat(total), rows, config.group, SLICE)
