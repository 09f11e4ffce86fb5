"""The last round of zigzag, cut between workers that would have nothing to do: what is cut, and into what."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.schedules import Merge, Tile, TileAxis
from jaggedtensor.schedules.simulate import simulate
from jaggedtensor.testing import offsets_of


def ask(layout, *, kind=ScheduleKind.ZIGZAG, **options):
    return layout.schedule(kind, **(dict(q_len=layout, heads=2, workers=6, block_q=2, block_kv=2) | options))


def hands_of(schedule):
    """Tiles of each worker, in order."""
    tiles, ends = schedule.tiles.tolist(), schedule.worker_offsets.tolist()
    return [tiles[begin:end] for begin, end in itertools.pairwise(ends)]


def columns(axis):
    """Of the blocks that stay, and of those that pass."""
    q, kv = (Tile.Q_BEGIN, Tile.Q_END), (Tile.KV_BEGIN, Tile.KV_END)
    return (q, kv) if axis is TileAxis.QUERY else (kv, q)


@st.composite
def cases(draw):
    shared = draw(st.booleans())
    return dict(
        batch=draw(st.integers(1, 5)),
        length=draw(st.integers(1, 40)),
        queries=draw(st.integers(1, 40)) if shared else None,
        axis=draw(st.sampled_from(list(TileAxis))),
        heads=draw(st.integers(1, 6)),
        group=draw(st.sampled_from([1, 1, 2, 3])),
        workers=draw(st.sampled_from([1, 2, 4, 6, 7, 12, 33])),
        block_q=draw(st.sampled_from([1, 2, 4])),
        block_kv=draw(st.sampled_from([1, 2, 3])),
        tile_cost=draw(st.sampled_from([0, 0, 2])),
        least=draw(st.sampled_from([1, 1, 2, 3, 5])),
        run=draw(st.sampled_from([1, 1, 2, 7])),
    )


@given(cases())
def test_every_block_is_computed_once_in_whole_tiles_or_in_parts_that_are_the_last_items(case):
    keys = JaggedLayout(offsets_of([case["length"]] * case["batch"]))
    q_len = keys if case["queries"] is None else case["queries"]
    names = ("axis", "heads", "group", "workers", "block_q", "block_kv", "tile_cost", "run")
    options = {name: case[name] for name in names}
    schedule = ask(keys, q_len=q_len, cut_last_round=case["least"], **options)
    plain = ask(keys, q_len=q_len, **options)
    q_blocks = -(-(case["queries"] or case["length"]) * case["group"] // case["block_q"])
    kv_blocks = -(-case["length"] // case["block_kv"])
    hands, tiles = hands_of(schedule), schedule.tiles.tolist()
    covered = Counter(
        (row[Tile.SEQUENCE], row[Tile.HEAD], q, kv)
        for row in itertools.chain(*hands)
        for q in range(row[Tile.Q_BEGIN], row[Tile.Q_END])
        for kv in range(row[Tile.KV_BEGIN], row[Tile.KV_END])
    )
    everything = itertools.product(range(case["batch"]), range(case["heads"]), range(q_blocks), range(kv_blocks))
    assert covered == Counter(everything)
    assert all(x is None or x.dtype == torch.int32 for x in schedule.tensors())
    assert schedule.capacity == int(schedule.count) == schedule.worker_offsets[-1] == len(schedule.owner)
    assert all({*schedule.owner[a:b].tolist()} <= {w} for w, (a, b) in enumerate(offsets_pairs(schedule)))

    (first, end), (begin, until) = columns(case["axis"])
    teams = 1 if case["run"] >= max(case["workers"], 2) else math.gcd(case["heads"], case["workers"])
    workers = case["workers"] // teams
    left = plain.capacity // teams % workers
    passing = kv_blocks if case["axis"] is TileAxis.QUERY else q_blocks
    parts = min(workers // left, passing // case["least"]) if left else 0
    if parts < 2:
        assert schedule.slots == 0
        assert schedule.merges.shape == (0, len(Merge))
        assert tiles == plain.tiles.tolist()
        return
    assert schedule.merges.shape == (teams * left, len(Merge))
    assert schedule.slots == teams * left * parts <= case["workers"]
    of_slot = {row[Tile.SLOT]: row for row in tiles if row[Tile.SLOT] >= 0}
    assert sorted(of_slot) == list(range(schedule.slots))
    for number, merge in enumerate(schedule.merges.tolist()):
        mine = [of_slot[slot] for slot in range(merge[Merge.SLOT], merge[Merge.SLOT] + merge[Merge.PARTS])]
        assert merge[Merge.PARTS] == parts
        for row in mine:
            wanted = (row[Tile.SEQUENCE], row[Tile.HEAD], row[first], row[end])
            assert merge[: Merge.SLOT] == list(wanted)
            assert row[Tile.MERGE] == number
            assert row[until] - row[begin] >= case["least"]
        assert mine[0][begin] == 0
        assert mine[-1][until] == passing
        assert all(a[until] == b[begin] for a, b in itertools.pairwise(mine))
    # Each worker has as many whole tiles as any other, and one part at most, at the end.
    for hand in hands:
        flags = [row[Tile.SLOT] >= 0 for row in hand]
        assert flags.count(False) == plain.capacity // teams // workers
        assert flags in ([False] * len(flags), [False] * (len(flags) - 1) + [True])
        assert all((row[Tile.MERGE] < 0) == (row[Tile.SLOT] < 0) for row in hand)


def offsets_pairs(schedule):
    return itertools.pairwise(schedule.worker_offsets.tolist())


def test_whole_tiles_keep_their_order_and_their_owners():
    """All that is dealt before the last round, and so what shares keys and values at about the same time."""
    layout = JaggedLayout(offsets_of([26] * 3))
    plain, cut = (hands_of(ask(layout, heads=4, workers=10, cut_last_round=least)) for least in (0, 2))
    rounds = 39 * 4 // 10
    assert [hand[:rounds] for hand in plain] == [hand[:rounds] for hand in cut]
    assert sorted(map(len, plain)) == [15] * 4 + [16] * 6


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize(("run", "heads"), [(1, [0, 1, 2, 3]), (2, [1, 1, 3, 3]), (5, [0, 1, 2, 3]), (10, [3] * 4)])
def test_parts_belong_to_the_tile_that_was_cut_where_tiles_are_dealt_in_runs(axis, run, heads):
    """Of 36 blocks of a head: the last run is as long as what is left, and with a run of 10 there are no teams."""
    layout = JaggedLayout(offsets_of([24] * 3))
    schedule = ask(layout, axis=axis, heads=4, workers=10, run=run, cut_last_round=2)
    (first, end), _ = columns(axis)
    merges = schedule.merges.tolist()
    assert [merge[Merge.HEAD] for merge in merges] == heads
    for row in schedule.tiles.tolist():
        if row[Tile.SLOT] >= 0:
            of = merges[row[Tile.MERGE]]
            assert of[: Merge.SLOT] == [row[Tile.SEQUENCE], row[Tile.HEAD], row[first], row[end]]


@pytest.mark.parametrize(("axis", "block_q", "least"), [(TileAxis.KEY, 64, 8), (TileAxis.QUERY, 128, 4)])
def test_dense_batches_are_balanced(axis, block_q, least):
    """31 whole tiles each and an eighth of one, for 4096 / 132 = 31.03."""
    layout = JaggedLayout(offsets_of([4096] * 8))
    common = dict(heads=16, workers=132, block_q=block_q, block_kv=128, axis=axis)
    plain, cut = (simulate(ask(layout, cut_last_round=cut, **common)).imbalance for cut in (0, least))
    assert plain == pytest.approx(32 * 132 / 4096)
    assert cut == pytest.approx(31.125 * 132 / 4096)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([40, 40, 39], {}),
        ([40, 40, 40], dict(right=0)),
        ([40, 40, 40], dict(left=5)),
        ([40, 40, 40], dict(mask=torch.ones(3, 20, 20, dtype=torch.bool))),
        ([40, 40, 40], dict(q_len=JaggedLayout(offsets_of([40, 39, 41])))),
        ([0, 0], {}),
    ],
    ids=["lengths differ", "causal", "a window", "a mask", "queries differ", "empty"],
)
@pytest.mark.parametrize("axis", TileAxis)
def test_tiles_stay_whole_where_they_may_differ(axis, lengths, options):
    layout = JaggedLayout(offsets_of(lengths))
    cut, plain = (ask(layout, workers=22, axis=axis, cut_last_round=least, **options) for least in (1, 0))
    assert cut.slots == cut.merges.shape[0] == 0
    assert torch.equal(cut.tiles, plain.tiles)
    if not options and any(lengths):
        assert ask(JaggedLayout(offsets_of([40] * 3)), workers=22, axis=axis, cut_last_round=1).slots


def test_nothing_is_cut_where_the_host_does_not_know_lengths():
    layout = JaggedLayout.with_capacity(3, 120, 40).copy_(offsets_of([40] * 3))
    assert ask(layout, workers=22, cut_last_round=1).slots == 0


def test_a_layout_that_declares_too_little_is_not_taken_for_an_even_one():
    """`max_length` is no promise that all are as long."""
    layout = JaggedLayout(offsets_of([6, 30, 24]), validate=False, max_length=20)
    schedule = ask(layout, workers=22, cut_last_round=1)
    assert schedule.slots == 0


def test_other_kinds_refuse_and_cached_schedules_are_told_apart():
    layout = JaggedLayout(offsets_of([40] * 3))
    with pytest.raises(ValueError, match=r"cut_last_round must be 0 for ScheduleKind\.LPT, got 2; ask for"):
        ask(layout, kind=ScheduleKind.LPT, cut_last_round=2)
    with pytest.raises(ValueError, match=r"run must be 1 for ScheduleKind\.ROUND_ROBIN, got 2; ask for"):
        ask(layout, kind=ScheduleKind.ROUND_ROBIN, run=2)
    with pytest.raises(ValueError, match="cut_last_round must be in 0"):
        ask(layout, cut_last_round=-1)
    assert ask(layout, workers=22, cut_last_round=1) is not ask(layout, workers=22)
    assert ask(layout, workers=22, cut_last_round=1) is ask(layout, workers=22, cut_last_round=1)
    cut = ask(layout, workers=22, cut_last_round=1)
    cut.require(layout, cut_last_round=1)
