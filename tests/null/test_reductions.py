"""Reductions, softmax and cumulative sums are those of a loop over sequences, gradients included."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaggedtensor import JaggedTensor
from jaggedtensor.testing import assert_same_as_loop, assert_within_budget, make_jagged
from jaggedtensor.testing.strategies import batches

# What one sequence gives; an empty one is not torch's to answer.
OF_ONE = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(0),
}
SCANS = {
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
}


def stacked(rows, like):
    return torch.stack(rows) if rows else like.new_zeros(0, *like.shape[1:])


def reduced(function, xs, like, empty=0.0):
    """One row for each sequence. The deviation of a single token is NaN, of which torch warns."""
    nothing = lambda x: x.sum(0) + empty
    alone = lambda x: torch.full_like(x[0], math.nan)
    single = alone if function is OF_ONE["std"] else function
    return stacked([nothing(x) if not len(x) else single(x) if len(x) == 1 else function(x) for x in xs], like)


@pytest.mark.parametrize("name", OF_ONE)
@given(jt=batches())
def test_dimension_1_reduces_each_sequence(name, jt):
    empty = -math.inf if name == "logsumexp" else 0.0
    loop = lambda xs: reduced(OF_ONE[name], xs, jt.values(), empty)
    assert_same_as_loop(lambda jt: getattr(jt, name)(1), loop, [jt])
    assert_same_as_loop(lambda jt: getattr(torch, name)(jt, dim=1), loop, [jt])
    assert_same_as_loop(lambda jt: getattr(jt, name)(1, keepdim=True), lambda xs: loop(xs)[:, None], [jt])


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")  # torch warns where there is no token at all
@pytest.mark.parametrize("name", OF_ONE)
@given(jt=batches((2, 3)), dim=st.sampled_from([2, 3, -1, -2]), keepdim=st.booleans())
def test_further_dimensions_reduce_features(name, jt, dim, keepdim):
    inner = dim if dim < 0 else dim - 1
    options = {"keepdim": keepdim}
    assert_same_as_loop(
        lambda jt: getattr(jt, name)(dim, **options),
        lambda xs: [getattr(torch, name)(x, inner, **options) for x in xs],
        [jt],
    )


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "std", "var", "prod", "max", "min"])
@given(jt=batches())
def test_no_dimension_reduces_all_tokens(name, jt):
    if jt.num_tokens < 2:  # nothing for torch to answer, or with a warning
        return
    assert_same_as_loop(lambda jt: getattr(jt, name)(), lambda xs: getattr(torch.cat(xs), name)(), [jt])


@given(batches(max_slack=2))
def test_the_sum_of_no_tokens_at_all_is_zero(jt):
    assert (jt * 0).sum() == 0
    assert (jt[:0]).sum() == 0


@pytest.mark.parametrize("name", SCANS)
@given(jt=batches())
def test_scans_along_dimension_1_stay_within_a_sequence(name, jt):
    loop = lambda xs: [SCANS[name](x, 0) for x in xs]
    assert_same_as_loop(lambda jt: getattr(jt, name)(1), loop, [jt])
    assert_same_as_loop(lambda jt: getattr(torch, name)(jt, dim=1), loop, [jt])


@pytest.mark.parametrize("name", SCANS)
@given(jt=batches((2, 3)), dim=st.sampled_from([2, 3, -1, -2]))
def test_scans_along_features_stay_within_a_token(name, jt, dim):
    inner = dim if dim < 0 else dim - 1
    assert_same_as_loop(lambda jt: getattr(jt, name)(dim), lambda xs: [SCANS[name](x, inner) for x in xs], [jt])


@pytest.mark.parametrize("correction", [0, 1, 2, 2.5])
@given(jt=batches())
def test_std_takes_the_correction_of_torch(correction, jt):
    def one(x):
        if len(x) > correction:
            return x.std(0, correction=correction)
        return torch.full_like(x.sum(0), math.nan if len(x) else 0)

    loop = lambda xs: stacked([one(x) for x in xs], jt.values())
    assert_same_as_loop(lambda jt: jt.std(1, correction=correction), loop, [jt])


def test_std_of_equal_tokens_has_a_zero_gradient():
    values = torch.ones(3, 2, requires_grad=True)
    JaggedTensor(values, torch.tensor([0, 3])).std(1).sum().backward()
    assert torch.equal(values.grad, torch.zeros(3, 2))


@pytest.mark.parametrize("name", ["amax", "amin"])
def test_equal_extrema_share_the_gradient(name):
    values = torch.tensor([[2.0], [2.0], [1.0], [1.0], [5.0]], requires_grad=True)
    getattr(JaggedTensor(values, torch.tensor([0, 4, 4, 5])), name)(1).sum().backward()
    expected = {"amax": [0.5, 0.5, 0, 0, 1], "amin": [0, 0, 0.5, 0.5, 1]}[name]
    assert values.grad.flatten().tolist() == expected


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ["sum", "amax", "amin", "cumsum"])
@settings(max_examples=15)
@given(st.data())
def test_integers_give_what_torch_gives(dtype, name, data):
    jt = data.draw(batches(dtype=dtype))
    if name == "cumsum":
        assert_same_as_loop(lambda jt: jt.cumsum(1), lambda xs: [x.cumsum(0) for x in xs], [jt])
        return

    def loop(xs):
        kind = torch.int64 if name == "sum" else dtype
        rows = [getattr(torch, name)(x, 0) if len(x) else x.new_zeros(x.shape[1:], dtype=kind) for x in xs]
        return torch.stack(rows) if rows else torch.zeros(0, *jt.values().shape[1:], dtype=kind)

    assert_same_as_loop(lambda jt: getattr(jt, name)(1), loop, [jt])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
def test_sums_of_narrow_integers_do_not_wrap(dtype):
    top = torch.iinfo(dtype).max
    jt = JaggedTensor(torch.full((5,), top, dtype=dtype), torch.tensor([0, 4, 4, 5]))
    assert jt.sum(1).tolist() == [4 * top, 0, top]
    assert jt.cumsum(1).values().tolist() == [top, 2 * top, 3 * top, 4 * top, top]


def test_extrema_of_integers_reach_the_ends_of_the_dtype():
    ends = torch.iinfo(torch.int64)
    jt = JaggedTensor(torch.tensor([ends.min, ends.max, ends.min]), torch.tensor([0, 2, 2, 3]))
    assert jt.amax(1).tolist() == [ends.max, 0, ends.min]
    assert jt.amin(1).tolist() == [ends.min, 0, ends.min]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*OF_ONE, *SCANS])
def test_low_precision_is_summed_in_float32_and_rounded_once(name, dtype):
    """1000 tokens of one sign: a half-precision running sum would stop growing."""
    jt = make_jagged([1000, 0, 3, 2], 4, dtype=dtype, seed=1).map_values(lambda x: x.abs())
    mine, exact = getattr(jt, name)(1), getattr(jt.double(), name)(1)
    if isinstance(mine, JaggedTensor):
        mine, exact = mine.values(), exact.values()
    # Each sequence has a budget of its own: sums of a long one are large, softmax of it is small.
    assert_within_budget(mine, exact.to(dtype), exact, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dim", [None, 1, 2])
def test_a_named_dtype_is_that_of_the_terms_and_of_the_result(dim, dtype):
    jt = make_jagged([3, 0, 1], 2, dtype=torch.float32).map_values(lambda x: 3 * x)
    converted = jt.values().to(dtype)
    result = jt.sum(dim, dtype=dtype)
    assert result.dtype == dtype
    if dim == 1:
        assert torch.equal(result, torch.stack([converted[:3].sum(0), torch.zeros(2), converted[3]]).to(dtype))
    elif dim is None:
        assert result == converted.sum(dtype=dtype)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64], ids=str)
def test_cumsum_has_the_dtype_it_is_given(dim, dtype):
    jt = make_jagged([3, 0, 1], 2, dtype=torch.int8)
    assert jt.cumsum(dim, dtype=dtype).dtype == dtype
    assert jt.cumsum(dim).dtype == torch.int64


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [1, 2])
def test_softmax_converts_before_it_computes(name, dim):
    jt = make_jagged([3, 0, 1], 2, dtype=torch.bfloat16)
    result = getattr(jt, name)(dim, dtype=torch.float64)
    assert torch.equal(result.values(), getattr(jt.double(), name)(dim).values())


def test_infinities_do_not_make_nan_where_torch_makes_none():
    inf = math.inf
    jt = JaggedTensor(torch.tensor([-inf, 0.0, -inf, -inf, inf, 1.0, -inf, 2.0]), torch.tensor([0, 2, 4, 6, 8]))
    for name in ("logsumexp", "softmax", "log_softmax"):
        mine = getattr(jt, name)(1)
        for i, x in enumerate(jt):
            theirs = getattr(x, name)(0)
            torch.testing.assert_close(mine[i][~theirs.isnan()], theirs[~theirs.isnan()])


def test_a_large_first_sequence_does_not_cost_the_next_its_digits():
    values = torch.cat((torch.full((3,), 1e8), torch.tensor([0.1, 0.2, 0.3])))
    sums = JaggedTensor(values, torch.tensor([0, 3, 6])).cumsum(1)
    torch.testing.assert_close(sums[1], torch.tensor([0.1, 0.3, 0.6]))


def test_what_is_derived_under_inference_mode_can_be_trained_with():
    """BOX-09."""
    jt = make_jagged([3, 0, 2], 2, requires_grad=True)
    with torch.inference_mode():
        jt.sum(1), jt.softmax(1), jt.to_padded(), jt.lengths()
    (jt.sum(1).sum() + jt.softmax(1).square().sum() + jt.to_padded().sum()).backward()
    assert jt.grad.values().isfinite().all()


def test_grad_of_a_batch_is_a_batch_on_its_layout():
    jt = make_jagged([3, 0, 2], 2, requires_grad=True)
    assert jt.grad is None
    jt.sum(1).sum().backward()
    assert jt.grad.layout is jt.layout
    assert torch.equal(jt.grad.values(), torch.ones(5, 2, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", [*OF_ONE, *SCANS])
def test_anomaly_detection_finds_no_nan_in_slack(name):
    jt = make_jagged([3, 0, 2], 2, slack=2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        result = getattr(jt, name)(1)
        result = result.values() if isinstance(result, JaggedTensor) else result[result.isfinite()]
        result.sum().backward()


@pytest.mark.parametrize("name", [*OF_ONE, *SCANS])
def test_offsets_may_be_a_view_of_something_larger(name):
    """EMP-12: neither strides nor neighbours of offsets are taken for granted."""
    buffer = torch.full((14,), -(2**40))
    buffer[2:12:2] = torch.tensor([0, 3, 3, 4, 6])
    values = make_jagged([6], 2, slack=2).values()
    mine = getattr(JaggedTensor(values, buffer[2:12:2]), name)(1)
    theirs = getattr(JaggedTensor(values, torch.tensor([0, 3, 3, 4, 6])), name)(1)
    if isinstance(mine, JaggedTensor):
        mine, theirs = mine.values(), theirs.values()
    torch.testing.assert_close(mine, theirs, equal_nan=True)
