"""The CPU kernel computes what the plain formula says, for every kind of query, and touches only its own rows."""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from jaggedtensor.kernels.cpu import attention, batch
from jaggedtensor.testing.budgets import assert_within_budget

BROADCAST, PER_SEQUENCE, JAGGED = "broadcast", "per sequence", "jagged"
KINDS = [BROADCAST, PER_SEQUENCE, JAGGED]
# Shorter and longer than the keys, empty on either side and on both, alone and repeated.
K_LENGTHS = (5, 0, 1, 24, 9, 10, 0, 23, 1)
Q_LENGTHS = (5, 3, 0, 9, 12, 10, 0, 24, 1)
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, 0), (3, 4), (-1, 9), (0, -1), (11, -1)]
# BLOCK, ALONE, FEW, SPLIT and LEAST by which a small batch is divided as others are at their size.
DIVISIONS = {
    "usual": (batch.BLOCK, batch.ALONE, batch.FEW, batch.SPLIT, batch.LEAST),
    "all in groups": (1 << 30, 1 << 30, 0, 128, 32),
    "small groups": (1000, 1 << 30, 1, 128, 32),
    "all alone": (1 << 30, 0, 0, 8, 32),
    "small blocks": (1, 0, 0, 3, 8),
    "head by head": (200, 100, 0, 16, 2),
}
ALL = (True, True, True)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """With deterministic algorithms on, torch fills what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor | None
    k_offsets: Tensor
    scale: float
    left: int
    right: int

    def forward(self):
        *tensors, scale, left, right = self
        return attention.forward(*tensors, scale=scale, left=left, right=right)

    def backward(self, grad_out, grad_lse=None, needs=ALL, out=None, lse=None):
        q, k, v, q_offsets, k_offsets, scale, left, right = self
        if out is None:
            out, lse = self.forward()
        options = {"scale": scale, "left": left, "right": right, "needs": needs}
        return attention.backward(grad_out, grad_lse, q, k, v, out, lse, q_offsets, k_offsets, **options)


def offsets_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(
    kind,
    k_lengths=K_LENGTHS,
    q_lengths=Q_LENGTHS,
    q_length=4,
    heads=(4, 2),
    dims=(16, 8),
    window=(-1, -1),
    dtype=torch.float32,
    slack=(0, 0, 0),
    offsets_dtype=torch.int64,
    magnitude=1.0,
    seed=0,
):
    (q_heads, kv_heads), (D, E), tokens = heads, dims, sum(k_lengths)
    rows = {BROADCAST: (q_length,), PER_SEQUENCE: (len(k_lengths), q_length), JAGGED: (sum(q_lengths),)}[kind]
    q = random(*rows, q_heads, D, dtype=dtype, seed=seed + 1) * magnitude
    k = random(tokens, kv_heads, D, dtype=dtype, seed=seed + 2) * magnitude
    v = random(tokens, kv_heads, E, dtype=dtype, seed=seed + 3)
    slack = slack if kind == JAGGED else (0, *slack[1:])
    q, k, v = (
        torch.cat([x, x.new_full((n, *x.shape[1:]), math.nan)]) if n else x
        for x, n in zip((q, k, v), slack, strict=True)
    )
    q_offsets = offsets_of(q_lengths, offsets_dtype) if kind == JAGGED else None
    return Problem(q, k, v, q_offsets, offsets_of(k_lengths, offsets_dtype), 1 / math.sqrt(D), *window)


def definition(problem, dtype=torch.float64):
    """Out and lse, one sequence at a time, with a dense mask; and leaves to differentiate by.

    A sum over the batch is one of wide leaves, so that a low precision is rounded to once.
    """
    q, k, v, q_offsets, k_offsets, scale, left, right = problem
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.detach().clone().to(dtype).to(wide).requires_grad_() for x in (q, k, v)]
    q, k, v = (x.to(dtype) for x in leaves)
    group = q.shape[-2] // k.shape[1]
    outs, lses = [], []
    for b, (start, end) in enumerate(pairwise(k_offsets.tolist())):
        queries = q if q.dim() == 3 else q[b]
        if q_offsets is not None:
            queries = q[int(q_offsets[b]) : int(q_offsets[b + 1])]
        m, L = len(queries), end - start
        place = torch.arange(m)[:, None] + L - m
        key = torch.arange(L)
        seen = torch.ones(m, L, dtype=torch.bool)
        if left >= 0:
            seen &= key >= place - left
        if right >= 0:
            seen &= key <= place + right
        blind = ~seen.any(1, keepdim=True)
        head = torch.arange(q.shape[-2]) // group
        keys, values = k[start:end, head].transpose(0, 1), v[start:end, head].transpose(0, 1)  # (Hq, L, D)
        scores = (queries.transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, -math.inf)  # (Hq, m, L)
        scores = scores.masked_fill(blind, 0)  # softmax of nothing is NaN, and so is its gradient
        out = torch.where(blind, 0, scores.softmax(2) @ values).transpose(0, 1)
        total = scores.to(wide).logsumexp(2) if L else scores.to(wide).sum(2)
        total = torch.where(blind[:, 0], -math.inf, total)
        outs.append(out)
        lses.append(total if q_offsets is None else total.T)
    if q_offsets is None:
        return torch.stack(outs), torch.stack(lses), leaves
    rows = len(q) - int(q_offsets[-1])
    outs.append(outs[0].new_zeros(rows, *outs[0].shape[1:]))
    lses.append(lses[0].new_full((rows, q.shape[1]), -math.inf))
    return torch.cat(outs), torch.cat(lses), leaves


def defined_results(problem, grad_out, grad_lse, dtype=torch.float64):
    out, lse, leaves = definition(problem, dtype)
    grads = torch.autograd.grad([out, lse], leaves, [grad_out.to(out.dtype), grad_lse.to(lse.dtype)])
    return out, lse, *(grad.to(dtype) for grad in grads)


def divisions(*names):
    """The names of divisions, each while it holds."""
    for name in names or DIVISIONS:
        with pytest.MonkeyPatch.context() as patch:
            for constant, value in zip(("BLOCK", "ALONE", "FEW", "SPLIT", "LEAST"), DIVISIONS[name], strict=True):
                patch.setattr(batch, constant, value)
            yield name


def assert_as_defined(problem, *names, multiple=3.0):
    """Out, lse and gradients of both are as near to float64 as the plain formula in that dtype, however divided."""
    out, lse = (x.detach() for x in definition(problem)[:2])
    grad_out, grad_lse = random(*out.shape, dtype=problem.q.dtype, seed=11), random(*lse.shape, seed=12)
    exact = defined_results(problem, grad_out, grad_lse)
    low = defined_results(problem, grad_out, grad_lse, problem.q.dtype)
    for name in divisions(*names):
        out, lse = problem.forward()
        mine = out, lse, *problem.backward(grad_out, grad_lse.to(lse.dtype), out=out, lse=lse)
        for result, got, rounded, wanted in zip(("out", "lse", "dq", "dk", "dv"), mine, low, exact, strict=True):
            assert got.is_contiguous()
            assert_within_budget(got, rounded, wanted, f"{result}, {name}", multiple=multiple)
    return mine


@pytest.fixture(params=DIVISIONS)
def division(request):
    yield from divisions(request.param)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_division_of_the_work_gives_what_is_defined(kind, window):
    assert_as_defined(problem(kind, window=window, q_length=7))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_full_vectors_of_queries_give_what_is_defined(kind, window):
    assert_as_defined(problem(kind, q_length=32, q_lengths=[32] * len(K_LENGTHS), heads=(2, 2), window=window))


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (6, 1), (9, 3), (12, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_query_heads_share_key_heads_in_order(kind, heads):
    assert_as_defined(problem(kind, heads=heads, dims=(4, 3), window=(-1, 2)))


@pytest.mark.parametrize("dims", [(1, 1), (7, 13), (72, 24), (24, 72), (256, 5), (1, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_may_have_any_number_of_features(kind, dims):
    assert_as_defined(problem(kind, dims=dims))


@pytest.mark.parametrize("q_length", [0, 1, 2, 31, 33, 64])
@pytest.mark.parametrize("kind", [BROADCAST, PER_SEQUENCE])
def test_any_number_of_queries(kind, q_length):
    assert_as_defined(problem(kind, q_length=q_length, window=(-1, 1)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes_give_what_is_defined(kind, dtype):
    _, lse, *_ = assert_as_defined(problem(kind, dtype=dtype, q_length=7, window=(8, 3)))
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_the_gradient_of_a_shared_query_is_rounded_once():
    p = problem(BROADCAST, k_lengths=[3] * 2000, dtype=torch.bfloat16, dims=(4, 4))
    out, _ = p.forward()
    grad_out = torch.ones_like(out) * random(*out.shape[1:], seed=5).bfloat16()  # 2000 terms of mostly one sign
    dq = p.backward(grad_out)[0]
    exact = defined_results(p, grad_out, torch.zeros(out.shape[:1] + (4, 4)))[2]
    assert_within_budget(dq, exact.bfloat16(), exact, "dq", multiple=1.0)


@pytest.mark.parametrize("q_lengths", [K_LENGTHS, K_LENGTHS[::-1]], ids=["self", "cross"])
@pytest.mark.parametrize("window", WINDOWS)
def test_jagged_queries_of_other_lengths_than_the_keys(q_lengths, window):
    assert_as_defined(problem(JAGGED, q_lengths=q_lengths, window=window, heads=(2, 2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filling", [math.nan, math.inf])
def test_slack_is_not_read_and_its_results_are_exact(kind, filling, division):
    tight, slack = problem(kind, window=(-1, 3)), problem(kind, window=(-1, 3), slack=(3, 2, 5))
    for x in slack[:3]:
        x[x.isnan()] = filling
    mine, theirs = results_with_slack(slack, filling), results_with_slack(tight, filling)
    for name, got, wanted in zip(("out", "lse", "dq", "dk", "dv"), mine, theirs, strict=True):
        rows = len(wanted)
        assert torch.equal(got[:rows], wanted), name
        assert (got[rows:] == (-math.inf if name == "lse" else 0)).all(), name


def results_with_slack(p, filling):
    out, lse = p.forward()
    rows = len(out) if p.q_offsets is None else int(p.q_offsets[-1])
    grad_out, grad_lse = torch.full_like(out, filling), torch.full_like(lse, filling)
    grad_out[:rows], grad_lse[:rows] = random(*out[:rows].shape, seed=11), random(*lse[:rows].shape, seed=12)
    return out, lse, *p.backward(grad_out, grad_lse, out=out, lse=lse)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slack", [0, 2])
def test_no_keys_give_zeros(kind, lengths, slack):
    p = problem(kind, k_lengths=lengths, q_lengths=[3] * len(lengths), slack=(slack,) * 3)
    out, lse = p.forward()
    dq, dk, dv = p.backward(torch.ones_like(out), torch.ones_like(lse))
    shape = {BROADCAST: (len(lengths), 4), PER_SEQUENCE: (len(lengths), 4), JAGGED: (3 * len(lengths) + slack,)}[kind]
    assert out.shape == (*shape, 4, 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    for got, like in zip((dq, dk, dv), p, strict=False):
        assert got.shape == like.shape
        assert (got == 0).all()


def test_no_queries_give_zero_gradients():
    p = problem(JAGGED, q_lengths=[0] * len(K_LENGTHS))
    dq, dk, dv = p.backward(torch.empty(0, 4, 8))
    assert dq.shape == (0, 4, 16)
    assert (dk == 0).all()
    assert (dv == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_queries_that_see_no_key_give_zero_and_move_nothing(kind, division):
    """Three queries, causal, one key: the first two stand before it."""
    p = problem(kind, k_lengths=[1, 3, 1], q_lengths=[3, 3, 3], q_length=3, window=(-1, 0))
    out, lse = p.forward()
    if kind == JAGGED:
        out, lse = out.unflatten(0, (3, 3)), lse.unflatten(0, (3, 3)).transpose(1, 2)
    assert (out[[0, 2], :2] == 0).all()
    assert (lse[[0, 2], :, :2] == -math.inf).all()
    assert torch.equal(out[0, 2], p.v[0].repeat_interleave(2, 0))
    weight = torch.zeros_like(out)
    weight[[0, 2], :2] = math.inf  # times the exact 0 that these rows contribute
    for got in p.backward(weight.flatten(0, 1) if kind == JAGGED else weight):
        assert (got == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sequence_does_not_see_its_neighbours(kind, value, division):
    lengths = [9, 8, 9, 30]
    clean = problem(kind, k_lengths=lengths, q_lengths=lengths)
    dirty = problem(kind, k_lengths=lengths, q_lengths=lengths)
    dirty.k[9:17], dirty.v[9:17] = value, value
    others = torch.tensor([*range(9), *range(17, 56)])
    results = others if kind == JAGGED else torch.tensor([0, 2, 3])
    grad_out = torch.ones_like(clean.forward()[0])
    for name, got, wanted in zip(("out", "lse"), dirty.forward(), clean.forward(), strict=True):
        assert torch.equal(got[results], wanted[results]), name
    got, wanted = dirty.backward(grad_out), clean.backward(grad_out)
    if kind != BROADCAST:
        assert torch.equal(got[0][results], wanted[0][results])
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert torch.equal(mine[others], theirs[others])


@pytest.mark.parametrize("kind", KINDS)
def test_one_visible_key_gives_its_value_exactly(kind, division):
    p = problem(
        kind, k_lengths=[1, 1, 1, 4], q_lengths=[2, 1, 3, 4], q_length=2, window=(0, 0), heads=(2, 2), magnitude=1e3
    )
    out, _ = p.forward()
    out = out.flatten(0, -3)
    rows = {JAGGED: [1, 2, 5, 6, 7, 8, 9]}.get(kind, [1, 3, 5, 6, 7])
    keys = {JAGGED: [0, 1, 2, 3, 4, 5, 6]}.get(kind, [0, 1, 2, 5, 6])
    assert torch.equal(out[rows], p.v[keys])


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_choose_one_key_exactly(kind):
    """Scores of 250000 and -250000: the exponential of their difference is 0, and lse is the larger one."""
    p = problem(kind, k_lengths=[3, 50, 1], q_lengths=[2, 2, 2], q_length=2, heads=(1, 1), dims=(1, 4))._replace(
        scale=1.0
    )
    p.q.fill_(500)
    p.k.fill_(-500)
    chosen = torch.tensor([1, 40, 53])
    p.k[chosen] = 500
    out, lse = p.forward()
    assert torch.equal(out.reshape(3, 2, 4), p.v[chosen].expand(3, 2, 4))
    assert (lse == 250000).all()
    dq, dk, dv = p.backward(torch.ones_like(out))
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert torch.equal(dv[chosen], torch.full((3, 1, 4), 2.0))
    assert dv.sum() == 24


@pytest.mark.parametrize("kind", KINDS)
def test_scores_far_below_zero_are_no_less_exact(kind):
    """Padding that scored 0 would outweigh keys that all score -200."""
    p = problem(kind, k_lengths=[37, 20, 33], q_lengths=[5, 30, 1], dims=(4, 4))
    p.q.fill_(10).add_(random(*p.q.shape, seed=8), alpha=0.01)
    p.k.fill_(-10).add_(random(*p.k.shape, seed=9), alpha=0.01)
    assert_as_defined(p)


def test_scores_beyond_half_precision_are_finite():
    """Scores of 18000 before and 200000 without the scale; the second is infinite in float16."""
    p = problem(JAGGED, k_lengths=[5, 130], q_lengths=[5, 130], dims=(128, 8), dtype=torch.float16)
    p.q.fill_(40)
    p.k.fill_(40)
    out, lse = p.forward()
    expected = torch.cat([p.v[:5].double().mean(0).expand(5, -1, -1), p.v[5:].double().mean(0).expand(130, -1, -1)])
    torch.testing.assert_close(out.double(), expected.repeat_interleave(2, 1), rtol=1e-3, atol=1e-4)
    scores = 1600 * 128**0.5
    expected = torch.tensor([scores + math.log(5)] * 5 + [scores + math.log(130)] * 130)
    torch.testing.assert_close(lse, expected[:, None].expand_as(lse), rtol=1e-5, atol=0)
    assert all(x.isfinite().all() for x in p.backward(torch.ones_like(out)))


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_only_needed_gradients_are_returned_and_are_those_of_all(kind, needs, division):
    p = problem(kind, window=(-1, 2))
    out, lse = p.forward()
    grads = random(*out.shape), random(*lse.shape)
    for need, got, wanted in zip(
        needs, p.backward(*grads, needs=tuple(map(bool, needs))), p.backward(*grads), strict=True
    ):
        assert torch.equal(got, wanted) if need else got is None


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_of_lse_is_a_gradient_of_zero(kind):
    p = problem(kind)
    out, lse = p.forward()
    for got, wanted in zip(p.backward(out), p.backward(out, torch.zeros_like(lse)), strict=True):
        assert torch.equal(got, wanted)


def fused(*tensors):
    """Views of one buffer, side by side in each row."""
    width = sum(x.shape[-2] * x.shape[-1] for x in tensors)
    buffer = torch.full((max(len(x) for x in tensors), width + 3), math.nan)
    views, start = [], 1
    for x in tensors:
        end = start + x.shape[-2] * x.shape[-1]
        view = buffer[: len(x), start:end].view(x.shape)
        views.append(view.copy_(x))
        start = end
    return views


def strided(x, how):
    if how == "contiguous":
        return x
    if how == "every other row":
        return torch.stack([x, x.new_full(x.shape, math.nan)], -3).flatten(-4, -3)[..., ::2, :, :]
    if how == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "wide heads":
        return torch.cat([x, x.new_full((*x.shape[:-1], 3), math.nan)], -1)[..., : x.shape[-1]]
    if how == "features apart":
        return torch.stack([x, x.new_full(x.shape, math.nan)], -1)[..., 0]
    raise ValueError(how)


STRIDES = ["contiguous", "every other row", "heads first", "wide heads", "features apart"]


@pytest.mark.parametrize("which", [0, 1, 2, 3, (0, 1, 2, 3)])
@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind, how, which, division):
    which = (which,) if isinstance(which, int) else which
    p = problem(kind, window=(-1, 2))
    tensors = [*p[:3], random(*p.forward()[0].shape)]
    views = [strided(x, how) if i in which else x for i, x in enumerate(tensors)]
    assert all(torch.equal(x, view) for x, view in zip(tensors, views, strict=True))
    other = p._replace(q=views[0], k=views[1], v=views[2])
    for got, wanted in zip(other.forward(), p.forward(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(other.backward(views[3]), p.backward(tensors[3]), strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_views_of_one_fused_buffer():
    p = problem(JAGGED, q_lengths=K_LENGTHS, heads=(4, 2), window=(-1, 0))
    q, k, v = fused(p.q, p.k, p.v)
    assert_as_defined(p._replace(q=q, k=k, v=v))


def test_one_row_expanded_is_that_row_repeated():
    p = problem(JAGGED)
    k, v = p.k[:1].expand_as(p.k), p.v[:, :1].expand_as(p.v)
    assert_as_defined(p._replace(k=k, v=v))


@pytest.mark.parametrize("kind", KINDS)
def test_an_expanded_gradient_is_that_gradient_repeated(kind, division):
    p = problem(kind)
    out, lse = p.forward()
    expanded = torch.ones(()).expand_as(out), torch.ones(()).expand_as(lse)
    for got, wanted in zip(p.backward(*expanded), p.backward(*(x.contiguous() for x in expanded)), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_callers_own(kind):
    p = problem(kind, slack=(1, 1, 1))
    copies = [x.clone() for x in p[:3]]
    out, lse = p.forward()
    results = [out, lse, *p.backward(out, lse.nan_to_num(neginf=0))]
    assert len({x.untyped_storage().data_ptr() for x in [*results, *p[:3]]}) == 8
    for x, copy in zip(p, copies, strict=False):
        torch.testing.assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dtype_of_offsets_does_not_matter(kind):
    wide, narrow = problem(kind), problem(kind, offsets_dtype=torch.int32)
    mixed = narrow._replace(k_offsets=wide.k_offsets)
    for p in (narrow, mixed):
        for got, wanted in zip(p.forward(), wide.forward(), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 3, 2], [0, 3, 5]], ids=["start", "decrease", "end"])
@pytest.mark.parametrize("name", ["q_offsets", "k_offsets"])
def test_offsets_that_leave_the_rows_are_refused(name, offsets):
    p = problem(JAGGED, k_lengths=[2, 2], q_lengths=[2, 2])._replace(**{name: torch.tensor(offsets)})
    with pytest.raises(ValueError, match=f"{name} must start at 0, never decrease and end within the 4 rows, got"):
        p.forward()
    with pytest.raises(ValueError, match=name):
        p.backward(torch.ones(4, 4, 8), out=torch.ones(4, 4, 8), lse=torch.ones(4, 4))


def test_queries_of_another_batch_are_refused():
    p = problem(JAGGED, k_lengths=[2, 2], q_lengths=[2, 2])
    with pytest.raises(ValueError, match="one batch size, got 1 and 2"):
        p._replace(q_offsets=torch.tensor([0, 4])).forward()
    with pytest.raises(ValueError, match="one batch size, got 3 and 2"):
        p._replace(q=torch.ones(3, 4, 4, 16), q_offsets=None).forward()


def groups_of(p):
    return batch.Batch(p.q, p.k, p.v, p.q_offsets, p.k_offsets, p.left, p.right).groups()


@pytest.mark.parametrize("kind", KINDS)
def test_many_tiny_sequences_are_few_groups(kind):
    generator = torch.Generator().manual_seed(0)
    k_lengths, q_lengths = torch.randint(0, 31, (2, 8192), generator=generator).tolist()
    p = problem(kind, k_lengths=k_lengths, q_lengths=q_lengths, q_length=3, dims=(8, 8))
    assert sum(len(group.blocks) for group in groups_of(p)) < 1000
    out, _ = p.forward()
    dq, dk, dv = p.backward(torch.ones_like(out))
    for b in (0, 1, 4000, 8191):
        keys, queries = slice(*p.k_offsets[b : b + 2].tolist()), slice(None)
        one = p._replace(k=p.k[keys], v=p.v[keys], k_offsets=offsets_of(k_lengths[b : b + 1]))
        if kind == JAGGED:
            queries = slice(*p.q_offsets[b : b + 2].tolist())
            one = one._replace(q=p.q[queries], q_offsets=offsets_of(q_lengths[b : b + 1]))
        if kind == PER_SEQUENCE:
            one = one._replace(q=p.q[b : b + 1])
        expected, _, leaves = definition(one)
        expected_dk, expected_dv = torch.autograd.grad(expected.sum(), leaves[1:])
        got = out[queries] if kind == JAGGED else out[b : b + 1]
        for mine, exact in ((got, expected), (dk[keys], expected_dk), (dv[keys], expected_dv)):
            torch.testing.assert_close(mine, exact.float(), rtol=1e-4, atol=1e-5)
    assert dq.isfinite().all()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 50)])
@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_at_the_usual_sizes(kind, window):
    lengths = [700, 3, 0, 1300]
    assert_as_defined(
        problem(kind, k_lengths=lengths, q_lengths=[600, 3, 5, 0], q_length=33, heads=(4, 2), window=window)
    )


def test_a_window_over_a_long_sequence_does_not_read_all_keys_for_each_query():
    p = problem(JAGGED, k_lengths=[4000], q_lengths=[4000], window=(100, 0))
    (group, *_) = groups_of(p)
    assert all(block.keys.stop - block.keys.start <= batch.SPLIT + 100 for block in group.blocks)
