"""Launches the backward kernels. Their arguments are checked already."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from jaggedtensor.kernels.portable.attention_bwd.config import Config, select
from jaggedtensor.kernels.portable.attention_bwd.device import (
    broadcast_kernel,
    delta_kernel,
    keys_kernel,
    queries_kernel,
)
from jaggedtensor.kernels.portable.operands import (
    are_aligned,
    columns_together,
    device_of,
    of_keys,
    of_queries,
    of_statistics,
)
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.kernels.shared.rows import Operand
from jaggedtensor.kernels.shared.slack import clear_kernel
from jaggedtensor.problem import AttentionArgs, AttentionProblem, QueryKind

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@functools.lru_cache(maxsize=512)
def config_of(problem: AttentionProblem, flip: bool, aligned: bool) -> Config:
    config = select(problem)
    every = (config.keys, config.queries, config.broadcast)
    return Config(*(t and replace(t, flip=flip, aligned=aligned) for t in every))


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """The gradients in `needs`; what is not needed is not computed."""
    problem = args.problem
    q, k, v, grad_out = (columns_together(x) for x in (args.q, args.k, args.v, grad_out))
    aligned = are_aligned(problem, q, k, v, grad_out)
    config = config_of(problem, args.scale < 0, aligned)
    dk, dv = (_new_like(x, args) if need else None for x, need in ((k, needs[1]), (v, needs[2])))
    with device_of(args):
        statistics = _statistics(args, grad_out, grad_lse, out, lse, aligned)
        common = (of_queries(q), of_keys(k), of_keys(v), of_queries(grad_out), statistics)
        scales = (abs(args.scale) * math.log2(math.e), args.scale)
        window = (problem.left, problem.right)
        offsets, q_len = (args.q_offsets, args.k_offsets), problem.q_len or 0
        key_grads = tuple(None if x is None else of_keys(x) for x in (dk, dv))

        tiling = config.broadcast
        if tiling is not None:
            tiles, worker_offsets = args.schedule
            shares = _new_shares(k, tiling, problem) if needs[0] else None
            # In one stream: a part adds to what the one before has stored, in this order every time.
            for part in range(tiling.q_blocks if tiles.shape[0] and q_len else 0):
                broadcast_kernel[(problem.kv_heads * tiling.workers,)](
                    *common, *key_grads, _of_shares(shares), (tiles, worker_offsets), args.k_offsets, q_len, scales,
                    window, part, tiling, part > 0, **tiling.options,
                )  # fmt: skip
            return _sum_of_shares(shares, tiles, args, tiling), dk, dv

        assert config.keys is not None
        assert config.queries is not None
        of_broadcast = problem.query is QueryKind.BROADCAST
        parts = iter(args.schedule)
        key_tiles = next(parts)
        key_list = next(parts) if problem.masked else None
        tiles = next(parts)
        shared_out = next(parts) if of_broadcast else None  # worker offsets
        key_schedule, schedule = (key_tiles, key_list), (tiles, shared_out, next(parts, None))
        if (needs[1] or needs[2]) and key_tiles.shape[0]:
            tiling = config.keys
            keys_kernel[(key_tiles.shape[0],)](
                *common, *key_grads, key_schedule, offsets, q_len, scales, window, tiling, **tiling.options
            )
        if not needs[0]:
            return None, dk, dv
        tiling = config.queries
        if of_broadcast:
            shares = _new_shares(k, tiling, problem)
            if tiles.shape[0] and q_len:
                queries_kernel[(shares.shape[0],)](
                    *common, _of_shares(shares), schedule, offsets, q_len, scales, window, tiling,
                    **tiling.options,
                )  # fmt: skip
            return _sum_of_shares(shares, tiles, args, tiling), dk, dv
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)  # rows that see no key have no tile
        if tiles.shape[0]:
            queries_kernel[(tiles.shape[0],)](
                *common, of_queries(dq), schedule, offsets, q_len, scales, window, tiling, **tiling.options
            )
        return dq, dk, dv


def _new_like(x: Tensor, args: AttentionArgs) -> Tensor:
    """dK or dV: zeros where some keys may have no tile; else only slack is cleared, as every token is written."""
    problem = args.problem
    if problem.windowed or problem.masked or args.q_offsets is not None or problem.q_len == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    if args.slack and gradient.numel():
        rows, width = x.shape[0], x.shape[1] * x.shape[2]
        with device_of(args):
            clear_kernel[(-(-rows // 64),)](
                gradient, args.k_offsets, args.batch_size, rows, WIDTH=width, BLOCK=64, enable_fp_fusion=True
            )
    return gradient


def _statistics(
    args: AttentionArgs, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, aligned: bool
) -> tuple[Operand, Operand]:
    """(lse, delta)."""
    jagged = args.q_offsets is not None
    delta = torch.empty_like(lse)
    if delta.numel():
        total, inner = out.shape[:-2].numel(), out.shape[-3]
        tiling = Tiling(64, 16, num_warps=4, num_stages=1, value_dim=out.shape[-1], aligned=aligned)
        tiling = replace(tiling, block_dv=max(16, 1 << (out.shape[-1] - 1).bit_length()))
        delta_kernel[(-(-total // tiling.block_m), out.shape[-2])](
            of_queries(out),
            of_queries(grad_out),
            None if grad_lse is None else of_statistics(grad_lse, jagged),
            of_statistics(delta, jagged),
            total,
            inner,
            tiling,
            **tiling.options,
        )
    return of_statistics(lse, jagged), of_statistics(delta, jagged)


def _new_shares(k: Tensor, tiling: Tiling, problem: AttentionProblem) -> Tensor:
    """fp32 `[heads * q_blocks * workers, block_m, D]`: a program's share of a broadcast query's gradient."""
    programs = problem.kv_heads * tiling.q_blocks * tiling.workers
    return k.new_empty(programs, tiling.block_m, problem.head_dim, dtype=torch.float32)


def _of_shares(shares: Tensor | None) -> Operand | None:
    return None if shares is None else Operand(shares, shares.stride(0), shares.stride(1), 0)


def _sum_of_shares(shares: Tensor | None, tiles: Tensor, args: AttentionArgs, tiling: Tiling) -> Tensor | None:
    """`[Lq, Hq, D]`: summed over the workers in their order, and rounded once."""
    if shares is None:
        return None
    if tiles.shape[0] == 0 or args.q.numel() == 0:
        return args.q.new_zeros(args.q.shape)
    problem = args.problem
    heads, rows, width = problem.kv_heads, problem.rows, problem.head_dim
    total = shares.view(heads, tiling.q_blocks, tiling.workers, tiling.block_m, width).sum(2)
    packed = total.flatten(1, 2)[:, :rows].unflatten(1, (-1, problem.group))  # [Hkv, Lq, group, D]
    return packed.transpose(0, 1).flatten(1, 2).to(args.q.dtype).contiguous()  # the strides that the fake promises
