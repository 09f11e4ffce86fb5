"""Schedules by keys in three waves: the first KV block of each sequence, those between, and the last."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.kernels.hopper.plan import plan_general_backward
from jaggedtensor.ops.plan import machine_of, plan_of
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.schedules import Tile, TileAxis, Wave
from jaggedtensor.schedules.simulate import simulate
from jaggedtensor.testing import offsets_of

WAVES = (Wave.FIRST, Wave.MIDDLE, Wave.LAST)


def ask(layout, wave=Wave.ALL, kind=ScheduleKind.ZIGZAG, **options):
    settings = dict(q_len=layout, axis=TileAxis.KEY, heads=2, workers=6, block_q=2, block_kv=2, wave=wave)
    return layout.schedule(kind, **settings | options)


def rows_of(schedule):
    return schedule.tiles[: int(schedule.count)].tolist()


@st.composite
def cases(draw):
    batch = draw(st.integers(1, 6))
    lengths = st.lists(st.integers(0, 12), min_size=batch, max_size=batch)
    queries = draw(st.sampled_from(["themselves", "others", 0, 5]))
    return dict(
        lengths=[draw(st.integers(1, 12))] * batch if draw(st.booleans()) else draw(lengths),
        queries=draw(lengths) if queries == "others" else queries,
        kind=draw(st.sampled_from([kind for kind in ScheduleKind if kind is not ScheduleKind.STREAM_K])),
        heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from([1, 2])),
        workers=draw(st.sampled_from([1, 2, 4, 7])),
        block_kv=draw(st.sampled_from([1, 2, 3])),
        tile_cost=draw(st.sampled_from([0, 2])),
    )


@given(cases())
def test_each_tile_is_in_the_wave_of_its_place_and_costs_what_it_does_without_waves(case):
    layout, queries = JaggedLayout(offsets_of(case["lengths"])), case["queries"]
    q_len = JaggedLayout(offsets_of(queries)) if isinstance(queries, list) else queries
    q_len = layout if queries == "themselves" else q_len
    options = {name: case[name] for name in ("kind", "heads", "group", "workers", "block_kv", "tile_cost")}
    everything = rows_of(ask(layout, q_len=q_len, **options))
    blocks = [-(-length // case["block_kv"]) for length in case["lengths"]]
    in_waves = Counter()
    for wave in WAVES:
        schedule = ask(layout, wave, q_len=q_len, **options)
        for row in rows_of(schedule):
            block, last = row[Tile.KV_BEGIN], blocks[row[Tile.SEQUENCE]] - 1
            assert (block == last) == (wave is Wave.LAST)
            assert (block == 0 < last) == (wave is Wave.FIRST)
            in_waves[tuple(row)] += 1
        if len({*case["lengths"]}) == 1 and queries == "themselves":
            assert schedule.capacity == int(schedule.count)
    assert in_waves == Counter(map(tuple, everything))


def test_layouts_of_which_the_host_knows_only_bounds_have_room():
    layout = JaggedLayout.with_capacity(4, 40, 20)
    for lengths in ([20, 0, 3, 17], [1, 1, 1, 1], [0, 0, 0, 0], [20, 20, 0, 0]):
        layout.copy_(offsets_of(lengths))
        plain = rows_of(ask(layout))
        waves = [rows_of(ask(layout, wave)) for wave in WAVES]
        assert sorted(itertools.chain(*waves)) == sorted(plain)


def test_waves_of_a_dense_batch_take_no_longer_and_the_middle_one_is_cut():
    layout = JaggedLayout(offsets_of([4096] * 8))
    common = dict(heads=16, workers=132, block_q=64, block_kv=128, cut_last_round=8)
    waves = [ask(layout, wave, **common) for wave in WAVES]
    assert [schedule.slots for schedule in waves] == [0, 96, 0]
    together = simulate(ask(layout, **common)).makespan
    assert sum(simulate(schedule).makespan for schedule in waves) == pytest.approx(together, rel=2e-3)


def test_waves_are_told_apart_and_refused_where_tiles_are_no_whole_blocks():
    layout = JaggedLayout(offsets_of([5, 0, 9]))
    assert ask(layout, Wave.FIRST) is ask(layout, Wave.FIRST) is not ask(layout, Wave.LAST)
    ask(layout, Wave.FIRST).require(layout, wave=Wave.FIRST)
    with pytest.raises(ValueError, match=r"wave of the schedule must be Wave\.LAST, got Wave\.FIRST"):
        ask(layout, Wave.FIRST).require(layout, wave=Wave.LAST)
    mask = torch.ones(3, 5, 5, dtype=torch.bool)
    for refused in (dict(axis=TileAxis.QUERY), dict(right=0), dict(mask=mask), dict(kind=ScheduleKind.STREAM_K)):
        with pytest.raises(ValueError, match=r"wave must be Wave\.ALL unless whole KV blocks stay"):
            ask(layout, Wave.LAST, **refused)
    with pytest.raises(TypeError, match="wave must be a Wave"):
        ask(layout, "first")


@pytest.mark.parametrize(
    ("lengths", "heads", "waves"),
    [
        ([4096] * 8, 16, True),
        ([100] * 4096, 4, True),
        ([4096] * 9, 16, False),  # 144 first tiles for 132 processors: two rounds
        ([2048] * 3, 4, False),
        ([*range(1000), 200000], 4, False),  # one sequence is most of the work
        ([1] * 4096, 4, False),  # blocks of 64 rows for a row each
        ([0] * 8, 16, False),
    ],
    ids=["dense", "many", "two rounds", "few", "a giant", "of one token", "empty"],
)
def test_the_hopper_backward_asks_for_waves_where_each_keeps_processors_busy(lengths, heads, waves):
    layout, rows = JaggedLayout(offsets_of(lengths)), sum(lengths)
    problem = AttentionProblem(
        QueryKind.JAGGED, None, heads, heads, 128, 128, torch.bfloat16, Device("cuda", (9, 0), 132, 227 << 10)
    )
    assert len(plan_general_backward(problem, layout, layout, rows, rows)) // 2 == (3 if waves else 1)
    for other in (dict(right=0), dict(left=5), dict(deterministic=True)):
        assert len(plan_general_backward(replace(problem, **other), layout, layout, rows, rows)) == 2


def test_the_hopper_backward_is_at_work_on_few_heads_at_once():
    """On Q, dO and dQ of at most 6 sequences and heads, where L2 holds 12; in turns on 16 and more."""
    layout, rows = JaggedLayout(offsets_of([4096] * 8)), 8 * 4096
    problem = AttentionProblem(
        QueryKind.JAGGED, None, 16, 16, 128, 128, torch.bfloat16, Device("cuda", (9, 0), 132, 227 << 10)
    )

    def most_at_once(problem, wave, query=layout, **options):
        schedule = plan_general_backward(problem, layout, query, rows, rows, **options)
        tiles, ends = (x.tolist() for x in schedule[2 * wave : 2 * wave + 2])
        hands = [tiles[a:b] for a, b in itertools.pairwise(ends)]
        turns = itertools.zip_longest(*hands, fillvalue=(0, 0))
        return [len({(tile[Tile.SEQUENCE], tile[Tile.HEAD]) for tile in turn}) for turn in turns]

    assert max(most_at_once(problem, 1)[:-1]) <= 6
    assert max(most_at_once(problem, 0, in_waves=False)[:-1]) <= 6
    assert min(most_at_once(replace(problem, deterministic=True), 0)[:-1]) >= 16
    assert min(most_at_once(problem, 0, query=JaggedLayout(offsets_of([64] * 8)))[:-1]) >= 16


def test_a_plan_says_which_wave_a_schedule_is_of():
    lengths = torch.tensor([4096] * 8)
    problem = AttentionProblem(
        QueryKind.JAGGED, None, 16, 16, 128, 128, torch.bfloat16, Device("cuda", (9, 0), 132, 227 << 10)
    )
    text = str(plan_of(problem, lengths, lengths, machine=machine_of("h200"), backend="hopper"))
    for wave in ("first", "middle", "last"):
        assert f"backward  zigzag by key: the {wave} wave, tiles cost" in text
    assert "forward   zigzag by query: tiles cost" in text
