"""Gradients of attention under everything autograd can do: some of the inputs, no_grad, lse, checkpoints, hooks,
autocast, second derivatives."""

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jaggedtensor import JaggedTensor, attend
from jaggedtensor.kernels import cpu
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, assert_attention_within_budget, make_jagged
from jaggedtensor.testing.cases import random_tensor

KINDS = list(QueryKind)
backends = pytest.mark.parametrize("backend", [None, "reference"])
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
SUBSETS = [s for s in itertools.product([False, True], repeat=3) if any(s)]


def packed(x):
    return x.values() if isinstance(x, JaggedTensor) else x


def case_of(kind, **options):
    return AttentionCase((5, 0, 3), query=kind, q_lengths=(2, 3, 1), heads=4, causal=True, **options)


def fresh(inputs):
    """The same numbers as new leaves."""
    leaves = [packed(x).detach().clone().requires_grad_() for x in inputs]
    return [x.with_values(y) if isinstance(x, JaggedTensor) else y for x, y in zip(inputs, leaves, strict=True)], leaves


def full_run(kind, backend, **options):
    boxes, leaves = fresh(case_of(kind, **options).inputs())
    packed(attend(*boxes, causal=True, backend=backend)).square().sum().backward()
    return [x.grad for x in leaves]


# -- some of the inputs ------------------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, on in zip("qkv", s, strict=True) if on))
def test_frozen_inputs_get_no_gradient_and_the_others_the_same(subset, kind, backend):
    """AUT-01."""
    expected = full_run(kind, backend)
    boxes, leaves = fresh(case_of(kind).inputs())
    for x, on in zip(leaves, subset, strict=True):
        x.requires_grad_(on)
    packed(attend(*boxes, causal=True, backend=backend)).square().sum().backward()
    for x, on, wanted in zip(leaves, subset, expected, strict=True):
        assert (x.grad is not None) == on
        if on:
            torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, on in zip("qkv", s, strict=True) if on))
def test_gradients_that_nobody_needs_are_not_computed(subset, monkeypatch):
    """AUT-01: the kernel is told which ones are needed."""
    needed = []
    original = cpu.backward

    def spy(*args):
        needed.append(tuple(args[-1]))
        return original(*args)

    monkeypatch.setattr(cpu, "backward", spy)
    boxes, leaves = fresh(case_of(QueryKind.BROADCAST).inputs())
    for x, on in zip(leaves, subset, strict=True):
        x.requires_grad_(on)
    packed(attend(*boxes, causal=True)).sum().backward()
    assert needed == [subset]


@backends
def test_keys_that_are_their_own_values_get_both_gradients(backend):
    boxes, (q, kv) = fresh(case_of(QueryKind.BROADCAST).inputs()[:2])
    attend(*boxes, backend=backend).square().sum().backward()
    boxes, (q2, k, v) = fresh([boxes[0], boxes[1], boxes[1]])
    attend(*boxes, backend=backend).square().sum().backward()
    torch.testing.assert_close(q.grad, q2.grad)
    torch.testing.assert_close(kv.grad, k.grad + v.grad)


@backends
def test_self_attention_adds_up_three_gradients(backend):
    jt = make_jagged([3, 0, 2], 2, 4, requires_grad=True)
    jt.attend(jt, causal=True, backend=backend).values().square().sum().backward()
    boxes, leaves = fresh([jt, jt, jt])
    attend(*boxes, causal=True, backend=backend).values().square().sum().backward()
    torch.testing.assert_close(jt.grad.values(), sum(x.grad for x in leaves))


# -- nothing to compute ------------------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize(
    ("k_lengths", "q_length", "q_lengths"),
    [
        ((0, 0, 0), 3, (4, 0, 7)),
        ((), 3, ()),
        ((9,), 0, (0,)),
        ((0, 3), 0, (0, 0)),
        ((0,), 0, (0,)),
        ((2, 0), 2, (0, 0)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_batches_without_keys_queries_or_sequences_train(k_lengths, q_length, q_lengths, causal, kind, backend):
    """EMP-04, EMP-05: results and gradients of the right shapes, exactly 0 where nothing is seen."""
    case = AttentionCase(k_lengths, query=kind, q_length=q_length, q_lengths=q_lengths, causal=causal)
    boxes, leaves = fresh(case.inputs())
    out, lse = attend(*boxes, causal=causal, return_lse=True, backend=backend)
    assert packed(out).requires_grad
    assert lse.requires_grad
    (packed(out).sum() + lse.masked_fill(lse.isinf(), 0).sum()).backward()
    for x in leaves:
        assert x.grad.shape == x.shape
        assert x.grad.isfinite().all()
    if not sum(k_lengths):
        assert not packed(out).any()
        assert (lse == -math.inf).all()
        assert not any(x.grad.any() for x in leaves)
    assert_attention_within_budget(case, case.run(backend))


@backends
def test_empty_sequences_between_full_ones_get_exactly_zero(backend):
    """EMP-01, EMP-02: queries without keys, keys without queries, at either end."""
    case = AttentionCase((1, 5, 3, 4), query=QueryKind.JAGGED, q_lengths=(0, 4, 2, 0), heads=4, kv_heads=1)
    got = case.run(backend)
    for grad in (got.dk, got.dv):
        assert not grad[:1].any()
        assert not grad[9:].any()
        assert grad[1:9].any()
    assert_attention_within_budget(case, got)


# -- no_grad, inference_mode, and what is cached -----------------------------------------------------------------------


@backends
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@kinds
def test_training_after_evaluation_and_back(kind, guard, backend):
    """AUT-02, BOX-09: nothing that the first call caches spoils the second."""
    expected = full_run(kind, backend)
    boxes, leaves = fresh(case_of(kind).inputs())
    with guard():
        before = packed(attend(*boxes, causal=True, backend=backend))
        assert not before.requires_grad
    out = packed(attend(*boxes, causal=True, backend=backend))
    out.square().sum().backward()
    for x, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, wanted)
    with guard():
        assert torch.equal(packed(attend(*boxes, causal=True, backend=backend)), before)
    torch.testing.assert_close(out.detach(), before.clone())


# -- the logarithm of the sum ------------------------------------------------------------------------------------------


@backends
@kinds
def test_a_loss_on_lse_alone_has_its_gradient(kind, backend):
    """AUT-04."""
    case = case_of(kind, dtype=torch.float64)
    boxes, leaves = fresh(case.inputs())
    _, lse = attend(*boxes, causal=True, return_lse=True, backend=backend)
    loss = lambda x: x.masked_fill(x.isinf(), 0).square().sum()
    loss(lse).backward()
    again, leaves_of_reference = fresh(boxes)
    loss(attend(*again, causal=True, return_lse=True, backend="reference")[1]).backward()
    for x, y in zip(leaves[:2], leaves_of_reference[:2], strict=True):
        assert x.grad.any()
        torch.testing.assert_close(x.grad, y.grad)
    assert leaves[2].grad is None or not leaves[2].grad.any()


@backends
@kinds
def test_gradcheck(kind, backend):
    case = AttentionCase(
        (3, 0, 2), query=kind, q_length=2, q_lengths=(2, 1, 3), heads=2, kv_heads=1, dim=3, value_dim=2
    )
    inputs = case.with_options(dtype=torch.float64, causal=True, q_slack=1, k_slack=1).inputs()
    leaves = [packed(x).detach()[: x.num_tokens] if isinstance(x, JaggedTensor) else x.detach() for x in inputs]

    def function(*values):
        boxes = []
        for x, y in zip(inputs, values, strict=True):
            if isinstance(x, JaggedTensor):  # NaN in slack is beyond finite differences
                y = x.with_values(torch.cat((y, x.values().detach()[x.num_tokens :])))
            boxes.append(y)
        out, lse = attend(*boxes, causal=True, return_lse=True, backend=backend)
        return packed(out), lse.masked_fill(lse.isinf(), 0)

    leaves = [x.clone().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(function, leaves)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(function, leaves)


def test_a_second_derivative_of_the_kernel_is_refused():
    """Contract 10."""
    boxes, leaves = fresh(case_of(QueryKind.BROADCAST).inputs())
    out = attend(*boxes, causal=True)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    message = r"order of derivative of attention must be 1, got 2 \(double backward\); use backend='reference'"
    with pytest.raises(NotImplementedError, match=message):
        sum(g.sum() for g in grads).backward()


# -- what autograd does with saved tensors -----------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, kind, backend):
    """AUT-05."""
    expected = full_run(kind, backend)
    boxes, leaves = fresh(case_of(kind).inputs())

    def function(*values):
        again = [x.with_values(y) if isinstance(x, JaggedTensor) else y for x, y in zip(boxes, values, strict=True)]
        return packed(attend(*again, causal=True, backend=backend))

    checkpoint(function, *leaves, use_reentrant=use_reentrant).square().sum().backward()
    for x, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, wanted)


@backends
@kinds
def test_saved_tensors_may_be_moved_away_and_back(kind, backend):
    """AUT-05: hooks see every saved tensor, as CPU offloading needs."""
    expected = full_run(kind, backend)
    boxes, leaves = fresh(case_of(kind).inputs())
    moved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: moved.append(x) or x.numpy(force=True).copy(), torch.from_numpy
    ):
        packed(attend(*boxes, causal=True, backend=backend)).square().sum().backward()
    assert moved
    for x, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(x.grad, wanted)


def test_an_in_place_change_between_forward_and_backward_is_noticed():
    boxes, leaves = fresh(case_of(QueryKind.BROADCAST).inputs())
    out = attend(*boxes, causal=True)
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@backends
def test_backward_runs_twice_with_retain_graph(backend):
    boxes, leaves = fresh(case_of(QueryKind.JAGGED).inputs())
    loss = packed(attend(*boxes, causal=True, backend=backend)).square().sum()
    loss.backward(retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    loss.backward()
    for x, y in zip(leaves, once, strict=True):
        torch.testing.assert_close(x.grad, 2 * y)


@backends
def test_padding_and_unpadding_in_between_keeps_gradients(backend):
    """BOX-10: jagged, padded with a positional term, jagged on the same offsets, attention."""
    jt = make_jagged([3, 0, 2], 2, 4, requires_grad=True)
    position = random_tensor(1, 3, 2, 4, seed=5)
    query = random_tensor(2, 2, 4, seed=6)
    detour = JaggedTensor.from_padded(jt.to_padded() + position, jt.lengths())
    detour.attend(query, backend=backend).square().sum().backward()
    around = jt.grad.values().clone()
    jt.values().grad = None
    places = jt.with_values(position[0][jt.layout.positions(5)])
    (jt + places).attend(query, backend=backend).square().sum().backward()
    torch.testing.assert_close(around, jt.grad.values())


@backends
def test_sequences_cut_and_joined_before_attention_keep_gradients(backend):
    jt = make_jagged([3, 0, 4], 2, 4, requires_grad=True)
    query = random_tensor(2, 2, 4, seed=6)
    JaggedTensor.cat([jt[:, -2:], jt[:, :1]], dim=1).attend(query, backend=backend).square().sum().backward()
    got = jt.grad.values().clone()
    jt.values().grad = None
    for x in jt:
        keys = JaggedTensor.from_list([torch.cat((x[-2:], x[:1]))])
        keys.attend(query, backend=backend).square().sum().backward()
    torch.testing.assert_close(got, jt.grad.values())


# -- autocast ----------------------------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_query_key_and_value_together(kind, dtype, backend):
    """AUT-07: norms give fp32 where linear layers give half precision; gradients come back in each input's dtype."""
    q, k, v = case_of(kind).inputs()
    v = v.with_values(v.values().detach().to(dtype).requires_grad_())
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attend(q, k, v, causal=True, return_lse=True, backend=backend)
    assert packed(out).dtype == dtype
    assert lse.dtype == torch.float32
    expected = attend(q.to(dtype), k.to(dtype), v, causal=True, backend=backend)
    assert torch.equal(packed(out), packed(expected))
    packed(out).float().square().sum().backward()  # outside the context
    for x, wanted in ((q, torch.float32), (k, torch.float32), (v, dtype)):
        assert packed(x).grad.dtype == wanted
        assert packed(x).grad.isfinite().all()


@backends
def test_mixed_dtypes_outside_autocast_are_refused_by_name(backend):
    """AUT-07."""
    q, k, v = case_of(QueryKind.BROADCAST).inputs()
    message = (
        "query, key and value must be of one dtype, got query torch.float32, key torch.float32, value torch.bfloat16; "
        "cast them, or run under torch.autocast"
    )
    with pytest.raises(TypeError, match=message):
        attend(q, k, v.bfloat16(), backend=backend)


@backends
def test_autocast_leaves_float64_alone(backend):
    q, k, v = case_of(QueryKind.BROADCAST, dtype=torch.float64).inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v, backend=backend).dtype == torch.float64


def test_random_state_is_untouched():
    """Contract 11."""
    before = torch.get_rng_state()
    full_run(QueryKind.JAGGED, None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func.jvp's own
def test_forward_mode_is_refused_or_right():
    """A tangent must not be lost unseen: torch.func.jvp of what has no rule for it raises; the reference has one."""
    keys = JaggedTensor.from_list([torch.randn(n, 2, 4, dtype=torch.float64) for n in (3, 0, 2)])
    query, tangent = torch.randn(2, 5, 2, 4, dtype=torch.float64)

    def loss(backend):
        return lambda q: keys.attend(q, backend=backend).square().sum()

    for run in (
        lambda x: torch.func.jvp(loss("cpu"), (x,), (x,)),
        lambda x: torch.func.jvp(lambda v: keys.with_values(v).sum(1).sum(), (keys.values(),), (keys.values(),)),
        lambda x: torch.func.jvp(lambda v: keys.with_values(v).cumsum(1).values(), (keys.values(),), (keys.values(),)),
    ):
        with pytest.raises(NotImplementedError, match="must be reverse mode, got forward mode"):
            run(query)
    _, along = torch.func.jvp(loss("reference"), (query,), (tangent,))
    leaf = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss("cpu")(leaf), leaf)
    torch.testing.assert_close(along, (gradient * tangent).sum())
