"""Schedules against a brute-force oracle: every kind covers each block that is seen once, for batches of all sorts."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, ScheduleKind, TileSchedule
from jaggedtensor.kernels.shared.cuts import Cuts
from jaggedtensor.schedules import Merge, TileAxis
from jaggedtensor.testing import offsets_of


@dataclass
class Case:
    """A request, and what brute force says about it."""

    k_lengths: list[int]
    q_lengths: list[int]
    jagged: bool = False
    kind: ScheduleKind = ScheduleKind.ZIGZAG
    axis: TileAxis = TileAxis.QUERY
    heads: int = 1
    group: int = 1
    workers: int = 3
    block_q: int = 2
    block_kv: int = 2
    left: int = -1
    right: int = -1
    tile_cost: int = 0
    run: int = 1
    masked: str | None = None
    dtype: torch.dtype = torch.int64
    slack: int = 0
    mask: object = field(init=False, default=None)

    def __post_init__(self):
        q_blocks, kv_blocks = self.most_blocks()
        shape = (len(self.k_lengths), max(q_blocks, 1), max(kv_blocks, 1))
        self.kept = torch.rand(shape, generator=torch.Generator().manual_seed(len(self.k_lengths))) < 0.5
        if self.masked == "tensor":
            self.mask = self.kept
        elif self.masked == "function":
            self.mask = lambda sequence, q_block, kv_block: self.kept[sequence, q_block, kv_block]

    def most_blocks(self):
        q_rows = max(self.q_lengths, default=0) * self.group
        return -(-q_rows // self.block_q), -(-max(self.k_lengths, default=0) // self.block_kv)

    def layout(self, lengths):
        offsets = offsets_of(lengths).to(self.dtype)
        return JaggedLayout(offsets)

    def schedule(self, keys=None, query=None) -> TileSchedule:
        keys = self.layout(self.k_lengths) if keys is None else keys
        self.keys = keys  # a schedule knows its layout only as long as that lives
        self.query = (self.layout(self.q_lengths) if query is None else query) if self.jagged else None
        return keys.schedule(
            self.kind,
            q_len=self.query if self.jagged else max(self.q_lengths, default=0),
            heads=self.heads,
            group=self.group,
            axis=self.axis,
            block_q=self.block_q,
            block_kv=self.block_kv,
            workers=self.workers,
            left=self.left,
            right=self.right,
            mask=self.mask,
            tile_cost=self.tile_cost,
            run=self.run,
        )

    def sees(self, i, j, q_length, k_length):
        place = i + k_length - q_length
        return (self.left < 0 or j >= place - self.left) and (self.right < 0 or j <= place + self.right)

    def expected(self):
        """(sequence, head, q block, kv block) of every pair of blocks in which a query sees a key."""
        blocks = set()
        for s, (q_length, k_length) in enumerate(zip(self.q_lengths, self.k_lengths, strict=True)):
            for i in range(q_length):
                for j in range(k_length):
                    if self.sees(i, j, q_length, k_length):
                        rows = range(i * self.group, (i + 1) * self.group)
                        blocks |= {(s, row // self.block_q, j // self.block_kv) for row in rows}
        if self.masked:
            blocks = {block for block in blocks if self.kept[block]}
        return {(s, head, q, k) for s, q, k in blocks for head in range(self.heads)}


def tiles_of(schedule):
    return [Row(*row) for row in schedule.tiles[: int(schedule.count)].tolist()]


@dataclass(frozen=True)
class Row:
    sequence: int
    head: int
    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    merge: int
    slot: int

    def blocks(self, schedule):
        """(q block, kv block) pairs."""
        q, kv = range(self.q_begin, self.q_end), range(self.kv_begin, self.kv_end)
        if schedule.blocks is not None and schedule.axis is TileAxis.QUERY:
            kv = schedule.blocks[self.kv_begin : self.kv_end].tolist()
        elif schedule.blocks is not None:
            q = schedule.blocks[self.q_begin : self.q_end].tolist()
        return [(i, j) for i in q for j in kv]


def check(case: Case, schedule: TileSchedule | None = None) -> TileSchedule:
    """All that must hold of any schedule."""
    schedule = case.schedule() if schedule is None else schedule
    rows = tiles_of(schedule)
    covered = Counter((row.sequence, row.head, q, k) for row in rows for q, k in row.blocks(schedule))
    expected = case.expected()
    assert set(covered) == expected
    assert all(times == 1 for times in covered.values())
    assert all(row.blocks(schedule) for row in rows)  # no tile without work

    assert all(x is None or x.dtype == torch.int32 for x in schedule.tensors())
    surplus = schedule.tiles[len(rows) :].tolist()
    assert surplus == [[-1, 0, 0, 0, 0, 0, -1, -1]] * len(surplus)
    check_owners(schedule, len(rows))
    check_orientation(case, schedule, rows)
    if schedule.kind is ScheduleKind.STREAM_K:
        check_merges(case, schedule, rows)
    else:
        assert schedule.merges.shape == (0, len(Merge))
        assert all(row.merge == row.slot == -1 for row in rows)
    return schedule


def check_owners(schedule, count):
    owners = schedule.owner.tolist()
    assert owners[count:] == [-1] * (schedule.capacity - count)
    if schedule.kind is ScheduleKind.DYNAMIC:
        assert schedule.worker_offsets is None
        assert owners == [-1] * schedule.capacity
        return
    offsets = schedule.worker_offsets.tolist()
    assert len(offsets) == schedule.workers + 1
    assert offsets[0] == 0
    assert offsets[-1] == count
    assert offsets == sorted(offsets)
    for worker in range(schedule.workers):
        assert set(owners[offsets[worker] : offsets[worker + 1]]) <= {worker}


def check_orientation(case, schedule, rows):
    if case.axis is TileAxis.QUERY:
        assert all(row.q_end == row.q_begin + 1 for row in rows)
        stays = Counter((row.sequence, row.head, row.q_begin) for row in rows)
    else:
        stays = Counter((row.sequence, row.head, k) for row in rows for k in range(row.kv_begin, row.kv_end))
        if schedule.kind is not ScheduleKind.STREAM_K:
            assert all(row.kv_end == row.kv_begin + 1 for row in rows)
    if schedule.kind is not ScheduleKind.STREAM_K or case.axis is TileAxis.KEY:
        assert set(stays.values()) <= {1}  # one owner for a block that stays


def check_merges(case, schedule, rows):
    merges = schedule.merges.tolist()
    owners = schedule.owner.tolist()
    if case.axis is TileAxis.KEY:
        slots = {}
        for row, owner in zip(rows, owners, strict=False):
            assert row.merge == row.head
            slots.setdefault(row.slot, set()).add((owner, row.head))
        assert all(len(users) == 1 for users in slots.values())  # one slot for each (worker, head)
        assert len(slots) == len(set().union(*slots.values())) <= schedule.slots
        assert [merge[Merge.HEAD] for merge in merges] == list(range(case.heads))
        for merge in merges:
            parts = range(merge[Merge.SLOT], merge[Merge.SLOT] + merge[Merge.PARTS])
            assert list(parts) == sorted({row.slot for row in rows if row.head == merge[Merge.HEAD]})
        return
    assert len(merges) == case.workers - 1
    parts = [(row, owner) for row, owner in zip(rows, owners, strict=False) if row.slot >= 0]
    assert [row.slot for row, _ in parts] == list(range(len(parts)))
    assert len(parts) <= schedule.slots
    used = 0
    for number, merge in enumerate(merges):
        mine = [(row, owner) for row, owner in parts if row.merge == number]
        if merge[Merge.PARTS] == 0:
            assert merge == [-1, 0, 0, 0, 0, 0]
            assert not mine
            continue
        assert len(mine) == merge[Merge.PARTS] >= 2
        assert merge[Merge.SLOT] == used
        used += merge[Merge.PARTS]
        assert {(row.sequence, row.head, row.q_begin, row.q_end) for row, _ in mine} == {
            tuple(merge[: Merge.SLOT]),
        }
        assert [owner for _, owner in mine] == sorted({owner for _, owner in mine})  # in order, no owner twice
        assert all(a.kv_end == b.kv_begin for (a, _), (b, _) in itertools.pairwise(mine))
    assert used == len(parts)
    # A tile with no slot is all that there is of its q block.
    by_unit = Counter((row.sequence, row.head, row.q_begin) for row in rows)
    assert all((by_unit[row.sequence, row.head, row.q_begin] > 1) == (row.slot >= 0) for row in rows)


@st.composite
def cases(draw, **fixed):
    batch = draw(st.integers(0, 5))
    lengths = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13]), min_size=batch, max_size=batch)
    jagged = draw(st.booleans())
    kind = fixed.get("kind") or draw(st.sampled_from(list(ScheduleKind)))
    drawn = dict(
        k_lengths=draw(lengths),
        q_lengths=draw(lengths) if jagged else [draw(st.integers(0, 6))] * batch,
        jagged=jagged,
        kind=kind,
        axis=draw(st.sampled_from(list(TileAxis))),
        heads=draw(st.integers(1, 4)),
        group=draw(st.sampled_from([1, 1, 2, 3])),
        workers=draw(st.sampled_from([1, 2, 3, 6, 50, 50])),
        block_q=draw(st.sampled_from([1, 2, 3, 4, 16])),
        block_kv=draw(st.sampled_from([1, 2, 3, 16])),
        left=draw(st.sampled_from([-1, -1, 0, 1, 4])),
        right=draw(st.sampled_from([-1, -1, 0, 1, 4])),
        tile_cost=draw(st.sampled_from([0, 0, 1, 3])),
        run=draw(st.sampled_from([1, 2, 3, 50])) if kind is ScheduleKind.ZIGZAG else 1,
        masked=draw(st.sampled_from([None, None, "tensor", "function"])),
        dtype=draw(st.sampled_from([torch.int64, torch.int32])),
    )
    return Case(**(drawn | fixed))


@given(cases())
def test_every_valid_block_is_covered_once_and_no_other(case):
    check(case)


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ScheduleKind)
@given(data=st.data())
def test_each_kind_covers_every_valid_block_once(kind, axis, data):
    check(data.draw(cases(kind=kind, axis=axis)))


@given(cases(kind=ScheduleKind.STREAM_K, axis=TileAxis.QUERY, masked=None, left=-1, right=-1))
def test_stream_k_shares_blocks_equally(case):
    """Nobody has two blocks more than another (without a cost of tiles, which moves cuts)."""
    case.tile_cost = 0
    schedule = case.schedule()
    loads = Counter({worker: 0 for worker in range(case.workers)})
    rows = tiles_of(schedule)
    for row, owner in zip(rows, schedule.owner.tolist(), strict=False):
        loads[owner] += row.kv_end - row.kv_begin
    total = sum(loads.values())
    assert max(loads.values()) <= -(-total // case.workers)
    if total >= case.workers:
        assert min(loads.values()) >= total // case.workers


@pytest.mark.parametrize("kind", [ScheduleKind.ZIGZAG, ScheduleKind.ROUND_ROBIN, ScheduleKind.STREAM_K])
@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("lengths", [[5, 40, 3, 9, 0, 17, 29, 8, 33, 2], [4, 0, 1], [1]], ids=["many", "few", "one"])
def test_a_worker_stays_on_one_head_where_heads_divide_workers(kind, axis, lengths):
    """The worker's number tells which, so a kernel can load its query before it looks at a tile."""
    schedule = check(Case(lengths, [4] * len(lengths), kind=kind, axis=axis, heads=3, workers=12))
    rows, owners = tiles_of(schedule), schedule.owner.tolist()
    assert all(row.head == owner // 4 for row, owner in zip(rows, owners, strict=False))


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("q_length", [1, 3])
def test_stream_k_with_more_workers_than_blocks(axis, heads, q_length):
    """Some workers have nothing, and no part of a sequence is a part of nothing."""
    common = dict(kind=ScheduleKind.STREAM_K, axis=axis, heads=heads, workers=50, block_q=1, block_kv=1)
    for tile_cost in (0, 2):
        check(Case([13, 0, 5], [q_length] * 3, tile_cost=tile_cost, **common))
    check(Case([3, 4], [5, 2], jagged=True, **common))


def test_stream_k_over_keys_changes_head_where_it_must():
    schedule = check(Case([7, 12, 5], [2] * 3, kind=ScheduleKind.STREAM_K, axis=TileAxis.KEY, heads=3, workers=2))
    assert schedule.merges[:, Merge.PARTS].tolist() == [1, 2, 1]
    few = check(Case([7, 12, 5], [2] * 3, kind=ScheduleKind.STREAM_K, axis=TileAxis.KEY, heads=5, workers=1))
    assert few.merges[:, Merge.PARTS].tolist() == [1] * 5


def test_stream_k_over_keys_has_a_row_for_each_sequence_of_a_worker():
    """Not for each block: a broadcast query that fits a block stays on chip while all KV blocks pass."""
    common = dict(kind=ScheduleKind.STREAM_K, axis=TileAxis.KEY, workers=4)
    assert int(check(Case([100, 50], [2, 2], **common)).count) == 5  # 75 blocks, cut at 18, 37 and 56
    assert int(check(Case([100, 50], [2, 2], **common, left=60)).count) == 5
    rows = tiles_of(check(Case([100, 50], [4, 4], **common)))
    assert [row.q_end for row in rows] == [2] * 5


def test_dynamic_hands_out_the_longest_first():
    schedule = check(Case([2, 9, 0, 5, 9], [1] * 5, kind=ScheduleKind.DYNAMIC, heads=2))
    assert [(row.sequence, row.head) for row in tiles_of(schedule)] == [(s, h) for s in (1, 4, 3, 0) for h in (0, 1)]


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_tiles_are_as_many_as_tokens_and_sequences_need(kind):
    """OVF-12: whatever the number of sequences, each of 34 tokens has one block of queries for each head."""
    for batch in (128, 4096):
        layout = JaggedLayout.from_lengths(torch.full((batch,), 34))
        schedule = layout.schedule(kind, q_len=layout, heads=12, workers=132, block_q=64, block_kv=64)
        assert batch * 12 <= int(schedule.count) <= batch * 12 + 132


def test_sequences_are_cut_where_whole_ones_would_keep_some_workers_busy_for_longer():
    always, longest_alone = Cuts(blocks=16, percent=110, rounds=True), Cuts(blocks=16, percent=110)
    for lengths, pays, pays_alone in (
        ([5000, 0, 37], True, True),
        ([5000] * 132 * 8, False, False),  # eight rounds for all
        ([5000] * (132 * 8 + 1), True, False),  # a ninth for one
        ([5000] + [3000] * 132 * 8, False, False),
        ([1023], False, False),  # too short for a cut
        ([0, 0], False, False),
        ([], False, False),
    ):
        keys = JaggedLayout.from_lengths(torch.tensor(lengths, dtype=torch.int64))
        found = [cuts.pay(keys, workers=132, lines=1, block_n=64) for cuts in (always, longest_alone)]
        assert found == [pays, pays_alone], lengths
    static = JaggedLayout.with_capacity(1, 5000, 5000).copy_(torch.tensor([0, 5000]))
    assert not always.pay(static, workers=132, lines=1, block_n=64)  # whose lengths change unseen


def test_zigzag_deals_in_alternating_direction():
    schedule = check(Case([6, 5, 4, 3, 2, 1], [1] * 6, kind=ScheduleKind.ZIGZAG, block_kv=1, workers=3))
    dealt = [[row.sequence for row in tiles_of(schedule)[2 * w : 2 * w + 2]] for w in range(3)]
    assert dealt == [[0, 5], [1, 4], [2, 3]]


def test_zigzag_hands_on_what_is_over_the_mean():
    """Dealt evenly, the worker with the giant would have 24 + 1 + 1 and the mean is 14."""
    schedule = check(Case([24] + [1] * 4, [1] * 5, kind=ScheduleKind.ZIGZAG, block_kv=1, workers=2))
    assert schedule.worker_offsets.tolist() == [0, 1, 5]


@pytest.mark.parametrize("axis", TileAxis)
def test_tiles_of_one_head_are_dealt_before_those_of_the_next(axis):
    """Of two sequences, by five workers, and by four that would be two teams."""

    def at_once(lengths, workers=5, **options):
        options |= dict(kind=ScheduleKind.ZIGZAG, axis=axis, heads=2, workers=workers, block_q=1, block_kv=1)
        schedule = check(Case(lengths, lengths, jagged=True, **options))
        rows = tiles_of(schedule)
        hands = [rows[a:b] for a, b in itertools.pairwise(schedule.worker_offsets.tolist())]
        return [{(row.sequence, row.head) for row in turn if row} for turn in itertools.zip_longest(*hands)]

    assert [len(some) for some in at_once([5, 5])] == [2, 2, 2, 2]
    assert at_once([5, 5], run=5) == [{(0, 0)}, {(0, 1)}, {(1, 0)}, {(1, 1)}]
    assert at_once([4, 4], workers=4, run=4) == [{(0, 0)}, {(0, 1)}, {(1, 0)}, {(1, 1)}]
    assert at_once([4, 4], workers=4, run=3) == [{(0, 0), (0, 1)}] * 2 + [{(1, 0), (1, 1)}] * 2
    # Of twelve blocks of a head, runs of five, five and two.
    assert at_once([6, 6], run=5) == [{(0, 0)}, {(0, 1)}, {(0, 0), (1, 0)}, {(0, 1), (1, 1)}, {(1, 0), (1, 1)}]


def test_round_robin_deals_equal_counts():
    schedule = check(Case([3, 0, 9, 4], [2] * 4, kind=ScheduleKind.ROUND_ROBIN, axis=TileAxis.KEY, workers=4))
    assert schedule.worker_offsets.diff().tolist() == [3, 2, 2, 2]


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize(
    ("k_lengths", "q_length"),
    [([], 3), ([0], 3), ([0, 0, 0], 3), ([1], 1), ([1, 0], 0), ([0, 300, 0], 2), ([1, 1], 1)],
    ids=["no sequences", "one empty", "all empty", "one token", "no queries", "one giant", "two tokens"],
)
def test_degenerate_batches(kind, axis, k_lengths, q_length):
    for workers, heads in ((1, 1), (7, 2), (132, 4)):
        case = Case(k_lengths, [q_length] * len(k_lengths), kind=kind, axis=axis, workers=workers, heads=heads)
        check(case)


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("axis", TileAxis)
def test_static_layout_has_the_tiles_of_an_ordinary_one(kind, axis):
    static = JaggedLayout.with_capacity(4, 40, 20)
    for lengths in ([5, 20, 0, 3], [0, 0, 0, 0], [10, 10, 10, 10]):
        static.copy_(offsets_of(lengths))
        case = Case(lengths, [3] * 4, kind=kind, axis=axis, heads=2, right=0)
        schedule = check(case, case.schedule(static))
        plain = case.schedule()
        assert torch.equal(schedule.count, plain.count)
        count = int(plain.count)
        assert torch.equal(schedule.tiles[:count], plain.tiles[:count])
        assert torch.equal(schedule.merges, plain.merges)
    assert static._schedules.builds == 0


def layout_over_its_bounds():
    """Twelve tokens of four declared, as `rows=` and `max_length=` may be wrong about a layout on a GPU."""
    layout = JaggedLayout(offsets_of([6, 6]), validate=False)
    layout._num_tokens = layout._max_length = 4
    return layout


@pytest.mark.parametrize("kind", ScheduleKind)
def test_more_tokens_than_declared_are_refused_or_served(kind):
    ask = dict(q_len=1, heads=1, workers=2, block_kv=2, axis=TileAxis.KEY)
    if kind is ScheduleKind.STREAM_K:  # a row for each sequence of a worker, however long
        assert int(layout_over_its_bounds().schedule(kind, **ask).count) == 2
    else:
        with pytest.raises(
            ValueError, match="the number of tiles must be at most 3, the capacity declared, got more; use"
        ):
            layout_over_its_bounds().schedule(kind, **ask)
    # With q blocks that stay, the tiles are as many as always, and none loses a KV block.
    rows = tiles_of(layout_over_its_bounds().schedule(kind, **ask | {"axis": TileAxis.QUERY}))
    assert sum(row.kv_end - row.kv_begin for row in rows) == 6


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_sequence_longer_than_declared_loses_no_block(kind):
    """Costs are sorted as integers that hold what there may be, not what was declared."""
    layout = JaggedLayout(offsets_of([3, 40_000, 70_000]), max_length=10, validate=False)
    rows = tiles_of(layout.schedule(kind, q_len=1, heads=1, workers=2, block_kv=1))
    assert sum(row.kv_end - row.kv_begin for row in rows) == 110_003


def test_a_mask_loses_no_block_to_a_wrong_max_length():
    message = "blocks of keys in a sequence must be at most 2, as max_length allows, got more; use a larger one"
    with pytest.raises(ValueError, match=message):
        layout_over_its_bounds().schedule(
            ScheduleKind.ZIGZAG, q_len=1, heads=1, workers=2, block_kv=2, mask=lambda s, q, k: s + q + k >= 0
        )


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("axis", TileAxis)
def test_unchecked_offsets_that_decrease_are_empty_sequences(kind, axis):
    """No place in memory is formed from a negative length."""
    layout = JaggedLayout(torch.tensor([0, 5, 0, 7]), validate=False)
    case = Case([5, 0, 7], [1] * 3, kind=kind, axis=axis, block_kv=4)
    check(case, case.schedule(layout))
