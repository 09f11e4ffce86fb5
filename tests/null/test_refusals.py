"""What a batch refuses, and how: name, expected, got, remedy."""

import math

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.testing import make_jagged

ROWS = torch.zeros(5, 2)


def batch():
    return make_jagged([3, 0, 2], 4, dtype=torch.float32)


# -- offsets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (
            [0, 3, 2, 5],
            r"offsets must be non-decreasing, so offsets\[2\] >= 3, got 2; build offsets with JaggedTensor",
        ),
        ([1, 3, 5], r"offsets\[0\] must be 0, got 1; slice values and subtract offsets\[0\]"),
        ([-1, 3, 5], r"offsets\[0\] must be 0, got -1"),
        (
            [0, 3, 6],
            r"offsets\[-1\] must be at most 5 \(rows of values\), got 6; build offsets with JaggedTensor.from_lengths",
        ),
        ([0, 2**40], r"offsets\[-1\] must be at most 5 \(rows of values\), got 1099511627776"),
        ([], r"offsets must be of length B \+ 1 \(a batch of no sequences is \[0\]\), got int64\[0\] on cpu"),
        ([1000], r"offsets\[0\] must be 0, got 1000"),
        ([[0, 5]], r"offsets must be of rank 1, got int64\[1, 2\] on cpu"),
        (5, r"offsets must be of rank 1, got int64\[\] on cpu"),
    ],
)
def test_offsets_that_describe_no_batch_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        JaggedTensor(ROWS, torch.tensor(offsets, dtype=torch.int64))


def test_a_batch_of_no_sequences_has_one_form():
    """OFS-03."""
    assert JaggedTensor(ROWS, torch.tensor([0])).to_list() == []
    for offsets in ([3], [-1]):
        with pytest.raises(ValueError, match=r"offsets\[0\] must be 0"):
            JaggedTensor(ROWS, torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.float32, torch.float64, torch.bool])
def test_offsets_of_another_dtype_are_never_reinterpreted(dtype):
    """OFS-06."""
    name = str(dtype).removeprefix("torch.")
    message = rf"offsets must be int32 or int64, got {name}\[2\] on cpu; cast with offsets.to\(torch.int64\)"
    with pytest.raises(TypeError, match=message):
        JaggedTensor(ROWS, torch.tensor([0, 1]).to(dtype))
    with pytest.raises(TypeError, match=r"lengths must be int32 or int64"):
        JaggedTensor.from_lengths(ROWS, torch.tensor([0, 1]).to(dtype))
    with pytest.raises(TypeError, match=r"offsets must be int32 or int64"):
        JaggedLayout(torch.tensor([0, 1]).to(dtype))


@pytest.mark.parametrize("offsets", [[0, 5], None, (0, 5), 5])
def test_offsets_that_are_no_tensor_are_refused(offsets):
    with pytest.raises(TypeError, match=r"offsets must be a Tensor, got "):
        JaggedTensor(ROWS, offsets)


@pytest.mark.parametrize("values", [[[1.0, 2.0]], None, 5])
def test_values_that_are_no_tensor_are_refused(values):
    message = "values must be a Tensor, got .*; for a list of tensors use JaggedTensor.from_list"
    with pytest.raises(TypeError, match=message):
        JaggedTensor(values, torch.tensor([0, 1]))


def test_values_without_rows_are_refused():
    with pytest.raises(ValueError, match=r"values must be of shape \[rows, \*feature\], got float32\[\] on cpu"):
        JaggedTensor(torch.tensor(1.0), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"new_values must be of shape \[rows, \*feature\]"):
        batch().with_values(torch.tensor(1.0))


def test_sparse_values_are_refused():
    with pytest.raises(TypeError, match=r"values must be a dense \(strided\) Tensor, got layout torch.sparse_coo"):
        JaggedTensor(ROWS.to_sparse(), torch.tensor([0, 5]))


def test_values_and_offsets_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"offsets must be on cpu, got int64\[2\] on meta; move it with .to\('cpu'\)"):
        JaggedTensor(ROWS, torch.tensor([0, 5], device="meta"))
    with pytest.raises(ValueError, match=r"lengths must be on meta, got int64\[1\] on cpu"):
        JaggedTensor.from_lengths(ROWS.to("meta"), torch.tensor([5]))
    with pytest.raises(ValueError, match=r"new_values must be on cpu, got float32\[5, 2\] on meta"):
        batch().with_values(ROWS.to("meta"))


def test_fewer_rows_than_tokens_are_refused():
    """SLK-06: a mask made for other keys."""
    message = r"offsets\[-1\] must be at most 4 \(rows of new_values\), got 5"
    with pytest.raises(ValueError, match=message):
        batch().with_values(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"offsets\[-1\] must be at most 4 \(rows of values\), got 5"):
        JaggedTensor(torch.zeros(4, 2), batch().layout)


def test_unchecked_offsets_are_the_callers_business():
    JaggedTensor(ROWS, torch.tensor([0, 3, 5]), validate=False)
    with pytest.raises(ValueError, match=r"offsets\[-1\] must be at most 5"):  # costs nothing on a CPU
        JaggedTensor(ROWS, torch.tensor([0, 3, 6]), validate=False)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_negative_lengths_are_refused():
    """OVF-08."""
    message = r"lengths must be at least 0, got -5; clamp them with lengths.clamp\(min=0\)"
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=message):
            JaggedTensor.from_lengths(ROWS, torch.tensor([5, -5, 5], dtype=dtype))
        with pytest.raises(ValueError, match=message):
            JaggedLayout.from_lengths(torch.tensor([-5, 5], dtype=dtype))
    with pytest.raises(ValueError, match=r"lengths must be at least 0, got -1"):
        JaggedTensor.from_padded(torch.zeros(2, 3), torch.tensor([-1, 2]))


def test_int32_lengths_that_sum_past_2_to_31_do_not_wrap():
    """OVF-08."""
    lengths = torch.tensor([2**30] * 3, dtype=torch.int32)
    values = torch.zeros(1).expand(3 * 2**30)
    jt = JaggedTensor.from_lengths(values, lengths)
    assert jt.offsets().tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert jt.num_tokens == 3 * 2**30
    assert len(jt[2]) == 2**30
    assert jt[1:].num_tokens == 2**31
    with pytest.raises(ValueError, match=r"offsets\[-1\] must be at most 5 \(rows of values\), got 3221225472"):
        JaggedTensor.from_lengths(torch.zeros(5), lengths)
    on_meta = JaggedTensor.from_lengths(torch.empty(3 * 2**30, device="meta"), lengths.to("meta"))
    assert on_meta.offsets().dtype == torch.int64


def test_batches_joined_past_2_to_31_tokens_have_int64_offsets():
    narrow = JaggedLayout(torch.tensor([0, 2**30], dtype=torch.int32))
    joined = JaggedTensor.cat([JaggedTensor(torch.empty(2**30, device="meta"), narrow.to("meta"))])
    assert joined.offsets().dtype == torch.int64


def test_lengths_that_do_not_fit_a_padded_tensor_are_refused():
    padded = torch.zeros(2, 3)
    for lengths, message in (
        (torch.tensor([4, 0]), r"lengths must be at most 3 \(the width of padded\), got 4"),
        (torch.tensor([1]), r"lengths must be of shape \[2\] \(the batch of padded\), got int64\[1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            JaggedTensor.from_padded(padded, lengths)
    with pytest.raises(ValueError, match=r"padded must be of shape \[B, L, \*feature\], got float32\[2\]"):
        JaggedTensor.from_padded(torch.zeros(2))
    for mask in (torch.ones(2, 3), torch.ones(2, 2, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be bool of shape \[2, 3\] \(true where there is a token\)"):
            JaggedTensor.from_padded(padded, mask=mask)
    with pytest.raises(TypeError, match=r"lengths and mask must be given one at a time, got both; drop one"):
        JaggedTensor.from_padded(padded, torch.tensor([1, 1]), mask=torch.ones(2, 3, dtype=torch.bool))


def test_padding_never_drops_a_token():
    """SLK-07, BOX-06."""
    message = r"max_length must be at least 3 \(the longest sequence\), got 2; cut first: jt\[:, :2\]"
    for fresh in (batch(), batch()):
        with pytest.raises(ValueError, match=message):
            fresh.to_padded(max_length=2)
        with pytest.raises(ValueError, match=message):
            fresh.mask(2)
        assert fresh[:, :2].to_padded(max_length=2).shape == (3, 2, 4)
    with pytest.raises(ValueError, match=r"max_length must be at least 0, got -1"):
        batch().to_padded(max_length=-1)


# -- lists, nested tensors, arrow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            torch.zeros(2, 3),
            TypeError,
            "tensors must be a list of tensors, got .*; for a padded tensor use JaggedTensor.from_padded",
        ),
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            ValueError,
            r"tensors\[1\] must be of feature shape \[3\], as the first, got float32\[2, 4\]",
        ),
        ([torch.zeros(2), torch.zeros(2, 1)], ValueError, r"tensors\[1\] must be of feature shape \[\], as the first"),
        (
            [torch.zeros(2), torch.tensor(1.0)],
            ValueError,
            r"tensors\[1\] must be of shape \[L, \*feature\], got .*; use x\[None\] for a single token",
        ),
        ([torch.zeros(2), torch.zeros(2, device="meta")], ValueError, r"tensors\[1\] must be on cpu, as the first"),
        (
            [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
            TypeError,
            r"tensors\[1\] must be torch.float32, as the first, got int64\[2\] on cpu; name one with dtype=",
        ),
    ],
)
def test_lists_that_are_no_batch_are_refused(tensors, error, message):
    with pytest.raises(error, match=message):
        JaggedTensor.from_list(tensors)


def test_nested_tensors_are_refused_by_kind():
    with pytest.raises(
        TypeError, match=r"nt must be a nested tensor, got .*; for a list of tensors use JaggedTensor.from_list"
    ):
        JaggedTensor.from_nested(torch.zeros(2, 3))
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    with pytest.raises(
        ValueError, match=r"the ragged dimension of nt must be dimension 1, got 2; transpose it back first"
    ):
        JaggedTensor.from_nested(nested.transpose(1, 2))


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (
            pa.array([1, 2]),
            TypeError,
            "array must be a pyarrow list array, got Int64Array of int64; pass the column itself",
        ),
        ([[1], [2]], TypeError, "array must be a pyarrow list array, got list"),
        (
            pa.array([["a"], []]),
            TypeError,
            "the elements of array must be numbers or booleans, got string; encode them",
        ),
        (pa.array([[1, None]]), ValueError, "the elements of array must be without nulls, got 1 nulls; fill them"),
        (pa.array([[[1, 2], None]], type=pa.list_(pa.list_(pa.int64(), 2))), ValueError, "must be without nulls"),
        (pa.array([[[1], [2, 3]]]), TypeError, "the elements of array must be numbers or booleans, got list"),
    ],
)
def test_arrow_arrays_are_refused_by_kind(array, error, message):
    with pytest.raises(error, match=message):
        JaggedTensor.from_arrow(array)


# -- indices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, r"index must be in -3..2 \(batch_size 3\), got 3"),
        (-4, IndexError, r"index must be in -3..2 \(batch_size 3\), got -4"),
        (
            (slice(None), 3),
            TypeError,
            r"the index of dimension 1 \(ragged\) must be a slice, got 3; use jt.first\(\) or jt.last\(\)",
        ),
        ((slice(None), -1), TypeError, r"use jt.first\(\) or jt.last\(\)"),
        (
            (slice(None), torch.tensor([0])),
            TypeError,
            r"\(ragged\) must be a slice, got int64\[1\] on cpu; use jt.map_values",
        ),
        ((slice(None), slice(None, None, -1)), ValueError, r"the step of a slice must be positive, got -1"),
        ((slice(None), slice(None, None, 0)), ValueError, r"the step of a slice must be positive, got 0"),
        ((slice(None), slice(0.5, None)), TypeError, r"the bounds of a slice must be ints or None, got 0.5"),
        (torch.tensor([0, 3]), IndexError, r"index must be in -3..2, got 0..3"),
        (torch.tensor([-4]), IndexError, r"index must be in -3..2, got -4..-4"),
        (torch.tensor([True, False]), IndexError, r"a bool index must be of length 3 \(batch_size\), got bool\[2\]"),
        (torch.tensor([0.0]), TypeError, r"index must be int32, int64 or bool, got float32\[1\]"),
        (torch.tensor([[0]]), ValueError, r"index must be of rank 1, got int64\[1, 1\]"),
        (True, TypeError, "index must be an int, a slice, or a tensor of sequence numbers or of bool, got True"),
        ("a", TypeError, "index must be an int, a slice"),
        (None, TypeError, "index must be an int, a slice"),
        ((0, 0, 0, 0), IndexError, "index must be of at most 3 dimensions, got 4"),
    ],
)
def test_indices_that_choose_nothing_are_refused(index, error, message):
    with pytest.raises(error, match=message):
        batch()[index]


def test_an_empty_batch_has_no_sequence_to_choose():
    with pytest.raises(IndexError, match=r"index must be absent: the batch is empty, got 0"):
        batch()[:0][0]


def test_parts_must_add_up_to_the_batch():
    for sizes in ([1, 1], [4], [-1, 4]):
        with pytest.raises(ValueError, match=r"sizes must be non-negative with sum 3 \(batch_size\), got \[.*\]"):
            batch().split(sizes)
    for call in (lambda: batch().split(0), lambda: batch().chunk(0)):
        with pytest.raises(ValueError, match=r"must be at least 1, got 0"):
            call()


def test_batches_that_do_not_fit_are_not_joined():
    jt = batch()
    for other, dim, message in (
        (make_jagged([3, 0, 2], 5), 0, r"tensors\[1\] must be of feature shape \[4\], as the first"),
        (make_jagged([3, 2], 4), 1, r"tensors\[1\] must be of batch size 3, as the first, got 2"),
        (make_jagged([3, 1, 1], 4), 2, r"jagged operands must be of the same layout \(equal offsets\)"),
        (jt.to("meta"), 0, r"tensors\[1\] must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            JaggedTensor.cat([jt, other], dim)
    with pytest.raises(ValueError, match=r"tensors must be at least one JaggedTensor, got none"):
        JaggedTensor.cat([])
    with pytest.raises(TypeError, match=r"tensors\[1\] must be a JaggedTensor, got float32"):
        JaggedTensor.cat([jt, torch.zeros(5, 4)])
    with pytest.raises(IndexError, match=r"dim must be in -3..2, got 3"):
        JaggedTensor.cat([jt, jt], 3)


# -- operands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (5, 4), (2, 4)])
def test_a_row_for_each_sequence_must_say_so(shape):
    """Contract 9: (B, D) beside (B, j, D)."""
    with pytest.raises(ValueError, match=r"stands on the ragged dimension must be 1, got float32.*; use x\[:, None\]"):
        batch() * torch.zeros(shape)
    with pytest.raises(ValueError, match=r"x\[:, None\]"):
        torch.zeros(shape) - batch()


def test_a_row_for_each_token_is_pointed_to_with_values():
    with pytest.raises(ValueError, match=r"or jt.with_values\(x\) if x holds one row for each token"):
        batch() * torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.zeros(2, 1, 4), r"dimension 0 of operand 1 must be 3 \(batch_size\) or 1, got shape \[2, 1, 4\]"),
        (
            torch.zeros(1, 3, 1, 4),
            r"dimensions of operand 1 must be at most 3, as \(B, j, \*feature\) of the jagged operand",
        ),
        (torch.zeros(4, device="meta"), r"operand 1 must be on cpu, got float32\[4\] on meta"),
        (
            make_jagged([3, 0, 2], 4, 1),
            r"dimensions of operand 1 must be 3, as \(B, j, \*feature\) of the other, got 4; .* x.unsqueeze\(-1\)",
        ),
        (make_jagged([3, 1, 1], 4), r"jagged operands must be of the same layout \(equal offsets\), got JaggedLayout"),
        (make_jagged([3, 2], 4), r"jagged operands must be of the same layout"),
    ],
)
def test_operands_that_do_not_align_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        batch() + other


def test_one_row_for_each_of_one_sequence_is_no_chance_alignment():
    """B = 1 and B = j: equal numbers mean nothing."""
    jt = make_jagged([3, 0, 0], 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x\[:, None\]"):
        jt + torch.zeros(3, 4)
    square = make_jagged([4, 0, 0, 0], 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x\[:, None\]"):
        square * torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda jt: torch.where(jt > 0),
            ValueError,
            "the operands of where must be a condition and two to choose from",
        ),
        (
            lambda jt: jt @ torch.zeros(3, 4, 2),
            ValueError,
            r"the dense operand of matmul must be of at most 2 dimensions, .*jt.unbind\(\)",
        ),
        (
            lambda jt: jt.unsqueeze(2) @ torch.zeros(5, 4, 2),
            ValueError,
            r"of at most 2 dimensions, so that none stands on the batch",
        ),
        (
            lambda jt: torch.zeros(2, 5) @ jt,
            ValueError,
            r"the right operand of matmul must be matrices for each token, .*; use jt @ W.T",
        ),
        (
            lambda jt: jt @ jt,
            ValueError,
            r"jagged operands of matmul must be matrices for each token.*\(a \* b\).sum\(-1\)",
        ),
        (
            lambda jt: torch.add(jt, 1, out=torch.zeros(5, 4)),
            NotImplementedError,
            "out must be absent for jagged operands",
        ),
        (
            lambda jt: F.layer_norm(jt, (3, 4, 5)),
            ValueError,
            r"normalized_shape must be of at most 1 dimensions \(the features\)",
        ),
        (
            lambda jt: F.linear(torch.zeros(2, 4), jt),
            TypeError,
            "the JaggedTensor must be the first argument of linear",
        ),
        (lambda jt: F.cross_entropy(jt, torch.zeros(5, dtype=torch.int64)), TypeError, r"input.with_values\(target\)"),
    ],
)
def test_arguments_without_a_meaning_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(batch())


# -- dimensions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sum", "mean", "amax", "amin", "logsumexp", "std", "softmax", "log_softmax", "cumsum"]
)
def test_the_batch_is_no_dimension_to_reduce(name):
    message = (
        r"dim must be a feature dimension \(2..2\), got 0 \(the batch\); reduce each sequence first, e.g. jt.sum\(1\)"
    )
    with pytest.raises(ValueError, match=message):
        getattr(batch(), name)(0)
    for dim in (3, -4):
        with pytest.raises(IndexError, match=rf"dim must be in -3..2, got {dim}"):
            getattr(batch(), name)(dim)
    for dim in (1.0, True, "1", (1,)):
        with pytest.raises(TypeError, match=r"dim must be an int, got"):
            getattr(batch(), name)(dim)


@pytest.mark.parametrize("name", ["mean", "std", "logsumexp", "softmax", "log_softmax"])
def test_means_of_integers_are_refused_as_in_torch(name):
    jt = make_jagged([3, 0], dtype=torch.int64)
    with pytest.raises(
        TypeError, match=rf"values must be floating point for {name}, got int64\[3\] on cpu; convert with .float\(\)"
    ):
        getattr(jt, name)(1)


@pytest.mark.parametrize(
    "call",
    [
        lambda jt: torch.argmax(jt, dim=1),
        lambda jt: jt.topk(2, 1),
        lambda jt: torch.sort(jt, dim=1),
        lambda jt: jt.max(1),
        lambda jt: F.normalize(jt),
        lambda jt: jt.transpose(1, 2),
        lambda jt: jt.flatten(),
        lambda jt: jt.flatten(1, 2),
        lambda jt: jt.squeeze(1),
        lambda jt: jt.unflatten(1, (1, -1)),
        lambda jt: torch.split(jt, 2, dim=1),
    ],
)
def test_functions_of_features_refuse_the_ragged_dimension(call):
    with pytest.raises(
        ValueError, match=r"dim must be a feature dimension \(2..2\), got .* \(the (ragged dimension|batch)\)"
    ):
        call(batch())


def test_a_squeeze_without_a_dimension_is_refused():
    """EMP-13: with one token it would take the ragged dimension."""
    with pytest.raises((TypeError, ValueError), match=r"dim"):
        make_jagged([1], 1).squeeze()


@pytest.mark.parametrize("dim", [0, 1, 4, -4])
def test_a_new_axis_must_be_among_features(dim):
    with pytest.raises(ValueError, match=r"dim must be a place among the features \(2..3\), got"):
        batch().unsqueeze(dim)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("permute", lambda jt: torch.permute(jt, (0, 2, 1))),
        ("reshape", lambda jt: torch.reshape(jt, (3, -1))),
        ("bmm", lambda jt: torch.bmm(jt, jt)),
        ("batch_norm", lambda jt: F.batch_norm(jt, torch.zeros(4), torch.ones(4))),
        ("conv1d", lambda jt: torch.conv1d(jt, torch.zeros(1, 1, 1))),
        ("flip", lambda jt: torch.flip(jt, (1,))),
        ("gather", lambda jt: torch.gather(jt, 1, torch.zeros(1, 1, 1, dtype=torch.int64))),
        ("scaled_dot_product_attention", lambda jt: F.scaled_dot_product_attention(jt, jt, jt)),
        ("einsum", lambda jt: torch.einsum("bjd->bj", jt)),
    ],
)
def test_torch_functions_without_a_jagged_meaning_are_refused(name, call):
    message = (
        rf"torch function '{name}' must be one with a meaning for each token of a JaggedTensor, got another; use "
        r"jt.map_values\(fn\) for a token-wise function, or jt.unbind\(\) or jt.to_padded\(\)"
    )
    with pytest.raises(NotImplementedError, match=message):
        call(batch())


def test_map_values_is_for_functions_of_single_tokens():
    for function in (lambda x: x[:2], lambda x: x.sum(), lambda x: x.sum(0)):
        with pytest.raises(
            ValueError, match=r"the result of fn must be of 5 rows, got .*; map_values is for functions of single"
        ):
            batch().map_values(function)
    with pytest.raises(TypeError, match=r"the result of fn must be a Tensor, got 5"):
        batch().map_values(len)


def test_nothing_half_done_is_left_behind():
    jt = batch()
    before = jt.values().clone()
    for wrong in (lambda: jt * torch.zeros(3, 4), lambda: jt[5], lambda: jt.to_padded(max_length=1), lambda: jt.sum(0)):
        with pytest.raises((ValueError, IndexError)):
            wrong()
    assert torch.equal(jt.values(), before)
    assert jt.sum(1).isfinite().all()
    assert math.isfinite(jt.mean())
