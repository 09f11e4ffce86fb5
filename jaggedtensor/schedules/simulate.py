"""How busy a schedule keeps its workers, without running it: load of each, and the time until the last is done."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor.errors import fail
from jaggedtensor.schedules.types import ScheduleKind, Tile, TileSchedule


@dataclass(frozen=True)
class CostModel:
    """What work costs, in any unit of time: by default, blocks are counted."""

    block: float = 1.0  # a (q block, KV block)
    tile: float = 0.0  # starting and ending a tile
    switch: float = 0.0  # a tile of another sequence than the worker's one before


@dataclass(frozen=True)
class Simulation:
    """Who did what when. Tensors on the CPU."""

    loads: Tensor  # float64 [workers]: when each is done
    tiles: Tensor  # int64 [n, 8], as in the schedule
    owner: Tensor  # int64 [n]
    begin: Tensor  # float64 [n]
    end: Tensor  # float64 [n]

    @property
    def makespan(self) -> float:
        """When the last worker is done."""
        return float(self.loads.max())

    @property
    def mean(self) -> float:
        """Mean load of a worker."""
        return float(self.loads.mean())

    @property
    def imbalance(self) -> float:
        """Makespan over mean: 1 is perfect, and is what no work at all gives."""
        return self.makespan / self.mean if self.mean else 1.0

    def __repr__(self) -> str:
        least, mean, most = float(self.loads.min()), self.mean, self.makespan
        return (
            f"Simulation({len(self.loads)} workers: min {least:g}, mean {mean:g}, max {most:g}, {self.imbalance:.3f})"
        )


def simulate(schedule: TileSchedule, cost: CostModel | None = None, *, delay: float = 0.0, seed: int = 0) -> Simulation:
    """Run a schedule on paper. One on a GPU is copied to the host first.

    >>> layout = JaggedLayout(torch.tensor([0, 300, 300, 400]))
    >>> simulate(layout.schedule(ScheduleKind.ZIGZAG, q_len=128, heads=4, workers=4)).imbalance
    1.0

    For `DYNAMIC`, each worker takes the next tile when it is free (at a tie, the worker of lower number).

    Args:
        delay: mean of a random, exponentially distributed delay of each tile. Only a queue can react to it.
        seed: of these delays.
    """
    cost = CostModel() if cost is None else cost
    count = int(schedule.count)
    tiles = schedule.tiles[:count].cpu().to(torch.int64)
    blocks = (tiles[:, Tile.Q_END] - tiles[:, Tile.Q_BEGIN]) * (tiles[:, Tile.KV_END] - tiles[:, Tile.KV_BEGIN])
    times = blocks.to(torch.float64) * cost.block + cost.tile
    if delay:
        times += torch.empty_like(times).exponential_(1 / delay, generator=torch.Generator().manual_seed(seed))
    if schedule.kind is ScheduleKind.DYNAMIC:
        owner, end = _take_from_queue(times, tiles[:, Tile.SEQUENCE], schedule.workers, cost.switch)
    else:
        owner = schedule.owner[:count].cpu().to(torch.int64)
        if count and not 0 <= int(owner.min()) <= int(owner.max()) < schedule.workers:
            fail("owners of the schedule", f"in 0..{schedule.workers - 1}", f"{int(owner.min())}..{int(owner.max())}")
        goes_on = (owner[1:] == owner[:-1]) & (tiles[1:, Tile.SEQUENCE] == tiles[:-1, Tile.SEQUENCE])
        times += cost.switch
        times[1:] -= goes_on * cost.switch
        totals = torch.cat((times.new_zeros(1), times.cumsum(0)))
        first = torch.searchsorted(owner, owner)  # owners never decrease
        end = totals[1:] - totals[first]
    loads = times.new_zeros(schedule.workers).scatter_reduce_(0, owner, end, "amax")
    return Simulation(loads, tiles, owner, end - times, end)


def _take_from_queue(times: Tensor, sequences: Tensor, workers: int, switch: float) -> tuple[Tensor, Tensor]:
    """Owner and end of each tile; `times` gains the switches."""
    free = [(0.0, worker) for worker in range(workers)]
    last = [-1] * workers
    owners, ends = [], []
    for place, (time, sequence) in enumerate(zip(times.tolist(), sequences.tolist(), strict=True)):
        now, worker = free[0]
        if last[worker] != sequence:
            time += switch
            times[place] += switch
        heapq.heapreplace(free, (now + time, worker))
        last[worker] = sequence
        owners.append(worker)
        ends.append(now + time)
    return torch.tensor(owners, dtype=torch.int64), torch.tensor(ends, dtype=torch.float64)
