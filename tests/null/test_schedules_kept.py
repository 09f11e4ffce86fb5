"""A layout keeps its schedules: what is built once, what is another schedule, and what keeps nothing alive."""

import gc
import weakref

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor, ScheduleKind
from jaggedtensor.kernels.dispatch import choose
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.schedules import Tile, TileAxis, cache
from jaggedtensor.testing import offsets_of


def batch(lengths=(3, 0, 5), heads=2, dim=4):
    torch.manual_seed(0)
    return JaggedTensor.from_list([torch.randn(n, heads, dim) for n in lengths])


def test_twelve_layers_build_each_schedule_once():
    """A model asks for schedules of forward and backward in every layer, on whatever tensor it has at hand."""
    problem = AttentionProblem(
        QueryKind.BROADCAST, 3, 2, 2, 4, 4, torch.float16, Device("cuda", (9, 0), 132, 227 << 10)
    )
    keys, found, builds = batch(), [], []
    for layer in range(12):
        hidden = (keys * 2).with_values(keys.values() + layer).detach()
        schedules = choose(problem).implementation.plan(problem, hidden.layout, None, len(hidden.values()), 3, True)
        found.append([x.data_ptr() for part in schedules for x in part])
        builds.append(keys.layout._schedules.builds)
    assert builds == [len(keys.layout._schedules)] * 12
    assert {schedule.axis for schedule in keys.layout._schedules} == {TileAxis.QUERY, TileAxis.KEY}
    assert all(pointers == found[0] for pointers in found)


def test_what_a_schedule_depends_on_is_its_key():
    layout = JaggedLayout(offsets_of([3, 0, 5]))
    query = JaggedLayout(offsets_of([1, 1, 1]))
    mask = torch.ones(3, 1, 1).bool()
    base = dict(kind=ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
    others = dict(
        kind=ScheduleKind.LPT, q_len=5, heads=1, workers=3, group=2, axis=TileAxis.KEY, block_q=64, block_kv=64, left=1,
        right=0, mask=mask, tile_cost=1,
    )  # fmt: skip
    requests = [base, *(base | {name: value} for name, value in others.items()), base | {"q_len": query}]
    for _ in range(2):
        made = [layout.schedule(**request) for request in requests]
    assert len({id(schedule) for schedule in made}) == len(requests) == layout._schedules.builds
    assert layout.schedule(**base, rows=1000) is made[0]  # a bound that is not needed


def test_cache_keeps_those_used_last():
    layout = JaggedLayout(offsets_of([3, 0, 5]))

    def ask(workers):
        return layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=workers)

    first = ask(1)
    for workers in range(2, cache.MOST + 1):
        ask(workers)
    assert ask(1) is first
    ask(cache.MOST + 1)  # 2 goes, as the one not used for longest
    assert len(layout._schedules) == cache.MOST
    assert ask(1) is first
    assert layout._schedules.builds == cache.MOST + 1
    ask(2)
    assert layout._schedules.builds == cache.MOST + 2


def test_cache_keeps_no_query_layout_or_mask_alive():
    layout = JaggedLayout(offsets_of([3, 0, 5]))
    query = JaggedLayout(offsets_of([1, 1, 1]))
    mask = torch.ones(3, 1, 1).bool()
    gone = [weakref.ref(query), weakref.ref(mask)]
    layout.schedule(ScheduleKind.ZIGZAG, q_len=query, heads=2, workers=2, mask=mask)
    del query, mask
    gc.collect()
    assert [x() for x in gone] == [None, None]
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None


def test_a_mask_changed_in_place_is_another_mask():
    layout = JaggedLayout(offsets_of([3, 0, 5]))
    mask = torch.ones(3, 1, 1).bool()
    first = layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2, mask=mask)
    mask[0] = False
    second = layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2, mask=mask)
    assert (int(first.count), int(second.count)) == (4, 2)


def test_a_method_is_the_same_mask_at_each_access():
    class Sparse:
        def keep(self, sequence, q_block, kv_block):
            return (sequence + q_block + kv_block) % 2 == 0

    sparse, layout = Sparse(), JaggedLayout(offsets_of([3, 0, 5]))
    for _ in range(3):
        layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2, mask=sparse.keep)
    assert layout._schedules.builds == 1


def test_nothing_is_kept_of_a_static_query_layout():
    layout, query = JaggedLayout(offsets_of([3, 0, 5])), JaggedLayout.with_capacity(3, 6, 4)
    counts = []
    for lengths in ([1, 1, 1], [4, 0, 2], [0, 0, 0]):
        query.copy_(offsets_of(lengths))
        schedule = layout.schedule(ScheduleKind.ZIGZAG, q_len=query, heads=1, workers=2, block_q=1)
        counts.append(int(schedule.count))
    assert counts == [2, 6, 0]
    assert len(layout._schedules) == 0


def test_schedules_made_in_inference_mode_can_be_saved_for_backward():
    layout = JaggedLayout(offsets_of([3, 0, 5]))
    with torch.inference_mode():
        schedule = layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
    assert not any(x.is_inference() for x in schedule.tensors() if x is not None)


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", [kind for kind in ScheduleKind if kind is not ScheduleKind.LPT])
def test_torch_compile_traces_the_building_and_nothing_is_kept(kind, axis):
    torch._dynamo.reset()
    layouts = []

    def tiles(offsets, q_offsets):
        layout = JaggedLayout(offsets, validate=False)
        query = JaggedLayout(q_offsets, validate=False)
        layouts.append(layout)
        common = dict(heads=2, workers=3, axis=axis, block_q=2, block_kv=2, rows=20)
        jagged = layout.schedule(kind, q_len=query, q_rows=9, right=0, **common)
        return layout.schedule(kind, q_len=5, **common).tiles, jagged.tiles

    arguments = offsets_of([3, 0, 8]), offsets_of([2, 1, 4])
    eager = tiles(*arguments)
    compiled = torch.compile(tiles, fullgraph=True, backend="eager")(*arguments)
    for traced, expected in zip(compiled, eager, strict=True):  # with more room, as a trace knows no lengths
        assert torch.equal(traced[: len(expected)], expected)
        assert (traced[len(expected) :, Tile.SEQUENCE] == -1).all()
    assert [layout._schedules.builds for layout in layouts] == [2, 0]
