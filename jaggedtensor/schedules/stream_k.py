"""STREAM_K: every worker gets an equal contiguous share of all blocks (Osama et al. 2023, "Stream-K").

The blocks of a head, unit after unit, are a line, and the lines of the heads follow each other. Worker w has what lies
between `w * total // workers` and `(w + 1) * total // workers`. Where heads divide workers, each head has a team of its
own; otherwise a worker in whose share a head ends goes on with the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor.schedules.deal import Dealt, owners
from jaggedtensor.schedules.types import Merge, ScheduleRequest, Tile, TileAxis
from jaggedtensor.schedules.valid_tiles import Units


@dataclass(frozen=True)
class _Cuts:
    """Where the line is cut, `[workers + 1]` int64: worker w has what is from cut w to cut w + 1."""

    unit: Tensor  # that a cut goes through, or stands before
    place: Tensor  # this unit in the line of all heads
    step: Tensor  # how far into the unit
    whole: Tensor  # step == 0: nothing is cut

    def rows(self) -> Tensor:
        """`[workers]`: tiles of each. Cuts at the same place leave the worker between them nothing."""
        passed = self.place.diff()
        return passed + (self.step[1:] > (passed == 0) * self.step[:-1])


def stream_k(units: Units, request: ScheduleRequest) -> tuple[Dealt, Tensor]:
    """The tiles, and the `merges`."""
    cuts = _cut(units, request)
    offsets = torch.nn.functional.pad(cuts.rows().cumsum(0), (1, 0))
    total = offsets[-1]

    # One row more than there can be, for all that is written of cuts between units.
    capacity = stream_k_rows(units.capacity, request)
    tile = torch.arange(capacity + 1, device=total.device)
    surplus = tile >= total
    worker = owners(offsets, tile).clamp_(max=request.workers - 1)
    place = tile + (cuts.place - offsets)[worker]  # in the line of all heads
    head = place // units.count.clamp(min=1)
    tiles = units.rows.index_select(0, (place - head * units.count).masked_fill_(surplus, units.capacity))
    tiles[:, Tile.HEAD] = head.masked_fill_(surplus, 0)

    # The rows on both sides of a cut are parts of a unit.
    before, after = ((offsets - side).masked_fill_(cuts.whole, capacity) for side in (1, 0))
    at = units.rows[:, Tile.KV_BEGIN][cuts.unit] + cuts.step.to(torch.int32)
    tiles[:, Tile.KV_END].index_put_((before,), at)
    tiles[:, Tile.KV_BEGIN].index_put_((after,), at)
    if request.axis is TileAxis.QUERY:
        merge, slot, merges = _parts_of_units(units, cuts)
        for rows, part in ((before, slot - 1), (after, slot)):
            tiles[:, Tile.MERGE].index_put_((rows[1:],), merge)
            tiles[:, Tile.SLOT].index_put_((rows[1:],), part)
    else:
        slot, merges = _parts_of_heads(units, cuts, request)
        tiles[:, Tile.MERGE] = head.masked_fill_(surplus, -1)
        tiles[:, Tile.SLOT] = (slot[worker] + head).masked_fill_(surplus, -1)
    return Dealt(tiles[:-1], worker.masked_fill_(surplus, -1)[:-1], offsets, total), merges


def stream_k_rows(capacity: int, request: ScheduleRequest) -> int:
    """Each cut between two workers makes one tile more, at most."""
    return capacity * request.heads + request.workers - 1 if capacity else 0


def stream_k_slots(request: ScheduleRequest) -> int:
    """A unit that is cut c times has c + 1 <= 2c parts; a worker changes its head where a head ends."""
    if request.axis is TileAxis.QUERY:
        return 2 * (request.workers - 1)
    return request.workers + request.heads - 1


def _cut(units: Units, request: ScheduleRequest) -> _Cuts:
    fixed = request.tile_cost
    cost = units.cost if not fixed else units.cost + fixed * (units.cost > 0)
    ends = cost.cumsum(0)  # of a head
    total = ends[-1]
    # Where heads divide workers, a head has a team of its own, also where a team has more workers than steps.
    teams = request.heads if request.workers % request.heads == 0 else 1
    size, line = request.workers // teams, total * (request.heads // teams)
    # A worker has at least one step, or nothing and comes last: no two cuts are at the same place inside a unit.
    workers = line.clamp(min=1, max=size)
    worker = torch.arange(request.workers + 1, device=cost.device)
    share = worker // size * line + (worker % size).clamp_(max=workers) * line // workers
    head = share // total.clamp(min=1)
    into = share - head * total
    unit = torch.searchsorted(ends, into, right=True).clamp_(max=units.capacity)
    into = into - (ends - cost)[unit]
    if fixed:  # a cut before the unit's first block leaves it whole
        into = (into - fixed).clamp(min=0)
    if units.weight is not None:
        into = into // units.weight[unit].clamp(min=1)
    return _Cuts(unit, head * units.count + unit, into, into == 0)


def _parts_of_units(units: Units, cuts: _Cuts) -> tuple[Tensor, Tensor, Tensor]:
    """Each worker that has a part of a unit has a partial result of it. Merge, and slot of the part after it, of all
    cuts but the first, `[workers]` int32; and the merges, `[workers - 1, 6]` int32.

    A cut makes one part more, and one more yet if it is the first in its unit and so opens a merge.
    """
    workers = cuts.place.shape[0] - 1
    through = cuts.place.masked_fill(cuts.whole, -1)
    whole = cuts.whole[1:]
    opens = (through[1:] != through[:-1]) > whole
    merge = opens.cumsum(0)
    slot = merge - whole.cumsum(0) + torch.arange(workers, device=merge.device)

    opened = torch.searchsorted(merge, torch.arange(1, workers + 1, device=merge.device))
    none = opened == workers
    opened.clamp_(max=workers - 1)
    begins = torch.where(none, slot[-1] + 1, slot[opened] - 1)
    head = cuts.place[1:][opened] // units.count.clamp(min=1)
    rows = units.rows[cuts.unit[1:][opened].masked_fill_(none, units.capacity)]
    merges = torch.stack((rows[:, Tile.SEQUENCE], head, rows[:, Tile.Q_BEGIN], rows[:, Tile.Q_END], begins), 1)[:-1]
    merges = torch.cat((merges, begins.diff()[:, None]), 1)
    merges[:, Merge.HEAD :].masked_fill_(none[:-1, None], 0)
    return (merge - 1).to(torch.int32), slot.to(torch.int32), merges.to(torch.int32)


def _parts_of_heads(units: Units, cuts: _Cuts, request: ScheduleRequest) -> tuple[Tensor, Tensor]:
    """What a worker gathers over its tiles of a head has one slot. `[workers]`: slot less head, of the tiles of each;
    and the merges, `[heads, 6]` int32."""
    count = units.count.clamp(min=1)
    first, last = cuts.place[:-1] // count, cuts.place[1:] - cuts.whole[1:].to(torch.int64)
    slots = (last // count - first + 1) * (cuts.rows() > 0)
    base = slots.cumsum(0) - slots - first
    number = torch.arange(request.heads, device=base.device)
    begun_by = torch.searchsorted(last, number * units.count).clamp_(max=request.workers - 1)
    begins = torch.cat(((base[begun_by] + number) * (units.count > 0), slots.sum()[None]))
    merges = torch.zeros(request.heads, len(Merge), dtype=torch.int32, device=base.device)
    merges[:, Merge.SEQUENCE] = -1
    merges[:, Merge.HEAD] = number
    merges[:, Merge.END] = q_blocks(request)
    merges[:, Merge.SLOT] = begins[:-1]
    merges[:, Merge.PARTS] = begins.diff()
    return base, merges


def q_blocks(request: ScheduleRequest) -> int:
    """Blocks of a query that all sequences share; 0 for queries of various lengths, whose gradients are not one sum."""
    return -(-request.q_len * request.group // request.block_q) if isinstance(request.q_len, int) else 0


def no_merges(request: ScheduleRequest, device: torch.device) -> Tensor:
    """The `merges` of a batch without tiles: with `TileAxis.KEY`, each head's sum has no parts and is 0."""
    rows = request.workers - 1 if request.axis is TileAxis.QUERY else request.heads
    merges = torch.zeros(rows, len(Merge), dtype=torch.int32, device=device)
    merges[:, Merge.SEQUENCE] = -1
    if request.axis is TileAxis.KEY:
        merges[:, Merge.HEAD] = torch.arange(rows, device=device)
        merges[:, Merge.END] = q_blocks(request)
    return merges
