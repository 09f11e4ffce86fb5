"""Every way to make a batch, and back, gives the list of tensors that went in."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedTensor
from jaggedtensor.testing import LENGTHS, assert_same_as_loop, make_jagged
from jaggedtensor.testing.cases import random_tensor
from jaggedtensor.testing.strategies import batches, features, lengths

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def assert_lists_equal(got, expected):
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def tensors_of(lengths, feature=(), dtype=torch.float32):
    return [random_tensor(n, *feature, dtype=dtype, seed=i) for i, n in enumerate(lengths)]


@given(lengths(), features(), st.sampled_from(DTYPES))
def test_from_list_gives_the_list_back(lengths, feature, dtype):
    tensors = tensors_of(lengths, feature, dtype)
    jt = JaggedTensor.from_list(tensors)
    assert_lists_equal(jt.to_list(), tensors)
    assert_lists_equal(jt.unbind(), tensors)
    assert jt.batch_size == len(jt) == len(tensors)
    assert jt.offsets().shape == (len(tensors) + 1,)
    assert jt.lengths().tolist() == [len(x) for x in tensors]
    assert jt.num_tokens == sum(lengths)
    assert jt.max_length == max(lengths, default=0)
    if tensors:
        assert jt.dtype == dtype
        assert jt.shape == (len(tensors), None, *feature)


def test_gradients_flow_to_the_tensors_of_a_list():
    tensors = [torch.randn(n, 2, requires_grad=True) for n in (2, 0, 1)]
    JaggedTensor.from_list(tensors).sum(1).square().sum().backward()
    for x in tensors:
        torch.testing.assert_close(x.grad, 2 * x.detach().sum(0).expand_as(x))


@pytest.mark.parametrize(
    ("nested", "dtype"),
    [
        ([[1, 2], [], [3]], torch.int64),
        ([[], [0.5], []], torch.float32),
        ([[], [[1.0, 2.0]], []], torch.float32),
        ([[True], []], torch.bool),
        ([np.array([1, 2]), np.array([3])], torch.int64),
    ],
)
def test_python_and_numpy_lists_take_their_own_dtype(nested, dtype):
    jt = JaggedTensor.from_list(nested)
    assert jt.dtype == dtype
    assert [x.tolist() for x in jt.to_list()] == [list(x) for x in nested]


def test_from_list_converts_when_a_dtype_is_named():
    jt = JaggedTensor.from_list([torch.tensor([1, 2]), torch.tensor([0.5])], dtype=torch.float64)
    assert_lists_equal(
        jt.to_list(), [torch.tensor([1, 2], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)]
    )


def test_values_and_offsets_are_on_the_device_that_from_list_is_given():
    on_meta = torch.empty(3, 2, device="meta")
    for jt in (
        JaggedTensor.from_list([on_meta]),
        JaggedTensor.from_list([on_meta], device="meta"),
        JaggedTensor.from_list([torch.zeros(3, 2)], device="meta"),
    ):
        assert jt.values().is_meta
        assert jt.offsets().is_meta
        assert jt.layout.device.type == "meta"


@given(batches())
def test_from_lengths_and_from_offsets_are_the_same_batch(jt):
    again = JaggedTensor.from_lengths(jt.values(), jt.lengths())
    assert_lists_equal(again.to_list(), jt.to_list())
    assert again.offsets().dtype == torch.int64
    assert again.layout.same_as(jt.layout)
    assert again.max_length == jt.max_length


@given(batches(), st.sampled_from([0, -1.5, float("inf")]), st.integers(0, 2))
def test_to_padded_pads_every_sequence_to_the_same_width(jt, fill, extra):
    width = jt.max_length + extra

    def loop(tensors):
        rows = [torch.cat((x, x.new_full((width - len(x), *x.shape[1:]), fill))) for x in tensors]
        return torch.stack(rows) if rows else jt.values().new_zeros(0, width, *jt.values().shape[1:])

    assert_same_as_loop(lambda jt: jt.to_padded(fill, width), loop, [jt])
    assert torch.equal(jt.to_padded(fill), jt.to_padded(fill, jt.max_length))


@given(batches())
def test_padded_and_lengths_or_mask_come_back_as_the_same_sequences(jt):
    padded = jt.to_padded(fill=7)
    assert_lists_equal(JaggedTensor.from_padded(padded, jt.lengths()).to_list(), jt.to_list())
    assert_lists_equal(JaggedTensor.from_padded(padded, mask=jt.mask()).to_list(), jt.to_list())
    whole = JaggedTensor.from_padded(padded)
    assert_lists_equal(whole.to_list(), list(padded))


@given(lengths(), features())
def test_from_padded_sends_gradients_to_tokens_only(lengths, feature):
    width = max(lengths, default=0) + 1
    padded = random_tensor(len(lengths), width, *feature).requires_grad_()
    JaggedTensor.from_padded(padded, torch.tensor(lengths, dtype=torch.int64)).values().square().sum().backward()
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    mask = mask.view(*mask.shape, *[1] * len(feature))
    torch.testing.assert_close(padded.grad, 2 * padded.detach() * mask)


def test_a_mask_may_mark_tokens_anywhere():
    padded = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[False, True, True], [True, False, True]])
    jt = JaggedTensor.from_padded(padded, mask=mask)
    assert [x.tolist() for x in jt.to_list()] == [[2, 3], [4, 6]]


@given(batches(), st.integers(0, 2))
def test_mask_is_true_for_tokens(jt, extra):
    expected = [[j < n for j in range(jt.max_length + extra)] for n in jt.lengths().tolist()]
    assert jt.mask(jt.max_length + extra).tolist() == expected
    assert jt.mask().shape == (jt.batch_size, jt.max_length)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("max_length", [None, 9])
def test_padding_does_not_depend_on_the_constructor(lengths, max_length):
    """BOX-06: a width that is never asked of the constructor."""
    tensors = tensors_of(lengths)
    values = torch.cat(tensors) if tensors else torch.empty(0)
    counts = torch.tensor(lengths, dtype=torch.int64)
    by_list, by_lengths = JaggedTensor.from_list(tensors), JaggedTensor.from_lengths(values, counts)
    by_offsets = JaggedTensor(values, by_list.offsets().clone())
    unchecked = JaggedTensor(values, by_list.offsets().clone(), validate=False)
    for jt in (by_list, by_lengths, by_offsets, unchecked):
        padded = jt.to_padded(max_length=max_length)
        assert padded.shape == (len(lengths), max_length or max(lengths, default=0))
        assert padded.sum() == values.sum() or torch.isclose(padded.sum(), values.sum())


def test_padding_an_entirely_empty_batch_gives_fill_and_a_gradient_of_no_rows():
    """EMP-11."""
    values = torch.empty(0, 4, 64, requires_grad=True)
    jt = JaggedTensor.from_lengths(values, torch.zeros(5, dtype=torch.int64))
    padded = jt.to_padded(fill=2.5, max_length=3)
    assert torch.equal(padded, torch.full((5, 3, 4, 64), 2.5))
    padded.sum().backward()
    assert values.grad.shape == (0, 4, 64)


@pytest.mark.parametrize("lengths", [(2, 2, 0, 0), (0, 0, 3), (0, 0), ()], ids=str)
def test_empty_sequences_at_either_end_are_there_in_every_operation(lengths):
    """EMP-10."""
    tensors = tensors_of(lengths, (2,))
    jt = JaggedTensor.from_list(tensors) if tensors else JaggedTensor(torch.zeros(0, 2), torch.tensor([0]))
    assert jt.offsets().shape == (len(lengths) + 1,)
    assert jt.lengths().tolist() == list(lengths)
    assert_lists_equal(jt.unbind(), tensors)
    assert jt.to_padded().shape == (len(lengths), max(lengths, default=0), 2)
    assert jt.mask().sum(1).tolist() == list(lengths)
    for mine, x in zip(jt.sum(1), tensors, strict=True):
        torch.testing.assert_close(mine, x.sum(0))
    parts = jt.split(1)
    assert [part.lengths().tolist() for part in parts] == ([[n] for n in lengths] or [[]])  # as torch splits nothing
    twice = JaggedTensor.cat([jt, *parts])
    assert twice.lengths().tolist() == [*lengths, *lengths]
    assert_lists_equal(twice.unbind(), [*tensors, *tensors])


@given(batches())
def test_nested_tensors_hold_the_same_sequences(jt):
    nested = jt.to_nested()
    assert nested.layout == torch.jagged
    assert_lists_equal(list(nested.unbind()), jt.to_list())
    back = JaggedTensor.from_nested(nested)
    assert_lists_equal(back.to_list(), jt.to_list())
    if jt.num_tokens:
        assert back.values().data_ptr() == jt.values().data_ptr()


def test_gradients_flow_through_nested_tensors_both_ways():
    jt = make_jagged([2, 0, 1], 3, slack=2, requires_grad=True)
    JaggedTensor.from_nested(jt.to_nested()).values().square().sum().backward()
    torch.testing.assert_close(jt.values().grad[:3], 2 * jt.values().detach()[:3])
    assert torch.equal(jt.values().grad[3:], torch.zeros(2, 3, dtype=torch.float64))


def test_strided_nested_tensors_are_converted():
    tensors = [torch.randn(2, 3), torch.randn(1, 3)]
    assert_lists_equal(JaggedTensor.from_nested(torch.nested.nested_tensor(tensors)).to_list(), tensors)


def test_nested_tensors_with_holes_are_packed():
    padded = torch.arange(12.0).view(2, 6)
    narrowed = torch.nested.narrow(padded, 1, torch.tensor([1, 0]), torch.tensor([2, 4]), layout=torch.jagged)
    assert [x.tolist() for x in JaggedTensor.from_nested(narrowed).to_list()] == [[1, 2], [6, 7, 8, 9]]


@given(lengths(), features(), st.sampled_from([x for x in DTYPES if x != torch.bfloat16]))
def test_arrow_arrays_hold_the_same_sequences(lengths, feature, dtype):
    jt = make_jagged(lengths, *feature, dtype=dtype, slack=2)
    array = jt.to_arrow()
    assert array.to_pylist() == [x.tolist() for x in jt.to_list()]
    assert_lists_equal(JaggedTensor.from_arrow(array).to_list(), jt.to_list())
    assert_lists_equal(JaggedTensor.from_arrow(pa.chunked_array([array, array])).to_list(), jt.to_list() * 2)


def test_bfloat16_goes_to_arrow_as_float32():
    jt = make_jagged([2, 0], dtype=torch.bfloat16)
    assert JaggedTensor.from_arrow(jt.to_arrow()).dtype == torch.float32


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([[1, 2], None, [3]]), [[1, 2], [], [3]]),
        (pa.array([[1, 2], [3], [], [4, 5]]).slice(1), [[3], [], [4, 5]]),
        (pa.array([[1], [2, 3]], type=pa.large_list(pa.int32())), [[1], [2, 3]]),
        (pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int64(), 2)), [[1, 2], [3, 4]]),
        (pa.array([[1, 2], None], type=pa.list_(pa.int64(), 2)), [[1, 2], []]),
        (pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], type=pa.list_(pa.list_(pa.int64(), 2))), None),
        (pa.chunked_array([[[1], []], [[2, 3]]]), [[1], [], [2, 3]]),
        (pa.array([[True], [False, True]]), [[True], [False, True]]),
        (pa.array([], type=pa.list_(pa.float32())), []),
    ],
)
def test_arrow_lists_of_every_kind_are_read(array, expected):
    got = [x.tolist() for x in JaggedTensor.from_arrow(array).to_list()]
    assert got == (array.to_pylist() if expected is None else expected)


def test_the_tensors_of_an_arrow_array_may_be_written_to():
    array = pa.array([[1, 2], [3]])
    JaggedTensor.from_arrow(array).values().add_(1)
    assert array.to_pylist() == [[1, 2], [3]]


def test_an_empty_list_is_a_batch_of_no_sequences():
    jt = JaggedTensor.from_list([])
    assert jt.offsets().tolist() == [0]
    assert jt.to_list() == []
    assert jt.values().shape == (0,)
    assert jt.shape == (0, None)
