"""Functions of single tokens: on a batch they do what they do on every sequence, whatever stands beside it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jaggedtensor import JaggedTensor
from jaggedtensor.testing import assert_same_as_loop, make_jagged
from jaggedtensor.testing.cases import random_tensor
from jaggedtensor.testing.strategies import batches

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
OF_INTEGERS = [operator.and_, operator.or_, operator.xor, operator.floordiv, operator.mod]


def name_of(function):
    return function.__name__


def each(function, *lists):
    return [function(*xs) for xs in zip(*lists, strict=True)]


@pytest.mark.parametrize("op", [*ARITHMETIC, operator.pow, *COMPARISONS], ids=name_of)
@settings(max_examples=15)
@given(jt=batches())
def test_a_scalar_stands_beside_every_element(op, jt):
    for scalar in (2, 0.5, torch.tensor(3.0, dtype=torch.float64)):
        if op is operator.pow and scalar != 2:
            continue  # of negative numbers
        assert_same_as_loop(lambda jt, s=scalar: op(jt, s), lambda xs, s=scalar: [op(x, s) for x in xs], [jt])
        assert_same_as_loop(lambda jt, s=scalar: op(s, jt), lambda xs, s=scalar: [op(s, x) for x in xs], [jt])


@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARISONS], ids=name_of)
@settings(max_examples=15)
@given(jt=batches(), data=st.data())
def test_two_batches_of_one_structure_meet_token_by_token(op, jt, data):
    """Whatever the slack of each."""
    other = data.draw(batches(tuple(jt.values().shape[1:]), of_lengths=jt.lengths().tolist()))
    assert_same_as_loop(op, lambda xs, ys: each(op, xs, ys), [jt, other])


@pytest.mark.parametrize("op", ARITHMETIC, ids=name_of)
@pytest.mark.parametrize(
    "shape", [(3,), (2, 3), (1, 2, 3), (1, 1, 3), (1, 1, 2, 3), ("B", 1, 2, 3), ("B", 1, 1, 1)], ids=str
)
@settings(max_examples=15)
@given(jt=batches((2, 3)))
def test_a_dense_operand_is_aligned_from_the_right(op, shape, jt):
    dense = random_tensor(*(jt.batch_size if n == "B" else n for n in shape), seed=5)

    def loop(xs, y):
        whole = y.expand(len(xs), 1, 2, 3) if y.dim() <= 4 else y
        return [op(x, whole[i]) for i, x in enumerate(xs)]

    assert_same_as_loop(op, loop, [jt], [dense])
    assert_same_as_loop(
        lambda jt, y: op(y, jt), lambda xs, y: [2 * a - a for a in loop_swapped(op, xs, y)], [jt], [dense]
    )


def loop_swapped(op, xs, y):
    whole = y.expand(len(xs), 1, 2, 3)
    return [op(whole[i], x) for i, x in enumerate(xs)]


@given(batches(()))
def test_one_number_for_each_sequence_needs_an_axis_for_its_tokens(jt):
    weights = random_tensor(jt.batch_size, seed=5)
    assert_same_as_loop(
        lambda jt, w: jt * w[:, None], lambda xs, w: [x * w[i] for i, x in enumerate(xs)], [jt], [weights]
    )


@pytest.mark.parametrize("op", OF_INTEGERS, ids=name_of)
@settings(max_examples=15)
@given(jt=batches(dtype=torch.int64), data=st.data())
def test_operators_of_integers(op, jt, data):
    other = data.draw(batches(tuple(jt.values().shape[1:]), dtype=torch.int64, of_lengths=jt.lengths().tolist()))
    plus = lambda a, b: op(a, b.abs() % 7 + 1)
    assert_same_as_loop(plus, lambda xs, ys: each(plus, xs, ys), [jt, other])
    assert_same_as_loop(lambda jt: op(jt, 3), lambda xs: [op(x, 3) for x in xs], [jt])
    assert_same_as_loop(lambda jt: op(9, jt % 3 + 1), lambda xs: [op(9, x % 3 + 1) for x in xs], [jt])


UNARY = [
    operator.neg, operator.abs, torch.exp, torch.sin, torch.tanh, torch.sigmoid, torch.relu, torch.square, torch.erf,
    torch.sign, torch.floor, torch.isnan, torch.isfinite, torch.nan_to_num, torch.logical_not, torch.zeros_like,
    torch.ones_like, F.relu, F.gelu, F.silu, F.softplus, F.elu, F.leaky_relu, F.mish, F.logsigmoid, F.hardtanh,
    lambda x: torch.clamp(x, -0.5, 0.5), lambda x: torch.clamp(x, max=0.1), lambda x: x.clamp(min=0),
    lambda x: torch.full_like(x, 2), lambda x: F.softmax(x * 2, dim=-1), lambda x: F.glu(x, -1),
    lambda x: F.normalize(x, dim=-1), lambda x: torch.argmax(x, dim=-1), lambda x: torch.sort(x, dim=-1)[0],
    lambda x: x.max(-1).values if isinstance(x, torch.Tensor) else x.max(-1)[0],
    lambda x: torch.topk(x, 2, dim=-1)[0], lambda x: torch.all(x > 0, dim=-1), lambda x: torch.cumprod(x, dim=-1),
]  # fmt: skip


@pytest.mark.parametrize("function", UNARY)
@settings(max_examples=15)
@given(jt=batches((3, 4)))
def test_functions_of_a_token_apply_to_every_token(function, jt):
    assert_same_as_loop(function, lambda xs: [function(x) for x in xs], [jt])


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.ReLU(), torch.nn.GELU(), torch.nn.SiLU(), torch.nn.Sigmoid(), torch.nn.Softmax(dim=-1),
        torch.nn.Identity(), torch.nn.LeakyReLU(0.1), torch.nn.GLU(),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
@settings(max_examples=15)
@given(jt=batches((3, 4)))
def test_activation_modules_take_a_batch(module, jt):
    assert_same_as_loop(module, lambda xs: [module(x) for x in xs], [jt])


@given(batches((3,)), st.data())
def test_where_and_masked_fill_choose_element_by_element(jt, data):
    other = data.draw(batches((3,), of_lengths=jt.lengths().tolist()))
    where = lambda a, b: torch.where(a > b, a, b * 2)
    assert_same_as_loop(where, lambda xs, ys: each(where, xs, ys), [jt, other])
    assert_same_as_loop(
        lambda jt: torch.where(jt > 0, jt, 0.0), lambda xs: [torch.where(x > 0, x, 0.0) for x in xs], [jt]
    )
    assert_same_as_loop(lambda jt: jt.masked_fill(jt > 0, 7), lambda xs: [x.masked_fill(x > 0, 7) for x in xs], [jt])
    mask = torch.tensor([True, False, True])
    assert_same_as_loop(
        lambda jt: torch.masked_fill(jt, mask, 7), lambda xs: [x.masked_fill(mask, 7) for x in xs], [jt]
    )


@given(batches((3,)), st.data())
def test_functions_of_several_operands(jt, data):
    other = data.draw(batches((3,), of_lengths=jt.lengths().tolist()))
    for function in (
        torch.maximum,
        torch.minimum,
        torch.max,
        torch.min,
        torch.atan2,
        lambda a, b: torch.lerp(a, b, 0.25),
        lambda a, b: torch.addcmul(a, b, b, value=0.5),
        lambda a, b: torch.add(a, b, alpha=3),
        lambda a, b: F.cosine_similarity(a, b, dim=-1),
    ):
        assert_same_as_loop(function, lambda xs, ys, f=function: each(f, xs, ys), [jt, other])


@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 1, 3), ("B", 1, 3)], ids=str)
@given(jt=batches((3,)))
def test_slack_has_no_part_in_the_gradient_of_a_dense_operand(shape, jt):
    """Even of a function that has no derivative at 0, of which slack is made: 0 / 0."""
    weight = random_tensor(*(jt.batch_size if n == "B" else n for n in shape), seed=5)
    whole = lambda w: w.expand(jt.batch_size, 1, 3)
    assert_same_as_loop(
        lambda jt, w: torch.addcdiv(jt, w, jt),
        lambda xs, w: [torch.addcdiv(x, whole(w)[i], x) for i, x in enumerate(xs)],
        [jt],
        [weight],
    )


@given(batches((2, 6)))
def test_the_shape_of_features_may_change(jt):
    for function in (
        lambda x: x.unflatten(-1, (2, 3)),
        lambda x: x.unflatten(-1, (3, -1)).flatten(-2, -1),
        lambda x: x.unflatten(-1, (2, 3)).transpose(-1, -3),
        lambda x: torch.transpose(x, -1, -2),
        lambda x: x.unsqueeze(-1),
        lambda x: x.unsqueeze(-2).squeeze(-2),
        lambda x: torch.flatten(x, -2),
        lambda x: torch.movedim(x, -1, -2),
    ):
        assert_same_as_loop(function, lambda xs, f=function: [f(x) for x in xs], [jt])
    heads = jt.unflatten(3, (2, 3))
    assert heads.shape == (jt.batch_size, None, 2, 2, 3)
    assert heads.flatten(2).shape == (jt.batch_size, None, 12)
    assert jt.unsqueeze(2).shape == (jt.batch_size, None, 1, 2, 6)


def test_one_token_keeps_its_axes():
    """EMP-13: no axis of size 1 is mistaken for one that may go."""
    jt = make_jagged([1], 1, 1)
    assert jt.sum(1).shape == (1, 1, 1)
    assert jt.softmax(1).shape == (1, None, 1, 1)
    assert jt.squeeze(2).shape == (1, None, 1)
    assert jt.first().shape == jt.last().shape == (1, 1, 1)
    assert jt.to_padded().shape == (1, 1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_casts_keep_the_layout(dtype):
    jt = make_jagged([2, 0, 1], 3)
    names = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.int64: "long", torch.bool: "bool"}
    for cast in (jt.to(dtype), getattr(jt, names[dtype])(), jt.to(dtype=dtype)):
        assert cast.dtype == dtype
        assert cast.layout is jt.layout
        assert torch.equal(cast.values(), jt.values().to(dtype))


@given(batches((3,)))
def test_map_values_runs_what_torch_dispatch_does_not_know(jt):
    weight = random_tensor(3, 4, seed=5)
    function = lambda x, w: torch.einsum("td,de->te", x, w)
    assert_same_as_loop(
        lambda jt, w: jt.map_values(lambda x: function(x, w)),
        lambda xs, w: [function(x, w) for x in xs],
        [jt],
        [weight],
    )


@given(batches((3,)))
def test_detach_and_clone_copy_as_much_as_torch_does(jt):
    assert not jt.requires_grad_().detach().requires_grad
    assert jt.detach().values().data_ptr() == jt.values().data_ptr()
    assert jt.clone().layout is jt.layout
    assert jt.contiguous().values().is_contiguous()
    if jt.values().numel():
        assert jt.clone().values().data_ptr() != jt.values().data_ptr()


def test_numpy_numbers_are_scalars_on_either_side():
    np = pytest.importorskip("numpy")
    jt = make_jagged([2, 0, 1], 3)
    for result in (np.float64(2) * jt, jt * np.float64(2)):
        assert isinstance(result, JaggedTensor)
        assert torch.equal(result.values(), jt.values() * 2)


def test_equality_with_something_else_is_false():
    jt = make_jagged([2, 0, 1], 3)
    assert (jt == None) is False  # noqa: E711
    assert (jt != "a") is True
    assert jt in [None, jt]


def test_random_state_is_untouched():
    """Contract 11: only what draws random numbers moves the state."""
    before = torch.get_rng_state()
    jt = make_jagged([3, 0, 2], 4)
    (jt.softmax(1) + 1).sum(1)
    jt[:, 1:].to_padded()
    F.dropout(jt, 0.5, training=False)
    assert torch.equal(torch.get_rng_state(), before)
