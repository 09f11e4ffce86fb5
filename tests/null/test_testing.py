"""The checkers notice what they are there for."""

import math

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import (
    AttentionCase,
    assert_attention_within_budget,
    assert_same_as_loop,
    assert_within_budget,
    error_budget,
    make_jagged,
)
from jaggedtensor.testing.cases import random_tensor


def double(xs):
    return [2 * x for x in xs]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda jt: jt * 2.001, "not close"),
        (lambda jt: (jt * 2).float(), "dtype"),
        (lambda jt: (jt * 2)[:, :-1], "lengths"),
        (lambda jt: (jt * 2)[:1], "sequences, expected"),
        (lambda jt: (jt * 2).values(), "expected a JaggedTensor"),
        (lambda jt: (jt * 2, jt), "2 results, expected 1"),
        (lambda jt: jt.with_values(jt.values() * 2), "slack rows of the result are not 0"),
        (lambda jt: jt.detach() * 2, "gradient of batch 0"),
        (lambda jt: jt + jt.detach(), "gradient of batch 0"),
    ],
)
def test_the_loop_notices_every_difference(wrong, message):
    batch = make_jagged([3, 0, 1], 2, slack=2)
    assert_same_as_loop(lambda jt: jt * 2, double, [batch])
    with pytest.raises(AssertionError, match=message):
        assert_same_as_loop(wrong, double, [batch])


def test_the_loop_notices_a_gradient_in_slack():
    class LeavesGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad + 1e-30

    batch = make_jagged([3, 0, 1], 2, slack=2)
    leak = lambda jt: jt.with_values(LeavesGradient.apply(jt.values())) * 2
    with pytest.raises(AssertionError, match="gradient of batch 0 is not 0 in slack"):
        assert_same_as_loop(leak, double, [batch])


def test_the_loop_notices_a_wrong_gradient_of_a_dense_input():
    batch, weight = make_jagged([3, 0, 1], 2), random_tensor(2)
    loop = lambda xs, w: [x * w for x in xs]
    assert_same_as_loop(lambda jt, w: jt * w, loop, [batch], [weight])
    with pytest.raises(AssertionError, match="gradient of dense input 0"):
        assert_same_as_loop(lambda jt, w: jt * w.detach(), loop, [batch], [weight])


def test_a_budget_is_the_error_of_the_plain_formula_and_little_more():
    exact = random_tensor(1000)
    low = exact.bfloat16()
    own = (low.double() - exact).abs().max().item()
    assert 3 * own < error_budget(low, exact) <= 3 * own + 2**-7 * exact.abs().max()
    assert error_budget(exact, exact) < 1e-13
    assert error_budget(torch.empty(0), torch.empty(0, dtype=torch.float64)) == 0
    overflowed = low.clone()
    overflowed[0] = math.inf
    assert math.isfinite(error_budget(overflowed, exact))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: x.float(), "is torch.float32, expected torch.bfloat16"),
        (lambda x: x[:-1], "has shape"),
        (lambda x: x.index_fill(0, torch.tensor([3]), math.nan), r"result\[3\] is nan"),
        (lambda x: x.index_fill(0, torch.tensor([5]), 9), r"result\[5\] is 9, expected .* exceeds the budget"),
        (lambda x: x.index_fill(0, torch.tensor([0]), 7), "is not infinite where it must be"),
        (lambda x: x.index_fill(0, torch.tensor([0]), math.inf), "is not infinite where it must be"),
    ],
)
def test_a_budget_is_not_exceeded_unnoticed(spoil, message):
    exact = random_tensor(50)
    exact[0] = -math.inf
    low = exact.bfloat16()
    assert_within_budget(low, low, exact)
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(spoil(low), low, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(QueryKind), ids=lambda k: k.name)
def test_a_key_too_many_or_too_few_is_more_than_the_budget(kind, dtype):
    """The mask of another window, the scale of another head dimension."""
    case = AttentionCase((65, 3, 20), query=kind, q_lengths=(9, 4, 7), window=(30, 1), dtype=dtype)
    assert_attention_within_budget(case, case.low())
    for other in ({"window": (30, 0)}, {"window": (29, 1)}, {"scale": 1 / 3}, {"causal": True}):
        with pytest.raises(AssertionError, match="exceeds the budget"):
            assert_attention_within_budget(case, case.with_options(**other).low())


def test_making_batches_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    first, second = make_jagged([3, 0, 1], 2, slack=1), make_jagged([3, 0, 1], 2, slack=1)
    AttentionCase((3, 1)).inputs()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.to_padded(), second.to_padded())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("strided", [False, True])
def test_slack_and_what_lies_between_rows_is_poison(dtype, strided):
    jt = make_jagged([2, 1], 2, dtype=dtype, slack=2, strided=strided)
    assert jt.values().is_contiguous() != strided
    slack = jt.values()[3:]
    assert slack.isnan().all() if dtype.is_floating_point else slack.bool().all()
