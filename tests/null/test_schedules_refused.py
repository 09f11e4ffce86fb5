"""What is no schedule, and says why; what a schedule says of itself."""

import pytest
import torch

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.schedules import Tile, TileAxis
from jaggedtensor.testing import offsets_of


def small(**options):
    return JaggedLayout(offsets_of([3, 0, 5])).schedule(
        **(dict(kind=ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2) | options)
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(kind="zigzag"), TypeError, r"kind must be a ScheduleKind, got 'zigzag'; one of ScheduleKind.CONTIGUOUS"),
        (dict(axis=0), TypeError, "axis must be a TileAxis, got 0"),
        (dict(workers=0), ValueError, r"workers must be in 1\.\.2147483647, got 0"),
        (
            dict(workers=None),
            ValueError,
            "workers must be given for a layout on cpu, got None; for example workers=132",
        ),
        (dict(heads=0), ValueError, "heads must be in 1"),
        (dict(block_q=0), ValueError, "block_q must be in 1"),
        (dict(block_kv=-1), ValueError, "block_kv must be in 1"),
        (dict(group=2.0), TypeError, "group must be an int, got 2.0"),
        (dict(q_len=-1), ValueError, "q_len must be in 0"),
        (dict(q_len=None), TypeError, "q_len must be an int, got None"),
        (dict(left=-2), ValueError, "left must be in -1"),
        (dict(tile_cost=-1), ValueError, "tile_cost must be in 0"),
        (
            dict(q_len=2**30, group=4),
            ValueError,
            r"packed rows of the queries of a sequence must be at most 2147483647",
        ),
        (dict(mask=3), TypeError, "mask must be a bool Tensor or a function that gives one, got 3"),
        (dict(mask=torch.ones(3, 1, 1)), TypeError, r"mask must be bool, got float32\[3, 1, 1\]"),
        (dict(mask=torch.ones(2, 1, 1).bool()), ValueError, r"mask must be of shape \[3, q blocks, kv blocks\]"),
        (
            dict(mask=torch.ones(3, 1, 1).bool(), block_kv=2),
            ValueError,
            "blocks of keys in a sequence must be at most 1",
        ),
        (
            dict(mask=torch.ones(3, 1, 1).bool(), block_q=2),
            ValueError,
            "blocks of queries in a sequence must be at most 1",
        ),
        (dict(mask=lambda s, q, k: s), TypeError, r"the result of mask must be a bool tensor, got int64"),
        (
            dict(mask=lambda s, q, k: torch.ones(7, 7).bool()),
            ValueError,
            "the result of mask must be of a shape that broad",
        ),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        small(**options)


def test_places_that_do_not_fit_int32_are_refused():
    layout = JaggedLayout(torch.tensor([0, 2**31]), max_length=2**31 - 1, validate=False)
    layout._num_tokens = 2**31 - 1
    with pytest.raises(
        ValueError, match="rows of the schedule must be at most 268435455, so that places in it fit an int32"
    ):
        layout.schedule(ScheduleKind.DYNAMIC, q_len=1, heads=1, workers=1, block_kv=1, axis=TileAxis.KEY)
    layout = JaggedLayout(offsets_of([1] * 100), max_length=2**31 - 1)
    layout._num_tokens = 2**31 - 1
    with pytest.raises(ValueError, match="blocks under the mask must be at most 2147483647"):
        layout.schedule(ScheduleKind.DYNAMIC, q_len=1, heads=1, workers=1, block_kv=1, mask=lambda s, q, k: s == q)


def test_unknown_number_of_tokens_needs_rows():
    """As of a layout on a GPU that nobody validated; a meta tensor stands in for it here."""
    layout = JaggedLayout(torch.empty(4, dtype=torch.int64, device="meta"), validate=False)
    with pytest.raises(ValueError, match="rows must be the rows of the values, for a layout whose number of tokens"):
        layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
    assert layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2, rows=99).capacity == 6


def test_a_query_layout_of_another_batch_size_is_refused():
    with pytest.raises(ValueError, match="the batch size of the query layout must be 3, as of the keys, got 2"):
        small(q_len=JaggedLayout(offsets_of([1, 2])))


def test_a_schedule_knows_what_it_is_for():
    keys = JaggedLayout(offsets_of([3, 0, 5]))
    query = JaggedLayout(offsets_of([1, 1, 1]))
    schedule = keys.schedule(ScheduleKind.ZIGZAG, q_len=query, heads=2, workers=2, block_kv=64)
    schedule.require(keys, heads=2, block_kv=64, q_len=query, kind=ScheduleKind.ZIGZAG)
    schedule.require(JaggedLayout(offsets_of([3, 0, 5])))  # the same sequences
    with pytest.raises(ValueError, match="block_kv of the schedule must be 128, got 64; ask the layout of the keys"):
        schedule.require(keys, block_kv=128)
    with pytest.raises(ValueError, match="q_len of the schedule must be 4, got <JaggedLayout at"):
        schedule.require(keys, q_len=4)
    with pytest.raises(ValueError, match="q_len of the schedule must be <JaggedLayout"):
        schedule.require(keys, q_len=keys)
    with pytest.raises(
        ValueError, match=r"the schedule must be of JaggedLayout\(batch_size=2.*one of JaggedLayout\(batch_s"
    ):
        schedule.require(JaggedLayout(offsets_of([3, 5])))
    with pytest.raises(ValueError, match="the schedule must be on meta, as the layout, got one on cpu"):
        schedule.require(JaggedLayout(torch.empty(4, dtype=torch.int64, device="meta"), validate=False))
    orphan = small()
    with pytest.raises(ValueError, match="got one of a layout that is gone"):
        orphan.require(keys)


def test_offsets_changed_in_place_are_noticed():
    offsets = offsets_of([3, 0, 5])
    layout = JaggedLayout(offsets)
    layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)
    offsets[1] = 2
    with pytest.raises(RuntimeError, match="offsets must be unchanged"):
        layout.schedule(ScheduleKind.ZIGZAG, q_len=4, heads=2, workers=2)


def test_repr_tells_kind_and_size():
    assert repr(small()) == (
        "TileSchedule(zigzag by query, 4 of at most 6 tiles of 128 x 128, heads=2, workers=2, device='cpu')"
    )


def test_columns_are_what_kernels_read():
    assert [f"{column.name}={column}" for column in Tile] == [
        "SEQUENCE=0", "HEAD=1", "Q_BEGIN=2", "Q_END=3", "KV_BEGIN=4", "KV_END=5", "MERGE=6", "SLOT=7",
    ]  # fmt: skip
    schedule = small()
    assert schedule.tiles.stride() == (8, 1)
    assert schedule.tiles.data_ptr() % 32 == 0
