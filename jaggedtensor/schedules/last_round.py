"""The last round of ZIGZAG, cut where all tiles cost the same: whole tiles keep few workers busy there.

A team of W workers has n tiles that all cost the same: each worker gets n // W of them, and n % W are left for a
round of their own. Each of these is cut into as many parts as there are workers for, and each part is the last item of
another worker. All other tiles stay in their order, and so at about the same time as others of their sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor.schedules.types import Merge, ScheduleRequest, Tile, TileAxis
from jaggedtensor.schedules.valid_tiles import Units


@dataclass(frozen=True)
class LastRound:
    """Which tiles of each team are cut, and into what: numbers of the host alone. The items of a team are its whole
    tiles, and then the parts of the others."""

    teams: int
    whole: int  # tiles of a team
    left: int  # tiles of a team, after these, that are cut
    parts: int  # of each

    @classmethod
    def of(cls, units: Units, request: ScheduleRequest) -> LastRound | None:
        """None where no tile is to be cut, or none can be."""
        teams = request.teams
        workers, tiles = request.workers // teams, units.capacity * (request.heads // teams)
        left = tiles % workers
        if not (left and request.cut_last_round):
            return None
        parts = min(workers // left, units.each // request.cut_last_round)
        return cls(teams, tiles - left, left, parts) if parts > 1 else None

    @property
    def more(self) -> int:
        """Items of a team beyond its tiles."""
        return self.left * (self.parts - 1)

    @property
    def slots(self) -> int:
        """Scratch rows, one for each part: at most one for each worker."""
        return self.teams * self.left * self.parts

    def costs(self, units: Units) -> Tensor:
        """Int64, of a team's items, and 0 after them."""
        costs = units.cost.new_full((self.whole + self.left * self.parts + 1,), units.each)
        costs[self.whole :].fill_(units.each // self.parts)
        costs[-1:].zero_()  # an assignment to a place would be a copy of a number, for which the host waits
        return costs

    def tiles(self, items: Tensor) -> Tensor:
        """The tile of each item of a team."""
        return torch.where(items < self.whole, items, self.whole + (items - self.whole) // self.parts)

    def cut(self, tiles: Tensor, team: Tensor, items: Tensor, axis: TileAxis) -> None:
        """Leave rows of the schedule that are parts their share of the passing blocks. The parts of a tile have slots
        one after the other, in the order of these blocks."""
        number = items - self.whole
        whole = number < 0
        begin, end = (Tile.KV_BEGIN, Tile.KV_END) if axis is TileAxis.QUERY else (Tile.Q_BEGIN, Tile.Q_END)
        part = (number % self.parts).to(torch.int32)
        first, length = tiles[:, begin].clone(), tiles[:, end] - tiles[:, begin]
        for column, until in ((begin, part), (end, part + 1)):
            tiles[:, column] = torch.where(whole, tiles[:, column], first + length * until // self.parts)
        slot = (team * (self.left * self.parts) + number).masked_fill_(whole, -1)
        tiles[:, Tile.SLOT] = slot
        tiles[:, Tile.MERGE] = (slot // self.parts).masked_fill_(whole, -1)

    def merges(self, units: Units, request: ScheduleRequest) -> Tensor:
        """Int32 `[teams * left, 6]`."""
        heads = request.heads // self.teams
        number = torch.arange(self.teams * self.left, device=units.cost.device)
        tile = self.whole + number % self.left
        unit, head = units.spread(tile, heads, request.run)
        rows = units.rows[unit]
        begin, end = (Tile.Q_BEGIN, Tile.Q_END) if request.axis is TileAxis.QUERY else (Tile.KV_BEGIN, Tile.KV_END)
        merges = torch.empty(number.shape[0], len(Merge), dtype=torch.int32, device=number.device)
        merges[:, Merge.SEQUENCE] = rows[:, Tile.SEQUENCE]
        merges[:, Merge.HEAD] = number // self.left * heads + head
        merges[:, Merge.BEGIN] = rows[:, begin]
        merges[:, Merge.END] = rows[:, end]
        merges[:, Merge.SLOT] = number * self.parts
        merges[:, Merge.PARTS] = self.parts
        return merges
