"""Launches the backward kernel, once for each gradient. Its arguments are checked already."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_bwd_wide.config import STAYING, STREAMED, Config, Gradient, select
from jaggedtensor.kernels.blackwell.attention_bwd_wide.device import gradient_kernel
from jaggedtensor.kernels.shared.delta import row_statistics
from jaggedtensor.kernels.shared.direct import Descriptor, launch
from jaggedtensor.kernels.shared.gradients import (
    Gradients,
    addressable,
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
    """dQ, dK and dV, those in `needs`: each of them is a pass."""
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        lse, delta, steps = row_statistics(out, grad_out, grad_lse, lse)
        operands, statistics = (flat(q), k, v, flat(grad_out)), (lse, delta, *steps)
        found: list[Tensor | None] = [None, None, None]
        for i, gradient in enumerate(Gradient):
            if needs[i]:
                found[i] = one_gradient(gradient, args, q, operands, statistics)
        return found[0], found[1], found[2]


def one_gradient(
    gradient: Gradient,
    args: AttentionArgs,
    q: Tensor,
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    statistics: tuple[Tensor | int, ...],
) -> Tensor:
    """`operands`: q, k, v and grad_out, each of three dimensions."""
    problem = args.problem
    config = select(problem, gradient)
    of_query, of_keys = schedules_of(args)
    tiles, worker_offsets, *lists = of_query if config.query_stays else of_keys
    _, k, v, _ = operands
    some = bool(tiles.shape[0] and q.numel())
    programs = (worker_offsets.shape[0] - 1) * config.q_blocks
    if config.shares:
        result = q.new_empty(programs * STAYING, config.columns, dtype=torch.float32)
    elif config.query_stays:  # rows that see no key have no tile
        result = torch.zeros_like(q, memory_format=torch.contiguous_format)
    else:
        result = new_key_gradient(k if config.differs else v, args, some)
    if not some:
        return torch.zeros_like(q, memory_format=torch.contiguous_format) if config.shares else result
    made = () if config.shares else (block_of(flat(result), STAYING, config.columns, config.query_stays, config),)
    launch(
        gradient_kernel,
        programs,
        key_of(args, gradient),
        (*blocks_of(operands, config), *made),
        (
            *((result,) if config.shares else ()),
            *statistics,
            tiles,
            worker_offsets,
            lists[0] if lists else None,
            args.q_offsets,
            args.k_offsets,
            problem.q_len or 0,
            args.scale * math.log2(math.e),
            args.scale if config.differs else 1.0,
            problem.left,
            problem.right,
            config,
        ),
        config.options,
    )
    if config.shares:
        shares = result.view(problem.q_heads // config.group, config.workers, -1, config.columns)
        return sum_of_shares(shares, q, config.group)
    return result


def schedules_of(args: AttentionArgs) -> tuple[list[Tensor], list[Tensor]]:
    """Tiles, worker offsets and, with a mask, the list of blocks: by queries and by keys."""
    half = len(args.schedule) // 2
    return list(args.schedule[:half]), list(args.schedule[half:])


def blocks_of(operands: tuple[Tensor, Tensor, Tensor, Tensor], config: Config) -> tuple[Descriptor, ...]:
    """What S is made of and what dP is made of: as it stays, and as it passes."""
    q, k, v, grad_out = operands
    queries, keys = ((q, config.block_d), (grad_out, config.block_dv)), ((k, config.block_d), (v, config.block_dv))
    stays, passes = (queries, keys) if config.query_stays else (keys, queries)
    return (
        *(block_of(x, STAYING, columns, config.query_stays, config) for x, columns in stays),
        *(block_of(x, STREAMED, columns, not config.query_stays, config) for x, columns in passes),
    )


def block_of(x: Tensor, rows: int, columns: int, packed: bool, config: Config) -> Descriptor:
    """A block of packed query rows has the heads of a group."""
    heads = config.group if packed else 1
    return ragged(x, rows // heads, heads, columns)
