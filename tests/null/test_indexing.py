"""Indexing, cutting and joining are those of a list of tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedTensor
from jaggedtensor.testing import LENGTHS, assert_same_as_loop, make_jagged
from jaggedtensor.testing.strategies import batches, lengths

bounds = st.one_of(st.none(), st.integers(-8, 8))


@given(batches(), st.data())
def test_an_int_chooses_a_sequence(jt, data):
    if jt.batch_size == 0:
        return
    i = data.draw(st.integers(-jt.batch_size, jt.batch_size - 1))
    assert_same_as_loop(lambda jt: jt[i], lambda xs: xs[i], [jt])
    assert_same_as_loop(lambda jt: jt[torch.tensor(i)], lambda xs: xs[i], [jt])


@given(batches(), bounds, bounds, st.sampled_from([None, 1, 2, -1, -2]))
def test_a_slice_chooses_sequences(jt, start, stop, step):
    cut = slice(start, stop, step)
    assert_same_as_loop(lambda jt: jt[cut], lambda xs: xs[cut], [jt])


@given(batches(), st.data())
def test_a_tensor_or_list_of_numbers_picks_sequences_in_its_order(jt, data):
    batch = jt.batch_size
    index = data.draw(st.lists(st.integers(-batch, batch - 1), max_size=5)) if batch else []
    loop = lambda xs: [xs[i] for i in index]
    for dtype in (torch.int64, torch.int32):
        assert_same_as_loop(lambda jt, d=dtype: jt[torch.tensor(index, dtype=d)], loop, [jt])
    assert_same_as_loop(lambda jt: jt[index], loop, [jt])


@given(batches(), st.data())
def test_a_mask_keeps_sequences(jt, data):
    keep = data.draw(st.lists(st.booleans(), min_size=jt.batch_size, max_size=jt.batch_size))
    loop = lambda xs: [x for x, k in zip(xs, keep, strict=True) if k]
    assert_same_as_loop(lambda jt: jt[torch.tensor(keep, dtype=torch.bool)], loop, [jt])


@given(batches(), bounds, bounds, st.sampled_from([None, 1, 2, 3]))
def test_a_slice_in_dimension_1_cuts_every_sequence(jt, start, stop, step):
    cut = slice(start, stop, step)
    assert_same_as_loop(lambda jt: jt[:, cut], lambda xs: [x[cut] for x in xs], [jt])
    assert_same_as_loop(lambda jt: jt[1:, cut], lambda xs: [x[cut] for x in xs[1:]], [jt])


@given(batches((2, 3)), bounds, st.integers(-3, 2))
def test_further_indices_choose_features(jt, start, i):
    assert_same_as_loop(lambda jt: jt[:, :, 1], lambda xs: [x[:, 1] for x in xs], [jt])
    assert_same_as_loop(lambda jt: jt[..., i], lambda xs: [x[..., i] for x in xs], [jt])
    assert_same_as_loop(lambda jt: jt[:, start:, :, i], lambda xs: [x[start:, :, i] for x in xs], [jt])
    assert_same_as_loop(lambda jt: jt[..., None, 0:2], lambda xs: [x[..., None, 0:2] for x in xs], [jt])
    index = torch.tensor([1, 0, 1])
    assert_same_as_loop(lambda jt: jt[:, :, index], lambda xs: [x[:, index] for x in xs], [jt])


def test_an_int_and_more_index_one_sequence():
    jt = make_jagged([3, 0, 4], 2)
    assert torch.equal(jt[2, 1], jt.to_list()[2][1])
    assert torch.equal(jt[2, 1:, 0], jt.to_list()[2][1:, 0])


def test_an_ellipsis_alone_is_the_batch():
    jt = make_jagged([3, 0, 4], 2)
    assert jt[...] is jt
    assert jt[:] is jt


def test_numbers_of_numpy_index_like_ints():
    np = pytest.importorskip("numpy")
    jt = make_jagged([3, 0, 4], 2)
    assert torch.equal(jt[np.int64(2)], jt[2])
    assert jt[:, np.int64(1) :].lengths().tolist() == [2, 0, 3]


@given(batches())
def test_first_and_last_are_zero_where_there_is_no_token(jt):
    feature = jt.values().shape[1:]
    stack = lambda rows: torch.stack(rows) if rows else jt.values().new_zeros(0, *feature)
    ends = lambda xs, i: stack([x[i] if len(x) else x.sum(0) for x in xs])
    assert_same_as_loop(lambda jt: jt.first(), lambda xs: ends(xs, 0), [jt])
    assert_same_as_loop(lambda jt: jt.last(), lambda xs: ends(xs, -1), [jt])


@given(batches(), st.data())
def test_cat_along_the_batch_puts_the_lists_after_each_other(jt, data):
    other = data.draw(batches(tuple(jt.values().shape[1:])))
    assert_same_as_loop(lambda a, b: JaggedTensor.cat([a, b, b]), lambda a, b: [*a, *b, *b], [jt, other])
    assert_same_as_loop(lambda a, b: torch.cat([a, b]), lambda a, b: [*a, *b], [jt, other])


@given(batches(), st.data())
def test_cat_along_dimension_1_joins_sequence_by_sequence(jt, data):
    others = data.draw(st.lists(st.integers(0, 3), min_size=jt.batch_size, max_size=jt.batch_size))
    other = data.draw(batches(tuple(jt.values().shape[1:]), of_lengths=others))
    loop = lambda a, b: [torch.cat((x, y, y)) for x, y in zip(a, b, strict=True)]
    assert_same_as_loop(lambda a, b: JaggedTensor.cat([a, b, b], dim=1), loop, [jt, other])


@given(batches((2, 3)), st.data())
def test_cat_along_a_feature_joins_tokens(jt, data):
    """Also where the second batch has other slack than the first."""
    other = data.draw(batches((4, 3), of_lengths=jt.lengths().tolist()))
    loop = lambda a, b: [torch.cat((x, y), 1) for x, y in zip(a, b, strict=True)]
    assert_same_as_loop(lambda a, b: JaggedTensor.cat([a, b], dim=2), loop, [jt, other])
    assert_same_as_loop(lambda a, b: torch.cat([a, b], dim=-2), loop, [jt, other])


@given(batches((3,)), st.data())
def test_stack_makes_a_new_feature_axis(jt, data):
    other = data.draw(batches((3,), of_lengths=jt.lengths().tolist()))
    for dim, inner in ((2, 1), (-1, 2)):
        loop = lambda a, b, d=inner: [torch.stack((x, y), d) for x, y in zip(a, b, strict=True)]
        assert_same_as_loop(lambda a, b, d=dim: torch.stack([a, b], d), loop, [jt, other])


@given(batches(), st.integers(1, 4))
def test_split_and_chunk_cut_the_batch_as_torch_cuts_a_dimension(jt, size):
    numbers = torch.arange(jt.batch_size)
    for mine, theirs in ((jt.split(size), numbers.split(size)), (jt.chunk(size), numbers.chunk(size))):
        assert [part.batch_size for part in mine] == [len(part) for part in theirs]
        assert torch.equal(JaggedTensor.cat(mine).values(), jt.values()[: jt.num_tokens])
    assert [part.batch_size for part in torch.split(jt, size)] == [len(part) for part in numbers.split(size)]
    assert [part.batch_size for part in torch.chunk(jt, size)] == [len(part) for part in numbers.chunk(size)]


def test_split_takes_a_list_of_sizes_and_gives_views():
    jt = make_jagged([3, 0, 1, 4], 2)
    parts = jt.split([1, 0, 3])
    assert [part.lengths().tolist() for part in parts] == [[3], [], [0, 1, 4]]
    assert parts[2].values().data_ptr() == jt.values()[3:].data_ptr()


@given(batches((4, 3)))
def test_split_and_chunk_along_a_feature_cut_every_token(jt):
    for dim, inner in ((2, 1), (-2, 1)):
        assert_same_as_loop(
            lambda jt, d=dim: torch.chunk(jt, 2, dim=d)[1], lambda xs, i=inner: [x.chunk(2, i)[1] for x in xs], [jt]
        )
        assert_same_as_loop(
            lambda jt, d=dim: jt.split([1, 3], dim=d)[1], lambda xs, i=inner: [x.split([1, 3], i)[1] for x in xs], [jt]
        )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_part_of_a_batch_does_not_remember_the_longest_sequence_of_the_whole(lengths):
    jt = make_jagged(lengths, 2)
    assert jt.max_length == max(lengths, default=0)
    for end in range(len(lengths) + 1):
        assert jt[:end].max_length == max(lengths[:end], default=0)
        assert jt[:end].to_padded().shape[1] == max(lengths[:end], default=0)


@given(lengths())
def test_cutting_a_part_keeps_the_offsets_of_the_whole(lengths):
    jt = make_jagged(lengths, 2)
    part = jt[1:]
    part.values().mul_(2)
    assert jt.offsets().tolist() == make_jagged(lengths, 2).offsets().tolist()
    assert part.offsets()[0] == 0


def test_a_batch_iterates_over_its_sequences():
    jt = make_jagged([3, 0, 1])
    assert [len(x) for x in jt] == [3, 0, 1]
