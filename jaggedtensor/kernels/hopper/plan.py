"""What the Hopper kernels can serve, and the schedules that they take, asked of the layout, which keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.hopper.attention_bwd import config as general
from jaggedtensor.kernels.hopper.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.hopper.attention_fwd.config import ROWS, Config, select
from jaggedtensor.kernels.shared.cuts import Cuts
from jaggedtensor.kernels.toolchain import newest_assembler_lacks
from jaggedtensor.problem import UNLIMITED, AttentionProblem, QueryKind
from jaggedtensor.schedules.types import ScheduleKind, TileAxis, Wave

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout

RUN = 128  # tiles of a head that forward deals before those of the next, where these share keys
CUTS = Cuts(blocks=16, percent=110, rounds=True)
PART = 8  # blocks of query rows of a part of a backward tile, at least: fewer gain nothing


def lacks(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot serve a problem on an SM90 in half precision; empty if they can."""
    reasons = []
    if problem.group > ROWS:
        reasons.append(f"packs up to {ROWS} query heads for each head of keys, not {problem.group}")
    if problem.head_dim % 8 or problem.value_dim % 8:
        dims = f"{problem.head_dim} and {problem.value_dim}"
        reasons.append(f"takes head dimensions of whole 16 bytes (multiples of 8), not {dims}")
    return reasons


def plan_forward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    block_mask: Tensor | None = None,
    config: Config | None = None,
) -> list[Tensor]:
    """Tiles, worker offsets and, with a mask, the list of blocks: the longest tiles first, dealt back and forth to as
    many CTAs as run at once. Or, where a few tiles are all there is to do, equal shares of all blocks, and the merges
    of tiles that are cut."""
    config = select(problem) if config is None else config
    q_len = problem.q_len if query is None else query
    assert q_len is not None
    mask: dict[str, Any] = {} if block_mask is None else {"mask": block_mask, "mask_block": MASK_BLOCK}
    workers = problem.device.processors * config.ctas
    splits = block_mask is None and query is None
    lines = problem.kv_heads * config.q_blocks  # tiles of each sequence
    splits = splits and CUTS.pay(keys, workers=workers, lines=lines, block_n=config.block_n)
    schedule = keys.schedule(
        ScheduleKind.STREAM_K if splits else ScheduleKind.ZIGZAG,
        q_len=q_len,
        heads=problem.kv_heads,
        group=config.group,
        block_q=config.block_m,
        block_kv=config.block_n,
        workers=workers,
        left=problem.left,
        right=problem.right,
        tile_cost=config.tile_cost,
        run=RUN if problem.query is QueryKind.JAGGED and block_mask is None else 1,
        rows=rows,
        q_rows=q_rows,
        **mask,
    )
    return [*schedule.operands(), schedule.merges] if splits else schedule.operands()  # no mask where tiles are cut


def backward_lacks(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot do the backward pass of a problem that they serve; empty if they can."""
    reasons = ["takes no block mask"] * problem.masked
    if problem.query is QueryKind.BROADCAST:
        return reasons + broadcast.lacks(problem)
    return reasons + general.lacks(problem) + newest_assembler_lacks()


def plan_backward(
    problem: AttentionProblem, keys: JaggedLayout, query: JaggedLayout | None, rows: int, q_rows: int
) -> list[Tensor]:
    """Tiles and worker offsets, as the launcher of the query's kind reads them."""
    if problem.query is QueryKind.BROADCAST:
        return plan_broadcast_backward(problem, keys, rows)
    return plan_general_backward(problem, keys, query, rows, q_rows)


def plan_broadcast_backward(problem: AttentionProblem, keys: JaggedLayout, rows: int) -> list[Tensor]:
    """Ranges of the KV blocks of all heads, over all sequences, that take as long as each other, and which CTAs have a
    part in which head."""
    config = broadcast.select(problem)
    assert problem.q_len is not None
    schedule = keys.schedule(
        ScheduleKind.STREAM_K,
        axis=TileAxis.KEY,
        q_len=problem.q_len,
        heads=problem.kv_heads,
        group=problem.group,
        block_q=config.parts * broadcast.ROWS,
        block_kv=config.block_n,
        workers=config.workers,
        tile_cost=config.tile_cost,
        rows=rows,
    )
    return [*schedule.operands(), schedule.merges]


def plan_general_backward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    least: int = PART,
    in_waves: bool | None = None,
) -> list[Tensor]:
    """KV blocks with the query blocks that see them, dealt as in forward: the longest first, and so of those that share
    queries the first keys first, as turns need it. With a limit to the left that is not so: one by one, then. The last
    tiles of sequences that are all as long may be cut into parts of `least` blocks or more; their merges come last. In
    waves there are tiles and worker offsets of each. `in_waves`: whether to; None: where that pays.

    Where the tiles of a sequence cost the same, processors are dealt a run of one head's: Q, dO and the sums of dQ that
    these share are then less than L2 holds. Not in turns, where they would wait for each other, and not where queries
    are others than keys: few of them would be added to by many tiles at once."""
    q_len = problem.q_len if query is None else query
    alike = query is keys and not (problem.windowed or problem.deterministic)
    assert q_len is not None
    one_by_one = problem.deterministic and problem.left != UNLIMITED
    in_waves = waves_pay(problem, keys, query) if in_waves is None else in_waves
    schedules = [
        keys.schedule(
            ScheduleKind.ROUND_ROBIN if one_by_one else ScheduleKind.ZIGZAG,
            axis=TileAxis.KEY,
            q_len=q_len,
            heads=problem.kv_heads,
            group=problem.group,
            block_q=general.ROWS,
            block_kv=general.KEYS,
            workers=problem.device.processors,
            left=problem.left,
            right=problem.right,
            tile_cost=2,
            cut_last_round=0 if problem.deterministic or wave in (Wave.FIRST, Wave.LAST) else least,
            wave=wave,
            run=problem.device.processors if alike and wave in (Wave.ALL, Wave.MIDDLE) else 1,
            rows=rows,
            q_rows=q_rows,
        )
        for wave in ((Wave.FIRST, Wave.MIDDLE, Wave.LAST) if in_waves else (Wave.ALL,))
    ]
    tables = [table for schedule in schedules for table in schedule.operands()]
    return tables + [schedule.merges for schedule in schedules if schedule.slots]


def waves_pay(problem: AttentionProblem, keys: JaggedLayout, query: JaggedLayout | None) -> bool:
    """Whether tiles may come in waves, and the host knows that each keeps all processors busy.

    The first and the last wave have a tile for each sequence and head of keys: their last rounds must leave processors
    idle for no more than a fiftieth of all rounds, and the longest sequence at most a processor's share, by some.
    """
    if torch.compiler.is_compiling() or problem.windowed or problem.deterministic:
        return False
    longest, tokens, batch = keys.longest_on_host, keys.known_num_tokens, keys.batch_size
    most, queries = problem.q_len, batch * (problem.q_len or 0)
    if query is not None:
        most, queries = query.longest_on_host, query.known_num_tokens or 0
    if longest is None or tokens is None or most is None or not general.pays(queries * problem.group, batch):
        return False
    processors, heads = problem.device.processors, problem.kv_heads
    idle = -batch * heads % processors
    return 100 * idle * general.KEYS <= heads * tokens and 4 * most * processors <= 5 * heads * queries
