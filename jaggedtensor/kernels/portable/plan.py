"""The schedules that the portable kernels take, asked of the layout, which keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.portable.attention_bwd import config as backward_config
from jaggedtensor.kernels.portable.attention_fwd import config as forward_config
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.schedules.types import ScheduleKind, TileAxis, TileSchedule

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout


def plan(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    train: bool,
    block_mask: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Schedules for forward and, if `train`, for backward, as the launchers read them.

    Forward: tiles. Backward: tiles and worker offsets for the broadcast kernel, the same for all parts of the query; or
    tiles for keys, then tiles for queries, with worker offsets if the query is a broadcast one. With a mask, each has
    its list of blocks after it.
    """
    mask: dict[str, Any] = {} if block_mask is None else {"mask": block_mask, "mask_block": MASK_BLOCK}

    def schedule(
        kind: ScheduleKind, axis: TileAxis, tiling: Tiling, lines: int, workers: int = 1, cost: int = 0
    ) -> TileSchedule:
        window: dict[str, Any] = {"left": problem.left, "right": problem.right}
        q_len = problem.q_len if query is None else query
        assert q_len is not None
        return keys.schedule(
            kind,
            axis=axis,
            q_len=q_len,
            heads=lines,
            group=problem.group,
            block_q=tiling.block_m,
            block_kv=tiling.block_n,
            workers=workers,
            tile_cost=cost,
            rows=rows,
            q_rows=q_rows,
            **window,
            **mask,
        )

    def dynamic(axis: TileAxis, tiling: Tiling) -> list[Tensor]:
        """The longest first, whoever is free: one program for each tile."""
        return schedule(ScheduleKind.DYNAMIC, axis, tiling, problem.kv_heads).operands()

    def shares(tiling: Tiling, lines: int, cost: int = 0) -> list[Tensor]:
        # A mask lets the q blocks of a sequence see different keys: then tiles tell which of them they are of.
        axis = TileAxis.KEY if block_mask is None else TileAxis.QUERY
        return schedule(ScheduleKind.STREAM_K, axis, tiling, lines, lines * tiling.workers, cost).operands()

    forward = dynamic(TileAxis.QUERY, forward_config.select(problem))
    if not train:
        return forward, []
    config = backward_config.select(problem)
    if config.broadcast is not None:
        # With a window a tile may be one block of keys, and not all that a program has of a sequence.
        cost = 0 if problem.windowed else backward_config.SEQUENCE_COST * config.broadcast.q_blocks
        return forward, shares(config.broadcast, problem.kv_heads, cost)
    assert config.keys is not None
    assert config.queries is not None
    backward = dynamic(TileAxis.KEY, config.keys)
    if problem.query is QueryKind.BROADCAST:
        return forward, [*backward, *shares(config.queries, problem.kv_heads * config.queries.q_blocks)]
    return forward, [*backward, *dynamic(TileAxis.QUERY, config.queries)]
