"""Schedules run on paper, and how well they balance."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.schedules import Tile, TileAxis
from jaggedtensor.schedules.simulate import CostModel, simulate
from jaggedtensor.testing import offsets_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from lengths import lengths


def schedule_of(lengths, kind, **options):
    layout = JaggedLayout(offsets_of(lengths) if isinstance(lengths, list) else offsets_of(lengths.tolist()))
    return layout.schedule(kind, **(dict(q_len=1, heads=1, workers=2, block_kv=1) | options))


def test_loads_are_blocks_tiles_and_switches():
    # Worker 0 has the tiles of sequences 0 and 1, worker 1 those of sequences 2 and 3.
    schedule = schedule_of([3, 5, 1, 4], ScheduleKind.CONTIGUOUS)
    assert simulate(schedule).loads.tolist() == [8, 5]
    assert simulate(schedule, CostModel(block=2, tile=10, switch=100)).loads.tolist() == [236, 230]
    run = simulate(schedule, CostModel(tile=1))
    assert run.owner.tolist() == [0, 0, 1, 1]
    assert run.begin.tolist() == [0, 4, 0, 2]
    assert run.end.tolist() == [4, 10, 2, 7]
    assert (run.makespan, run.mean, run.imbalance) == (10, 8.5, 10 / 8.5)
    assert repr(run) == "Simulation(2 workers: min 7, mean 8.5, max 10, 1.176)"


def test_tiles_of_one_sequence_are_no_switch():
    schedule = schedule_of([3, 5], ScheduleKind.CONTIGUOUS, q_len=3, block_q=1, workers=1)
    assert simulate(schedule, CostModel(block=0, switch=1)).loads.tolist() == [2]


def test_queue_gives_the_next_tile_to_whoever_is_free():
    schedule = schedule_of([6, 5, 4, 3, 2], ScheduleKind.DYNAMIC)
    run = simulate(schedule)
    assert run.owner.tolist() == [0, 1, 1, 0, 0]  # 6 | 5, then 4 at 5, 3 at 6, 2 at 9 (the lower number at a tie)
    assert run.loads.tolist() == [11, 9]
    assert simulate(schedule, CostModel(switch=1)).loads.tolist() == [14, 11]


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4), st.sampled_from(list(ScheduleKind)))
def test_no_work_is_lost_on_paper(lengths, workers, kind):
    run = simulate(schedule_of(lengths, kind, workers=workers, heads=2))
    assert float(run.loads.sum()) == 2 * sum(lengths)
    busy = Counter()
    for owner, begin, end, tile in zip(*(x.tolist() for x in (run.owner, run.begin, run.end, run.tiles)), strict=True):
        assert begin == busy[owner]  # nobody waits, and nobody does two things at once
        assert end - begin == tile[Tile.KV_END] - tile[Tile.KV_BEGIN]
        busy[owner] = end


def test_nothing_to_do_is_balanced():
    run = simulate(schedule_of([0, 0], ScheduleKind.ZIGZAG))
    assert (run.makespan, run.imbalance) == (0, 1)


def test_delays_are_random_but_the_same_from_run_to_run():
    schedule = schedule_of([4] * 50, ScheduleKind.CONTIGUOUS)
    calm, delayed, again, other = (
        simulate(schedule, delay=delay, seed=seed) for delay, seed in ((0, 0), (2, 0), (2, 0), (2, 1))
    )
    assert delayed.makespan > calm.makespan
    assert torch.equal(delayed.loads, again.loads)
    assert not torch.equal(delayed.loads, other.loads)


def test_only_a_queue_reacts_to_delays():
    batch = lengths("uniform")
    common = dict(q_len=128, heads=4, workers=132, block_kv=128)
    queue, zigzag = (
        simulate(schedule_of(batch, kind, **common), delay=4.0).imbalance
        for kind in (ScheduleKind.DYNAMIC, ScheduleKind.ZIGZAG)
    )
    assert queue < 1.03
    assert zigzag > 1.06


@pytest.mark.parametrize("workers", [132, 148])
@pytest.mark.parametrize("name", ["uniform", "lognormal", "tail"])
def test_balance_is_what_the_benchmark_promises(name, workers):
    batch = lengths(name)
    common = dict(q_len=128, heads=4, workers=workers, block_kv=128)
    runs = {kind: simulate(schedule_of(batch, kind, **common)) for kind in ScheduleKind}
    assert runs[ScheduleKind.STREAM_K].imbalance <= 1.005
    assert runs[ScheduleKind.ZIGZAG].makespan <= 1.03 * runs[ScheduleKind.LPT].makespan
    backward = simulate(schedule_of(batch, ScheduleKind.STREAM_K, axis=TileAxis.KEY, **common))
    assert backward.imbalance <= 1.005


def test_weighing_tiles_balances_them():
    """With a cost for each tile, equal numbers of blocks are unequal loads: short sequences are mostly that cost."""
    cost = CostModel(tile=1)
    for kind in (ScheduleKind.STREAM_K, ScheduleKind.ZIGZAG, ScheduleKind.LPT):
        common = dict(q_len=128, heads=4, workers=132, block_kv=128)
        blind, weighed = (
            simulate(schedule_of(lengths("tail"), kind, tile_cost=weight, **common), cost).imbalance
            for weight in (0, 1)
        )
        assert weighed < 1.01 < blind


def test_owners_out_of_range_are_refused():
    schedule = schedule_of([3, 5], ScheduleKind.ZIGZAG)
    schedule.owner[0] = 7
    with pytest.raises(ValueError, match=r"owners of the schedule must be in 0\.\.1, got 1\.\.7"):
        simulate(schedule)


def test_lengths_are_the_same_everywhere():
    """Of the workloads that published figures are for: their tokens are part of what was measured."""
    tokens = {name: int(lengths(name).sum()) for name in ("uniform", "lognormal", "tail", "self-uniform", "dense")}
    assert tokens == {"uniform": 2067608, "lognormal": 1671053, "tail": 654550, "self-uniform": 254932, "dense": 32768}
