"""The schedules that the portable kernels take, asked of the layout, which keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from jaggedtensor.kernels.portable.attention_bwd import config as backward_config
from jaggedtensor.kernels.portable.attention_fwd import config as forward_config
from jaggedtensor.kernels.portable.tiling import Tiling
from jaggedtensor.problem import AttentionProblem
from jaggedtensor.schedules.types import ScheduleKind, TileAxis, TileSchedule

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout


def plan(
    problem: AttentionProblem, keys: JaggedLayout, query: JaggedLayout | None, rows: int, q_rows: int, train: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Schedules for forward and, if `train`, for backward, as the launchers read them.

    Forward: tiles. Backward: tiles and worker offsets for the broadcast kernel; or tiles for keys, then tiles for
    queries, with worker offsets if the query is a broadcast one.
    """

    def schedule(kind: ScheduleKind, axis: TileAxis, tiling: Tiling, lines: int, workers: int = 1) -> TileSchedule:
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
            rows=rows,
            q_rows=q_rows,
            **window,
        )

    def shares(tiling: Tiling) -> list[Tensor]:
        lines = problem.kv_heads * tiling.q_blocks
        made = schedule(ScheduleKind.STREAM_K, TileAxis.KEY, tiling, lines, lines * tiling.workers)
        assert made.worker_offsets is not None
        return [made.tiles, made.worker_offsets]

    # The longest first, whoever is free: one program for each tile.
    forward = [schedule(ScheduleKind.DYNAMIC, TileAxis.QUERY, forward_config.select(problem), problem.kv_heads).tiles]
    if not train:
        return forward, []
    config = backward_config.select(problem)
    if config.broadcast is not None:
        return forward, shares(config.broadcast)
    assert config.keys is not None
    assert config.queries is not None
    backward = [schedule(ScheduleKind.DYNAMIC, TileAxis.KEY, config.keys, problem.kv_heads).tiles]
    if config.queries.workers > 1 or problem.query.name == "BROADCAST":
        return forward, [*backward, *shares(config.queries)]
    queries = schedule(ScheduleKind.DYNAMIC, TileAxis.QUERY, config.queries, problem.kv_heads)
    return forward, [*backward, queries.tiles]
