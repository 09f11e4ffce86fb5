"""Whole tiles dealt to workers: CONTIGUOUS, ROUND_ROBIN, ZIGZAG, LPT, and the queue of DYNAMIC.

Heads have the same tiles, so the tiles of one head are listed, sorted and dealt once. Heads and workers are divided
into as many teams as both can be divided into, gcd(heads, workers): with 4 heads, 132 workers make 4 teams of 33, each
with a head of its own, and the query that a team keeps on chip never changes. Within a team the heads of a tile are
dealt one after another. All teams deal alike, so the heads of a sequence are read at about the same time. With a `run`
of a request, as many tiles of a head are dealt before those of the next, so that few heads are at work at once; with a
run as long as there are workers, all are of one team.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor.schedules.last_round import LastRound
from jaggedtensor.schedules.types import ScheduleKind, ScheduleRequest, Tile
from jaggedtensor.schedules.valid_tiles import Units


@dataclass(frozen=True)
class Dealt:
    """Tiles in their final order."""

    tiles: Tensor  # int32 [capacity, 8]
    owner: Tensor  # int64 [capacity], -1 past the count
    offsets: Tensor | None  # int64 [workers + 1]
    count: Tensor  # int64, no dimension


@dataclass(frozen=True)
class _Hands:
    """What each worker of a team holds, hand after hand: places in the list of the team's tiles, and whose hand it is.
    `[n]`, with anything past the last hand; hands begin and end at `ends`, `[workers + 1]`. All int64."""

    places: Tensor
    owners: Tensor
    ends: Tensor


def deal(units: Units, request: ScheduleRequest, last: LastRound | None = None) -> Dealt:
    """Tiles in an order and with owners, by the kind of the request; those of the last round in parts, if it is cut."""
    kind = request.kind
    cost, order = units.cost, None  # of units, in the order of dealing
    if kind in (ScheduleKind.ZIGZAG, ScheduleKind.DYNAMIC, ScheduleKind.LPT):
        cost, order = cost.to(_key_type(units.most)).sort(descending=True, stable=True)
    if kind is ScheduleKind.DYNAMIC:
        assert order is not None
        return _queue(units, order, request)

    teams = request.teams
    heads, workers = request.heads // teams, request.workers // teams
    items = units.count * heads
    places = units.capacity * heads
    if last is not None:
        items, places = items + last.more, places + last.more
        hands = _zigzag(last.costs(units), places, 1, workers, request.tile_cost)
    elif kind is ScheduleKind.CONTIGUOUS:
        hands = _contiguous(items, places, workers)
    elif kind is ScheduleKind.ROUND_ROBIN:
        hands = _round_robin(items, places, workers)
    elif kind is ScheduleKind.ZIGZAG and request.run > 1:
        unit, _ = units.spread(torch.arange(places, device=items.device), heads, request.run)
        costs = torch.cat((cost[unit], cost.new_zeros(1)))  # what is dealt after the last item
        hands = _zigzag(costs, places, 1, workers, request.tile_cost)
    elif kind is ScheduleKind.ZIGZAG:
        hands = _zigzag(cost, places, heads, workers, request.tile_cost)
    else:
        hands = _least_loaded(cost, places, heads, workers, request.tile_cost)

    tile = torch.arange(places * teams, device=items.device)
    total = items * teams
    surplus = tile >= total
    one = items.clamp(min=1)
    team = tile // one
    inside = tile - team * one
    line = hands.places if last is None else last.tiles(hands.places)
    unit, mine = units.spread(line, heads, request.run)
    unit = (unit if order is None else order[unit])[inside]
    head = team * heads
    if heads > 1:
        head = head + mine[inside]
    owner = team * workers + hands.owners[inside]
    offsets = torch.arange(teams, device=items.device)[:, None] * items + hands.ends[:-1]
    offsets = torch.cat((offsets.flatten(), total[None]))
    tiles = _tiles(units, unit, head, surplus)
    if last is not None:
        last.cut(tiles, team, hands.places[inside], request.axis)
    return Dealt(tiles, owner.masked_fill_(surplus, -1), offsets, total)


def deal_items(cost: Tensor, workers: int, kind: ScheduleKind) -> Tensor:
    """The worker of each item, int64 `[n]`, for items that are no tiles: sequences dealt to ranks, for example.

    Args:
        cost: int64 `[n]`, 0 and more; an item of no cost is dealt as one of 1.
        kind: `CONTIGUOUS`, `ROUND_ROBIN`, `ZIGZAG` or `LPT`.
    """
    count, order = cost.shape[0], None
    if kind in (ScheduleKind.ZIGZAG, ScheduleKind.LPT):
        cost, order = cost.clamp(min=1).sort(descending=True, stable=True)
        cost = torch.cat((cost, cost.new_zeros(1)))  # what is dealt after the last item
    items = torch.tensor(count, device=cost.device)
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=cost.device)
    if kind is ScheduleKind.CONTIGUOUS:
        hands = _contiguous(items, count, workers)
    elif kind is ScheduleKind.ROUND_ROBIN:
        hands = _round_robin(items, count, workers)
    elif kind is ScheduleKind.ZIGZAG:
        hands = _zigzag(cost, count, 1, workers, 0)
    else:
        hands = _least_loaded(cost, count, 1, workers, 0)
    places = hands.places if order is None else order[hands.places]
    return torch.empty_like(places).scatter_(0, places, hands.owners)


def _tiles(units: Units, unit: Tensor, head: Tensor, surplus: Tensor) -> Tensor:
    """Rows of the schedule; the last unit is surplus."""
    tiles = units.rows.index_select(0, unit.masked_fill_(surplus, units.capacity))
    tiles[:, Tile.HEAD] = head.masked_fill_(surplus, 0)
    return tiles


def _key_type(largest: int) -> torch.dtype:
    """Sorting takes a pass over each byte of a key."""
    return torch.int16 if largest < 2**15 else torch.int32 if largest < 2**31 else torch.int64


def _contiguous(items: Tensor, places: int, workers: int) -> _Hands:
    place = torch.arange(places, device=items.device)
    ends = torch.arange(workers + 1, device=items.device) * items // workers
    return _Hands(place, owners(ends, place), ends)


def owners(ends: Tensor, place: Tensor) -> Tensor:
    """The worker w with `ends[w] <= place < ends[w + 1]`.

    All ends are searched, since torch.compile cannot search a part of a tensor on a GPU (torch 2.11).
    """
    return torch.searchsorted(ends, place, right=True) - 1


def _round_robin(items: Tensor, places: int, workers: int) -> _Hands:
    """One tile to each worker in turn."""
    worker = torch.arange(workers + 1, device=items.device)
    ends = worker * (items // workers) + torch.minimum(worker, items % workers)
    place = torch.arange(places, device=items.device)
    owner = owners(ends, place)
    turn = place - ends[owner]
    return _Hands((turn * workers + owner).clamp_(max=places - 1), owner, ends)


def _zigzag(cost: Tensor, places: int, heads: int, workers: int, tile_cost: int) -> _Hands:
    """Longest first, one to each worker in turn, in rounds that go 0 .. W-1, W-1 .. 0, 0 .. W-1: who got the longest of
    one round gets the shortest of the next.

    That alone leaves those who hold a giant with too much: the costs of a heavy tail curve, so the longest and the
    shortest of two rounds are more than two of the middle. What a hand has over the mean, its last and shortest tiles,
    is handed on to those with less. Then no load is over the mean by more than the cost of a tile handed on, unless a
    single tile is.
    """
    rounds = -(-places // workers)
    rounds += rounds % 2
    place = torch.arange(rounds * workers, device=cost.device)
    mine = cost[(place // heads).clamp_(max=cost.shape[0] - 1)].to(torch.int64)
    busy = mine > 0
    if tile_cost:
        mine = mine + busy * tile_cost
    mine, busy = _there_and_back(mine, workers), _there_and_back(busy, workers)
    sums = mine.cumsum(0)  # (rounds, workers)
    loads = sums[-1]
    level = (loads.sum() + (workers - 1)) // workers
    keeps = sums <= level
    keeps[0] = True
    given = busy > keeps
    pool = mine * given
    room = (level - loads + pool.sum(0)).clamp_(min=0).cumsum(0)
    pool = pool.flatten()
    to = torch.searchsorted(room, pool.cumsum(0) - pool, right=True).clamp_(max=workers - 1).view(rounds, workers)
    worker = torch.arange(workers + 1, device=cost.device)
    owner = torch.where(given, to, worker[:-1]).masked_fill_(~busy, workers)
    # A stable sort keeps each hand in the order of dealing, from long to short.
    owner, dealt = _there_and_back(owner.to(_key_type(workers)), workers).flatten().sort(stable=True)
    owner = owner[:places].to(torch.int64)
    return _Hands(dealt[:places].clamp_(max=places - 1), owner, torch.searchsorted(owner, worker))


def _there_and_back(x: Tensor, workers: int) -> Tensor:
    """What is in the order of dealing as `(rounds, workers)` by who gets it, or what is by who gets it as dealt."""
    rounds = x.reshape(-1, 2, workers)
    return torch.stack((rounds[:, 0], rounds[:, 1].flip(-1)), 1).view(-1, workers)


def _queue(units: Units, order: Tensor, request: ScheduleRequest) -> Dealt:
    """The order of a queue: longest first, the heads of a tile after each other."""
    tile = torch.arange(units.capacity * request.heads, device=order.device)
    count = units.count * request.heads
    tiles = _tiles(units, order[tile // request.heads], tile % request.heads, tile >= count)
    return Dealt(tiles, torch.full_like(tile, -1), None, count)


def _least_loaded(cost: Tensor, places: int, heads: int, workers: int, tile_cost: int) -> _Hands:
    """Graham's LPT rule ("Bounds on multiprocessing timing anomalies", 1969), on the host: it waits for a GPU."""
    free = [(0, worker) for worker in range(workers)]
    hands: list[list[int]] = [[] for _ in range(workers)]
    items = [length + tile_cost for length in cost.tolist() if length for _ in range(heads)]
    for place, length in enumerate(items):
        load, worker = free[0]
        hands[worker].append(place)
        heapq.heapreplace(free, (load + length, worker))
    unused = [0] * (places - len(items))
    dealt = torch.tensor([place for hand in hands for place in hand] + unused, dtype=torch.int64)
    owner = torch.tensor([w for w, hand in enumerate(hands) for _ in hand] + unused, dtype=torch.int64)
    ends = torch.tensor([0, *map(len, hands)]).cumsum(0)
    return _Hands(dealt.to(cost.device), owner.to(cost.device), ends.to(cost.device))
