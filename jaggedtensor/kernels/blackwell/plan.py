"""What the Blackwell kernels can serve, and the schedules that they take, asked of the layout, which keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.blackwell.attention_bwd_1cta import config as general
from jaggedtensor.kernels.blackwell.attention_bwd_2cta import config as pair
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.blackwell.attention_bwd_wide import config as wide
from jaggedtensor.kernels.blackwell.attention_fwd import config as forward
from jaggedtensor.kernels.shared.cuts import Cuts
from jaggedtensor.kernels.shared.remember import remembered
from jaggedtensor.problem import AttentionProblem
from jaggedtensor.schedules.types import ScheduleKind, TileAxis

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout


CUTS = Cuts(blocks=16, percent=200)


def lacks(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot serve a problem on an SM100 in a dtype of theirs; empty if they can."""
    reasons = []
    if problem.group > forward.ROWS:
        reasons.append(f"packs up to {forward.ROWS} query heads for each head of keys, not {problem.group}")
    dims = f"{problem.head_dim} and {problem.value_dim}"
    if max(problem.head_dim, problem.value_dim) > forward.MAX_HEAD_DIM:
        reasons.append(f"takes head dimensions up to {forward.MAX_HEAD_DIM}, not {dims}")
    elif problem.head_dim % (unit := 16 // problem.dtype.itemsize) or problem.value_dim % unit:
        reasons.append(f"takes head dimensions of whole 16 bytes (multiples of {unit}), not {dims}")
    return reasons


def _seen(
    problem: AttentionProblem, query: JaggedLayout | None, rows: int, q_rows: int, block_mask: Tensor | None = None
) -> dict[str, Any]:
    """What the schedules of a problem are all told: which queries there are, and what they see."""
    q_len = problem.q_len if query is None else query
    seen = dict(q_len=q_len, left=problem.left, right=problem.right, rows=rows, q_rows=q_rows)
    return seen if block_mask is None else seen | dict(mask=block_mask, mask_block=MASK_BLOCK)


def plan_forward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    block_mask: Tensor | None = None,
    *,
    select: Callable[[AttentionProblem], forward.Config] = forward.select,
) -> list[Tensor]:
    """Tiles, worker offsets and, with a mask, the list of blocks: the longest tiles first, dealt back and forth to one
    CTA for each multiprocessor. Where CTAs ask for the next one, their count in place of worker offsets. Where a few
    tiles are all there is to do, equal shares of all blocks, and the merges of tiles that are cut."""
    config = select(problem)
    workers = problem.device.processors
    splits = not config.answers and block_mask is None and query is None
    lines = problem.kv_heads * config.q_blocks  # tiles of each sequence
    splits = splits and CUTS.pay(keys, workers=workers, lines=lines, block_n=config.block_n)
    schedule = keys.schedule(
        ScheduleKind.STREAM_K if splits else ScheduleKind.DYNAMIC if config.answers else ScheduleKind.ZIGZAG,
        heads=problem.kv_heads,
        group=config.group,
        block_q=config.block_m,
        block_kv=config.block_n,
        workers=workers,
        tile_cost=config.tile_cost,
        **_seen(problem, query, rows, q_rows, block_mask),
    )
    owners = schedule.count if config.answers else schedule.worker_offsets
    assert owners is not None
    found = [schedule.tiles, owners]
    if splits:
        found.append(schedule.merges)
    if block_mask is not None:  # the list is None where nothing has any work
        found.append(schedule.tiles.new_empty(0) if schedule.blocks is None else schedule.blocks)
    return found


# Best first: a broadcast query of up to 128 rows keeps its gradient on the chip, and pairs of CTAs send half as much of
# it as CTAs alone. A pass for each gradient multiplies more, but takes whatever is in two bytes.
BACKWARD = {"broadcast": broadcast, "pair": pair, "general": general, "wide": wide}


@remembered
def backward_lacks(problem: AttentionProblem) -> list[str]:
    """Why these kernels cannot do the backward pass of a problem that they serve; empty if they can."""
    return broadcast.lacks(problem) and pair.lacks(problem) and general.lacks(problem) and wide.lacks(problem)


@remembered
def backward_family(problem: AttentionProblem) -> str:
    """Which of them does it: the first that lacks nothing."""
    return next(name for name, family in BACKWARD.items() if not family.lacks(problem))


def backward_told(problem: AttentionProblem) -> str:
    """Which of them does the backward pass of a problem that they serve, and why those before it do not."""
    name = backward_family(problem) if not backward_lacks(problem) else "portable"
    over = {}
    for before, family in BACKWARD.items():
        if before == name:
            break
        over[before] = " and ".join(family.lacks(problem))
    return name + (f" (passed over: {'; '.join(f'{k} {why}' for k, why in over.items())})" if over else "")


def plan_backward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    block_mask: Tensor | None = None,
) -> list[Tensor]:
    """Tiles and worker offsets, as the launcher of the family that serves the problem reads them."""
    family = backward_family(problem)
    if family == "broadcast":
        return plan_broadcast_backward(problem, keys, rows)
    if family == "pair":
        return plan_pair_backward(problem, keys, query, rows, q_rows)
    plan_of = plan_wide_backward if family == "wide" else plan_general_backward
    return plan_of(problem, keys, query, rows, q_rows, block_mask)


def plan_broadcast_backward(problem: AttentionProblem, keys: JaggedLayout, rows: int) -> list[Tensor]:
    """Equal ranges of the KV blocks of each head, over all sequences."""
    config = broadcast.select(problem)
    assert problem.q_len is not None
    schedule = keys.schedule(
        ScheduleKind.STREAM_K,
        axis=TileAxis.KEY,
        q_len=problem.q_len,
        heads=problem.kv_heads,
        group=problem.group,
        block_q=broadcast.ROWS,
        block_kv=config.block_n,
        workers=problem.kv_heads * config.workers,
        rows=rows,
    )
    return schedule.operands()


def plan_general_backward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    block_mask: Tensor | None = None,
) -> list[Tensor]:
    """KV blocks with the query blocks that see them, and with a mask the list of these. Dealt back and forth, the
    longest first; one after the other where dQ is added in the order of the keys; and where each CTA has a share of dQ,
    in equal ranges of those of a head."""
    config = general.select(problem)
    kind = ScheduleKind.ROUND_ROBIN if config.ordered else ScheduleKind.ZIGZAG
    schedule = keys.schedule(
        ScheduleKind.STREAM_K if config.workers else kind,
        axis=TileAxis.KEY,
        heads=problem.kv_heads,
        group=problem.group,
        block_q=general.ROWS,
        block_kv=config.block_n,
        workers=problem.kv_heads * config.workers if config.workers else problem.device.processors,
        tile_cost=2,
        **_seen(problem, query, rows, q_rows, block_mask),
    )
    return schedule.operands()


def plan_pair_backward(
    problem: AttentionProblem, keys: JaggedLayout, query: JaggedLayout | None, rows: int, q_rows: int
) -> list[Tensor]:
    """Blocks of keys with the query blocks that see them, dealt as in forward to pairs of CTAs."""
    schedule = keys.schedule(
        ScheduleKind.ZIGZAG,
        axis=TileAxis.KEY,
        heads=problem.kv_heads,
        group=problem.group,
        block_q=pair.ROWS,
        block_kv=pair.KEYS,
        workers=max(1, problem.device.processors // 2),
        tile_cost=2,
        **_seen(problem, query, rows, q_rows),
    )
    return schedule.operands()


def plan_wide_backward(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    block_mask: Tensor | None = None,
) -> list[Tensor]:
    """Blocks of query rows with the blocks of keys that they see, for dQ, and the other way round, for dK and dV; with
    a mask each has its list of blocks. Dealt back and forth, the longest first; where each CTA has a share of dQ, in
    equal ranges of those of a head."""
    config = wide.select(problem, wide.Gradient.QUERY)
    heads = problem.q_heads // config.group
    processors = problem.device.processors
    found = []
    for axis in (TileAxis.QUERY, TileAxis.KEY):
        by_query = axis is TileAxis.QUERY
        shares = by_query and config.shares
        schedule = keys.schedule(
            ScheduleKind.STREAM_K if shares else ScheduleKind.ZIGZAG,
            axis=axis,
            heads=heads if by_query else problem.kv_heads,
            group=config.group,
            block_q=wide.STAYING if by_query else wide.STREAMED,
            block_kv=wide.STREAMED if by_query else wide.STAYING,
            workers=heads * config.workers if shares else processors,
            tile_cost=2,
            **_seen(problem, query, rows, q_rows, block_mask),
        )
        found += schedule.operands()
    return found
