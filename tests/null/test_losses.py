"""Losses are over tokens: a mean divides by their number, and rows of slack do not count."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.testing import assert_same_as_loop, make_jagged
from jaggedtensor.testing.cases import offsets_of, random_tensor
from jaggedtensor.testing.strategies import batches

REGRESSION = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss]
reductions = st.sampled_from(["mean", "sum", "none"])


def classes(jt, count, seed=3, slack=0):
    """A batch of class numbers on the structure of another."""
    return make_jagged(jt.lengths().tolist(), dtype=torch.int64, slack=slack, seed=seed).map_values(lambda x: x % count)


def in_loop(function, reduction):
    def loop(*lists):
        if reduction == "none":
            return [function(*xs) for xs in zip(*lists, strict=True)]
        return function(*(torch.cat(xs) for xs in lists))

    return loop


@pytest.mark.parametrize("loss", REGRESSION, ids=lambda f: f.__name__)
@given(jt=batches(), reduction=reductions, data=st.data())
def test_regression_losses(loss, jt, reduction, data):
    assume(jt.num_tokens)
    other = data.draw(batches(tuple(jt.values().shape[1:]), of_lengths=jt.lengths().tolist()))
    function = lambda a, b: loss(a, b, reduction=reduction)
    assert_same_as_loop(function, in_loop(function, reduction), [jt, other])


@given(batches((5,)), reductions, st.integers(0, 2), st.booleans())
def test_cross_entropy_of_class_numbers(jt, reduction, slack, smooth):
    assume(jt.num_tokens)
    targets = classes(jt, 5, slack=slack)
    weight = random_tensor(5, seed=8).abs()
    for options in ({}, {"ignore_index": 2}, {"label_smoothing": 0.1 * smooth}, {"weight": weight}):
        if options.get("ignore_index") is not None and (targets.values()[: jt.num_tokens] == 2).all():
            continue  # 0 / 0 in torch
        function = lambda a, o=options: F.cross_entropy(a, targets, reduction=reduction, **o)
        loop = lambda xs, o=options: in_loop(lambda a, t: F.cross_entropy(a, t, reduction=reduction, **o), reduction)(
            xs, targets.to_list()
        )
        assert_same_as_loop(function, loop, [jt])


@given(batches((5,)), reductions)
def test_cross_entropy_of_class_probabilities(jt, reduction):
    assume(jt.num_tokens)
    targets = make_jagged(jt.lengths().tolist(), 5, seed=4, slack=1).softmax(-1)
    function = lambda a, t: F.cross_entropy(a, t, reduction=reduction)
    assert_same_as_loop(function, in_loop(function, reduction), [jt, targets])


@given(batches((5,)), reductions)
def test_nll_loss(jt, reduction):
    assume(jt.num_tokens)
    targets = classes(jt, 5)
    function = lambda a: F.nll_loss(a.log_softmax(-1), targets, reduction=reduction)
    loop = lambda xs: in_loop(lambda a, t: F.nll_loss(a.log_softmax(-1), t, reduction=reduction), reduction)(
        xs, targets.to_list()
    )
    assert_same_as_loop(function, loop, [jt])


@given(batches(()), reductions, st.integers(0, 2))
def test_binary_cross_entropy_with_weights_for_each_token(jt, reduction, slack):
    assume(jt.num_tokens)
    lengths = jt.lengths().tolist()
    targets = make_jagged(lengths, dtype=torch.bool, seed=4, slack=slack).double()
    weights = make_jagged(lengths, seed=5, slack=slack).abs()
    for function in (
        lambda a, t: F.binary_cross_entropy_with_logits(a, t, reduction=reduction),
        lambda a, t: F.binary_cross_entropy(a.sigmoid(), t, reduction=reduction),
    ):
        assert_same_as_loop(function, in_loop(function, reduction), [jt, targets])
    for weighted in (
        lambda a, t, w: F.binary_cross_entropy_with_logits(a, t, weight=w, reduction=reduction),
        lambda a, t, w: F.binary_cross_entropy(a.sigmoid(), t, weight=w, reduction=reduction),
    ):
        fixed = lambda a, f=weighted: f(a, targets, weights)
        loop = lambda xs, f=weighted: in_loop(f, reduction)(xs, targets.to_list(), weights.to_list())
        assert_same_as_loop(fixed, loop, [jt])


def test_modules_of_losses_take_batches():
    jt, targets = make_jagged([3, 0, 2], 4, slack=2), classes(make_jagged([3, 0, 2]), 4, slack=3)
    expected = F.cross_entropy(jt.values()[:5], targets.values()[:5])
    torch.testing.assert_close(torch.nn.CrossEntropyLoss()(jt, targets), expected)
    target = make_jagged([3, 0, 2], 4, seed=9)
    torch.testing.assert_close(torch.nn.MSELoss()(jt, target), F.mse_loss(jt.values()[:5], target.values()))


def test_a_target_for_each_sequence_stands_beside_its_tokens():
    jt, target = make_jagged([3, 0, 2], slack=2), random_tensor(3, 1, seed=4)
    expected = F.mse_loss(jt.values()[:5], target.repeat_interleave(torch.tensor([3, 0, 2]), 0).squeeze(1))
    torch.testing.assert_close(F.mse_loss(jt, target), expected)


def test_the_loss_of_no_tokens_is_that_of_torch():
    jt = make_jagged([0, 0], slack=2)
    assert F.mse_loss(jt, jt, reduction="sum") == 0
    assert F.mse_loss(jt, jt, reduction="none").to_list()[0].shape == (0,)
    assert F.mse_loss(jt, jt).isnan()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_on_a_static_layout_do_not_read_the_number_of_tokens(reduction, monkeypatch):
    """As in a CUDA graph: the number may be another at the next replay."""
    layout = JaggedLayout.with_capacity(3, max_tokens=8, max_length=5)
    layout.copy_(offsets_of([3, 0, 2]))
    values, target = random_tensor(8, 4), random_tensor(8, 4, seed=1)
    values[5:] = float("nan")
    jt, other = JaggedTensor(values, layout), JaggedTensor(target, layout)
    numbers = JaggedTensor(torch.randint(4, (8,)), layout)
    cases = [
        (lambda a, b, n: F.mse_loss(a, b, reduction=reduction)),
        (lambda a, b, n: F.cross_entropy(a, n, reduction=reduction)),
        (lambda a, b, n: F.cross_entropy(a, n, reduction=reduction, label_smoothing=0.1)),
        (
            lambda a, b, n: F.cross_entropy(
                a, b.softmax(-1) if isinstance(b, torch.Tensor) else b.softmax(2), reduction=reduction
            )
        ),
    ]
    for case in cases:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("a tensor was read on the host"))
            mine = case(jt, other, numbers)
        mine = mine.values()[:5] if reduction == "none" else mine
        torch.testing.assert_close(mine, case(values[:5], target[:5], numbers.values()[:5]))


@pytest.mark.parametrize("target_rows", [5, 7])
def test_a_dense_target_is_never_taken_for_one_by_its_number_of_rows(target_rows):
    """Contract 9: a row for each token is a batch, and must say so."""
    jt = make_jagged([3, 0, 2], 4, slack=2)
    with pytest.raises(TypeError, match=r"target must be a JaggedTensor, got int64\[\d\].*input.with_values\(target\)"):
        F.cross_entropy(jt, torch.zeros(target_rows, dtype=torch.int64))


def test_features_are_not_cut_when_there_are_as_many_as_rows():
    jt = make_jagged([3, 1], 5, slack=1)
    target = random_tensor(5, seed=4)
    expected = F.mse_loss(jt.values()[:4], target.expand(4, 5))
    torch.testing.assert_close(F.mse_loss(jt, target[None, None]), expected)
