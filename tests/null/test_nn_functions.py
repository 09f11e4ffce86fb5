"""Layers of torch.nn take a batch as they take a tensor of tokens; slack reaches neither results nor weights."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from jaggedtensor import JaggedTensor
from jaggedtensor.testing import LENGTHS, assert_same_as_loop, make_jagged
from jaggedtensor.testing.cases import random_tensor
from jaggedtensor.testing.strategies import batches


@given(batches((3,)))
def test_linear_is_a_product_for_every_token(jt):
    weight, bias = random_tensor(4, 3, seed=5), random_tensor(4, seed=6)
    assert_same_as_loop(F.linear, lambda xs, *p: [F.linear(x, *p) for x in xs], [jt], [weight, bias])
    assert_same_as_loop(F.linear, lambda xs, *p: [F.linear(x, *p) for x in xs], [jt], [weight])


@given(batches((2, 3)))
def test_norms_run_over_features(jt):
    weight, bias = random_tensor(3, seed=5), random_tensor(3, seed=6)
    for function, dense in (
        (lambda x, w, b: F.layer_norm(x, (3,), w, b), [weight, bias]),
        (lambda x: F.layer_norm(x, [2, 3]), []),
        (lambda x, w: F.rms_norm(x, (3,), w, eps=1e-3), [weight]),
        (lambda x: F.rms_norm(x, (3,), eps=1e-3), []),
    ):
        assert_same_as_loop(function, lambda xs, *p, f=function: [f(x, *p) for x in xs], [jt], dense)


@given(batches((), dtype=torch.int64), st.booleans())
def test_embedding_looks_up_every_token(jt, of_pairs):
    if of_pairs:
        jt = torch.stack([jt, jt], dim=2)
    table = random_tensor(10, 3, seed=5)
    assert_same_as_loop(F.embedding, lambda xs, t: [F.embedding(x, t) for x in xs], [jt], [table])
    assert_same_as_loop(
        lambda jt, t: F.embedding(jt, t, padding_idx=3),
        lambda xs, t: [F.embedding(x, t, padding_idx=3) for x in xs],
        [jt],
        [table],
    )


def test_slack_is_no_use_of_token_0():
    """Neither in the frequency by which embedding scales gradients, nor for max_norm."""
    ids = make_jagged([2, 0, 1], dtype=torch.int64, slack=4).map_values(lambda x: x * 0)
    table = random_tensor(3, 2).requires_grad_()
    F.embedding(ids, table, scale_grad_by_freq=True).sum(1).sum().backward()
    torch.testing.assert_close(table.grad, torch.tensor([[1.0, 1.0], [0, 0], [0, 0]], dtype=torch.float64))
    ones = JaggedTensor(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 2]))
    table = 5 * random_tensor(2, 2)
    before = table.clone()
    F.embedding(ones, table, max_norm=1.0)
    assert torch.equal(table[0], before[0])


def test_one_hot_counts_the_classes_of_tokens():
    jt = make_jagged([2, 0, 1], dtype=torch.int64, slack=2)
    assert_same_as_loop(lambda jt: F.one_hot(jt, 12), lambda xs: [F.one_hot(x, 12) for x in xs], [jt])
    assert F.one_hot(jt).shape == (3, None, int(jt.values()[:3].max()) + 1)


@given(batches((3,)))
def test_a_matrix_multiplies_every_token(jt):
    matrix, vector = random_tensor(3, 4, seed=5), random_tensor(3, seed=6)
    for multiply in (torch.matmul, lambda x, w: x @ w, lambda x, w: x.matmul(w)):
        loop = lambda xs, w, f=multiply: [f(x, w) for x in xs]
        assert_same_as_loop(multiply, loop, [jt], [matrix])
        assert_same_as_loop(multiply, loop, [jt], [vector])


@given(batches((2, 3)), st.data())
def test_matrices_of_tokens_multiply_from_either_side(jt, data):
    other = data.draw(batches((3, 2), of_lengths=jt.lengths().tolist()))
    matrix, batch_of = random_tensor(3, 4, seed=5), random_tensor(2, 3, 4, seed=6)
    assert_same_as_loop(torch.matmul, lambda xs, w: [x @ w for x in xs], [jt], [matrix])
    assert_same_as_loop(lambda jt, w: w @ jt, lambda xs, w: [w @ x for x in xs], [jt], [random_tensor(5, 2, seed=7)])
    assert_same_as_loop(torch.matmul, lambda xs, ys: [x @ y for x, y in zip(xs, ys, strict=True)], [jt, other])
    assert_same_as_loop(
        lambda jt, w: jt.unsqueeze(3) @ w, lambda xs, w: [x.unsqueeze(2) @ w for x in xs], [jt], [batch_of]
    )


def test_dropout_drops_elements_and_scales_the_rest():
    jt = make_jagged([50, 0, 1, 30], 4, slack=5).map_values(torch.ones_like)
    torch.manual_seed(0)
    dropped = F.dropout(jt, 0.25)
    kept = dropped.values()[: jt.num_tokens]
    assert set(kept.unique().tolist()) == {0.0, 1 / 0.75}
    assert 0.6 < (kept > 0).double().mean() < 0.9
    assert not dropped.values()[jt.num_tokens :].any()
    assert torch.equal(F.dropout(jt, 0.25, training=False).values(), jt.values())
    assert torch.equal(torch.nn.Dropout(0.25).eval()(jt).values(), jt.values())


class Block(torch.nn.Module):
    """What a recommendation model does before it pools: embed, project, normalise, activate, project."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.up = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.rms = torch.nn.RMSNorm(4, eps=1e-6)
        self.down = torch.nn.Linear(8, 4)
        self.scale = torch.nn.PReLU()

    def forward(self, ids):
        x = self.embedding(ids)
        return x + self.rms(self.down(self.scale(self.norm(self.up(x)))))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_model_of_torch_layers_trains_as_on_trimmed_sequences(lengths):
    """SLK-01: slack of garbage changes no weight gradient."""
    torch.manual_seed(0)
    model = Block().double()
    ids = make_jagged(lengths, dtype=torch.int64, slack=3)
    model(ids).sum(1).square().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sums = [model(x).sum(0).square().sum() for x in ids.to_list()]
    torch.stack([*sums, *(0 * p.sum() for p in model.parameters())]).sum().backward()
    for mine, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_in_slack_does_not_reach_weight_gradients(poison):
    """SLK-02, for what comes before attention: 0 * NaN."""
    leaf = random_tensor(9, 3).requires_grad_()
    slack = torch.arange(9)[:, None] >= 6
    values = leaf.masked_fill(slack, poison)
    layer = torch.nn.Linear(3, 2).double()
    jt = JaggedTensor(values, torch.tensor([0, 2, 2, 6]))
    layer(jt).square().sum(1).sum().backward()
    weight_grad = layer.weight.grad.clone()
    layer.zero_grad()
    layer(leaf.detach()[:6]).square().sum().backward()
    torch.testing.assert_close(weight_grad, layer.weight.grad)
    assert torch.equal(leaf.grad[6:], torch.zeros(3, 3, dtype=torch.float64))


def test_with_values_computed_outside_stops_gradients_in_slack():
    """SLK-01 with K, V made by a Linear on packed rows, slack included."""
    leaf = random_tensor(8, 4).requires_grad_()
    layer = torch.nn.Linear(4, 4).double()
    keys = JaggedTensor(layer(leaf), torch.tensor([0, 2, 2, 6])).unflatten(-1, (2, 2))
    keys.attend(random_tensor(3, 2, 2, seed=4), backend="reference").sum().backward()
    assert torch.equal(leaf.grad[6:], torch.zeros(2, 4, dtype=torch.float64))
    assert layer.weight.grad.isfinite().all()


def test_token_wise_layers_keep_the_layout_object():
    jt = make_jagged([2, 0, 1], 4, dtype=torch.float32, slack=1)
    layers = (torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.RMSNorm(4), torch.nn.GELU(), torch.nn.Dropout(0.1))
    for layer in layers:
        assert layer(jt).layout is jt.layout
