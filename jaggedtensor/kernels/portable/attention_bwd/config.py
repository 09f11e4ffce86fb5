"""Which kernels serve a backward pass, and their blocks, as measured on an H200 (docs/kernels/portable.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from jaggedtensor.kernels.portable.tiling import Tiling, block_of, single_side, tiling_of, widest
from jaggedtensor.problem import AttentionProblem, QueryKind


@dataclass(frozen=True)
class Config:
    """Either `broadcast` (dK, dV and dQ in one pass), or `keys` (dK, dV) and `queries` (dQ)."""

    keys: Tiling | None = None
    queries: Tiling | None = None
    broadcast: Tiling | None = None


def select(problem: AttentionProblem) -> Config:
    """A pure function of the problem; never tuned at a user's first call."""
    wide, size = widest(problem), problem.dtype.itemsize
    shared = problem.query is QueryKind.BROADCAST
    rows = 1 << 30 if problem.rows is None else problem.rows
    single, side = problem.dtype == torch.float32, single_side(wide)

    def operands(t: Tiling, rows: int) -> int:
        return size * rows * (t.block_d + t.block_dv)

    def scores(t: Tiling) -> int:
        return size * t.block_m * t.block_n

    # dQ of all rows of the query must fit into the registers of one program.
    if shared and rows * wide <= (64 * 64 if single else 128 * 128) and rows <= 128:
        m = block_of(rows, 128)
        if single:
            blocks, residents = Tiling(m, 32, num_warps=4, num_stages=1), 1
        elif m == 128 and wide > 64:
            blocks, residents = Tiling(m, 64, num_warps=8, num_stages=3), 1
        else:
            blocks, residents = Tiling(m, 64, num_warps=4, num_stages=3 if m == 128 else 2), 2

        def of_broadcast(t: Tiling) -> int:
            """Q and dO, a ring of K and V, P or dS on its way from rows to keys."""
            return operands(t, t.block_m) + t.num_stages * operands(t, t.block_n) + scores(t)

        tiling = tiling_of(problem, blocks, of_broadcast)
        if tiling.block_m >= rows:
            return Config(broadcast=replace(tiling, workers=_workers(problem, problem.kv_heads, residents)))

    if single:
        blocks = Tiling(block_of(rows, side), side, num_warps=4, num_stages=1)
    elif wide > 128:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=8, num_stages=1)
    else:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=4, num_stages=2)

    def of_keys(t: Tiling) -> int:
        """K and V, a ring of Q and dO, P or dS on its way from rows to keys."""
        return operands(t, t.block_n) + t.num_stages * operands(t, t.block_m) + scores(t)

    keys = tiling_of(problem, blocks, of_keys)

    residents = 1
    if single:
        blocks = Tiling(block_of(rows, side), side, num_warps=4, num_stages=1)
    elif wide > 128:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=8, num_stages=2)
    elif shared and rows > 64:
        blocks, residents = Tiling(128, 32, num_warps=4, num_stages=3), 2
    elif rows > 64:
        blocks = Tiling(128, 64, num_warps=8, num_stages=3)
    else:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=4, num_stages=2)

    def of_queries(t: Tiling) -> int:
        """Q and dO, a ring of K and V."""
        return operands(t, t.block_m) + t.num_stages * operands(t, t.block_n)

    queries = tiling_of(problem, blocks, of_queries)
    if shared:
        q_blocks = max(1, -(-rows // queries.block_m))
        workers = _workers(problem, problem.kv_heads * q_blocks, residents)
        queries = replace(queries, q_blocks=q_blocks, workers=workers)
    return Config(keys=keys, queries=queries)


def _workers(problem: AttentionProblem, lines: int, residents: int) -> int:
    """Programs for each line of a schedule, so that they fill the processors about `residents` times."""
    return max(1, -(-problem.device.processors * residents // lines))
