"""Which kernels serve a backward pass, and their blocks: measured on an H200 for half precision and D <= 128
(docs/kernels/portable.md), elsewhere such as compile without spills to speak of (benchmarks/compile_check.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from jaggedtensor.kernels.portable.tiling import Tiling, block_of, single_side, tiling_of, widest
from jaggedtensor.problem import AttentionProblem, QueryKind

MOST_PARTS = 4  # of a broadcast query: measured up to here, where what is read and written again is half hidden
SEQUENCE_COST = 2  # what a sequence costs a program of a broadcast query beside its blocks of keys, in such blocks


@dataclass(frozen=True)
class Config:
    """Either `broadcast` (dK, dV and dQ in one pass for each of its `q_blocks` parts of the query), or `keys` (dK, dV)
    and `queries` (dQ)."""

    keys: Tiling | None = None
    queries: Tiling | None = None
    broadcast: Tiling | None = None


def select(problem: AttentionProblem) -> Config:
    """A pure function of the problem; never tuned at a user's first call."""
    wide, size = widest(problem), problem.dtype.itemsize
    shared = problem.query is QueryKind.BROADCAST
    rows = 1 << 30 if problem.rows is None else problem.rows
    single, side = problem.dtype == torch.float32, single_side(wide)
    hopper, tensor_memory = problem.device.arch[0] == 9, problem.device.arch[0] in (10, 11)

    def operands(t: Tiling, rows: int) -> int:
        return size * rows * (t.block_d + t.block_dv)

    def scores(t: Tiling) -> int:
        """P and dS, and barriers."""
        return 2 * size * t.block_m * t.block_n + 2048

    # dQ of all rows of a part must fit into the registers of one program, beside Q and dO before Hopper.
    fitting = 32 * 64 if single else 128 * 128 if hopper or tensor_memory else 128 * 64
    m, residents = block_of(rows, 128), 1
    parts = max(1, -(-rows // m))
    # Blocks of keys that no query sees are not met: a mask takes the other two kernels, which read lists.
    of_one_pass = shared and not problem.masked and not (single and wide > 128)
    if of_one_pass and min(rows, m) * wide <= fitting and parts <= MOST_PARTS:
        if single:
            blocks = Tiling(m, 32 if wide <= 64 else 16, num_warps=8 if m > 16 else 4, num_stages=1)
        elif wide > 128:
            blocks = Tiling(m, 64 if hopper else 32, num_warps=8 if hopper or m > 16 else 4, num_stages=2)
        elif m == 128 and wide > 64:
            blocks = Tiling(m, 64 if hopper else 32, num_warps=8, num_stages=3)
        elif hopper or m * wide < 64 * 128:
            measured = m == 64 and problem.head_dim == problem.value_dim == wide  # others spill more, and were not
            n = 32 if m * wide == 128 * 64 and not measured else 64
            blocks, residents = Tiling(m, n, num_warps=4, num_stages=3 if m == 128 else 2), 2
        else:
            blocks = Tiling(m, 64 if tensor_memory or m < 128 else 32, num_warps=8, num_stages=2)

        def turned(t: Tiling) -> bool:
            """Hopper's instruction has 64 rows at least: for fewer keys, those of dV and dK are columns."""
            return hopper and not single and t.block_m == 128 and t.block_n < 64 <= min(t.block_d, t.block_dv)

        def of_broadcast(t: Tiling) -> int:
            """Q and dO, a ring of K and V, P and dS on their way from rows to keys; in tensor memory's way, K again;
            Q and dO again where Hopper's instruction takes one of their products and not the other."""
            ring = t.num_stages + (tensor_memory and t.num_stages > 1)
            again = t.num_stages * size * t.block_n * t.block_d if tensor_memory else 0
            again += operands(t, t.block_m) if hopper and t.block_n < 64 <= t.block_m and not turned(t) else 0
            return operands(t, t.block_m) + ring * operands(t, t.block_n) + scores(t) + again

        tiling = tiling_of(problem, blocks, of_broadcast)
        if tiling.block_m == m:
            workers = _workers(problem, problem.kv_heads, residents)
            reduces = problem.device.arch[0] >= 9 and not tiling.widen  # the interpreter cannot add bf16
            late = hopper and m == 128 and tiling.block_n == 64 and not single  # where it was measured
            return Config(
                broadcast=replace(
                    tiling, q_blocks=parts, workers=workers, reduces=reduces, late=late, turned=turned(tiling)
                )
            )

    if single:
        blocks = Tiling(block_of(rows, side), side, num_warps=8 if wide > 32 else 4, num_stages=1)
    elif wide > 128:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=8, num_stages=1)
    else:
        few = wide <= 64 or hopper or tensor_memory
        blocks = Tiling(block_of(rows, 64), 64, num_warps=4 if few else 8, num_stages=2)

    def of_keys(t: Tiling) -> int:
        """K and V, a ring of Q and dO, P and dS on their way from rows to keys; for tensor memory, Q and dO again."""
        ring = t.num_stages + (tensor_memory and t.num_stages > 1)
        return operands(t, t.block_n) + ring * operands(t, t.block_m) + scores(t)

    keys = tiling_of(problem, blocks, of_keys)

    residents = 1
    if single:
        blocks = Tiling(block_of(rows, side), 16 if wide > 64 else side, num_warps=4, num_stages=1)
    elif wide > 128:
        blocks = Tiling(block_of(rows, 64), 32, num_warps=8, num_stages=2)
    elif shared and rows > 64:
        blocks, residents = Tiling(128, 32, num_warps=4, num_stages=3), 2
    elif rows > 64:
        blocks = Tiling(128, 64, num_warps=8, num_stages=3)
    else:
        blocks = Tiling(block_of(rows, 64), 64, num_warps=4, num_stages=2)

    def of_queries(t: Tiling) -> int:
        """Q and dO, a ring of K and V, and barriers; for tensor memory, K again."""
        again = size * t.block_n * t.block_d if tensor_memory else 0
        return operands(t, t.block_m) + t.num_stages * operands(t, t.block_n) + again + 2048

    queries = tiling_of(problem, blocks, of_queries)
    if shared:
        q_blocks = max(1, -(-rows // queries.block_m))
        workers = _workers(problem, problem.kv_heads * q_blocks, residents)
        queries = replace(queries, q_blocks=q_blocks, workers=workers)
    return Config(keys=keys, queries=queries)


def _workers(problem: AttentionProblem, lines: int, residents: int) -> int:
    """Programs for each line of a schedule, so that they fill the processors about `residents` times."""
    return max(1, -(-problem.device.processors * residents // lines))
