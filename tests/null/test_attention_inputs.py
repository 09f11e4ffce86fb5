"""Attention reads its inputs as they are: any strides, any slack, any size of numbers; and no sequence sees another."""

import math

import pytest
import torch

from jaggedtensor import JaggedTensor, attend
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, assert_attention_within_budget, make_jagged, offsets_of
from jaggedtensor.testing.cases import random_tensor

KINDS = list(QueryKind)
backends = pytest.mark.parametrize("backend", [None, "reference"])
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)


def run(q, k, v, weight=None, **options):
    """out, lse, dq, dk, dv with packed leaves."""
    tensors = [packed_of(x).detach().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.with_values(t) if isinstance(x, JaggedTensor) else t for x, t in zip((q, k, v), tensors, strict=True))
    out, lse = attend(q, k, v, return_lse=True, **options)
    out = out.values() if isinstance(out, JaggedTensor) else out
    weight = random_tensor(*out.shape, dtype=out.dtype, seed=11) if weight is None else weight
    return out.detach(), lse.detach(), *torch.autograd.grad((out * weight).sum(), tensors)


def assert_all_equal(got, expected, names=("out", "lse", "dq", "dk", "dv")):
    for mine, theirs, name in zip(got, expected, names, strict=True):
        assert torch.equal(mine, theirs), name


def packed_of(x):
    return x.values() if isinstance(x, JaggedTensor) else x


# -- slack -------------------------------------------------------------------------------------------------------------


@backends
@kinds
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_in_slack_changes_no_bit(kind, causal, poison, backend):
    """SLK-02, SLK-03, SLK-04."""
    case = AttentionCase(
        (21, 0, 4), query=kind, q_lengths=(21, 2, 3), heads=4, kv_heads=1, q_slack=3, k_slack=3, causal=causal
    )
    q, k, v = case.inputs()
    dirty, clean = [], []
    for x in (q, k, v):
        if isinstance(x, JaggedTensor):
            values = x.values().detach().clone()
            for value, box in ((poison, dirty), (0.0, clean)):
                values[x.num_tokens :] = value
                box.append(x.with_values(values.clone()))
        else:
            dirty.append(x)
            clean.append(x)
    got = run(*dirty, causal=causal, backend=backend)
    assert_all_equal(got, run(*clean, causal=causal, backend=backend))
    for grad, x in zip(got[2:], (q, k, v), strict=True):
        if isinstance(x, JaggedTensor):
            assert torch.equal(grad[x.num_tokens :], torch.zeros_like(grad[x.num_tokens :]))
    if kind is QueryKind.JAGGED:
        assert not got[0][q.num_tokens :].any()
        assert (got[1][q.num_tokens :] == -math.inf).all()


@backends
@kinds
def test_slack_equals_trimmed_inputs(kind, backend):
    """SLK-04: the only sequence of a batch is not the whole buffer."""
    for lengths in ((9,), (4, 0, 5)):
        case = AttentionCase(lengths, query=kind, q_lengths=lengths, q_slack=2, k_slack=7)
        assert_attention_within_budget(case, case.run(backend))
        q, k, v = case.inputs()
        trimmed = [
            JaggedTensor(x.values()[: x.num_tokens], x.offsets()) if isinstance(x, JaggedTensor) else x
            for x in (q, k, v)
        ]
        whole, cut = attend(q, k, v, backend=backend), attend(*trimmed, backend=backend)
        whole, cut = (x.values()[: x.num_tokens] if isinstance(x, JaggedTensor) else x for x in (whole, cut))
        assert torch.equal(whole, cut)


@backends
def test_keys_and_values_may_have_different_slack(backend):
    k = make_jagged([4, 0, 2], 2, 8, slack=3)
    v = JaggedTensor(make_jagged([4, 0, 2], 2, 8, seed=1).values(), k.layout)
    q = random_tensor(3, 2, 8, seed=2)
    out, _, _, dk, dv = run(q, k, v, backend=backend)
    trimmed = JaggedTensor(k.values()[:6], k.layout)
    expected, _, _, expected_dk, expected_dv = run(q, trimmed, v, backend=backend)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dk, torch.cat((expected_dk, torch.zeros(3, 2, 8, dtype=torch.float64))))
    torch.testing.assert_close(dv, expected_dv)


@backends
def test_weights_before_attention_never_see_slack(backend):
    """SLK-01."""
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 24).double()
    leaf = random_tensor(11, 8)
    offsets = offsets_of([3, 0, 6])

    def weight_grad(rows):
        projection.zero_grad()
        x = JaggedTensor(leaf[:rows].clone().index_fill(0, torch.arange(9, rows), math.nan), offsets)
        q, k, v = torch.chunk(projection(x).unflatten(-1, (6, 4)), 3, dim=2)
        attend(q, k, v, causal=True, backend=backend).sum(1).square().sum().backward()
        return projection.weight.grad.clone(), projection.bias.grad.clone()

    for mine, theirs in zip(weight_grad(11), weight_grad(9), strict=True):
        torch.testing.assert_close(mine, theirs)


# -- strides -----------------------------------------------------------------------------------------------------------


def strided(x, how):
    """The same numbers with other strides; what lies between is NaN."""
    if how == "every other row":
        larger = x.new_full((2 * x.shape[0], *x.shape[1:]), math.nan)
        larger[::2] = x
        return larger[::2]
    if how == "columns of a fused buffer":
        larger = x.new_full((*x.shape[:-2], 4 * x.shape[-2], x.shape[-1]), math.nan)
        larger[..., x.shape[-2] : 2 * x.shape[-2], :] = x
        return larger[..., x.shape[-2] : 2 * x.shape[-2], :]
    if how == "odd row pitch":
        larger = x.new_full((*x.shape[:-1], x.shape[-1] + 9), math.nan)
        larger[..., : x.shape[-1]] = x
        return larger[..., : x.shape[-1]]
    if how == "misaligned base":
        flat = x.new_full((x.numel() + 1,), math.nan)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if how == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "last dimension not contiguous":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    return x.clone()


HOWS = [
    "every other row", "columns of a fused buffer", "odd row pitch", "misaligned base", "heads first",
    "last dimension not contiguous",
]  # fmt: skip


@backends
@kinds
@pytest.mark.parametrize("how", HOWS)
def test_any_strides_read_the_same_numbers(how, kind, backend):
    """STR-01, STR-02, STR-04, STR-05: all combinations of strided and contiguous q, k, v."""
    case = AttentionCase((5, 0, 12), query=kind, q_lengths=(3, 1, 5), heads=4, kv_heads=2, value_dim=16, causal=True)
    inputs = case.inputs()
    expected = run(*inputs, causal=True, backend=backend)
    for which in range(1, 8):
        mixed = []
        for i, x in enumerate(inputs):
            values = (x.values() if isinstance(x, JaggedTensor) else x).detach()
            values = strided(values, how) if which >> i & 1 else values
            mixed.append(x.with_values(values) if isinstance(x, JaggedTensor) else values)
        got = run(*mixed, causal=True, backend=backend)
        for mine, theirs, name in zip(got, expected, ("out", "lse", "dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(mine, theirs, msg=lambda m, n=name: f"{n}: {m}")


@backends
def test_gradients_of_a_fused_buffer_stay_in_their_slices(backend):
    """STR-01: q, k and v are column slices of one buffer, which has a fourth."""
    buffer = random_tensor(17, 4 * 8).requires_grad_()
    q, k, v, _ = (JaggedTensor(x.unflatten(1, (2, 4)), offsets_of([5, 0, 12])) for x in buffer.split(8, 1))
    attend(q, k, v, causal=True, backend=backend).values().square().sum().backward()
    assert not buffer.grad[:, 24:].any()
    parts = [x.detach().contiguous().requires_grad_() for x in buffer.split(8, 1)[:3]]
    again = [JaggedTensor(x.unflatten(1, (2, 4)), offsets_of([5, 0, 12])) for x in parts]
    attend(*again, causal=True, backend=backend).values().square().sum().backward()
    torch.testing.assert_close(buffer.grad[:, :24], torch.cat([x.grad for x in parts], 1))


@backends
@kinds
def test_gradients_with_zero_strides_are_read_as_they_are(kind, backend):
    """STR-08: out.sum().backward() and its kin."""
    case = AttentionCase((5, 0, 2), query=kind, q_lengths=(5, 1, 0), causal=True, dtype=torch.float32)
    q, k, v = case.inputs()
    out = attend(q, k, v, causal=True, backend=backend)
    out = out.values() if isinstance(out, JaggedTensor) else out
    leaves = [x.values() if isinstance(x, JaggedTensor) else x for x in (q, k, v)]
    for loss, weight in (
        (out.sum(), torch.ones_like(out)),
        (out.mean(), torch.full_like(out, 1 / out.numel())),
        (out[..., 0].sum(), torch.nn.functional.one_hot(torch.zeros(out.shape[:-1], dtype=torch.int64), 8).float()),
        (out.transpose(0, -1).flatten() @ torch.arange(out.numel()).float(), None),
    ):
        mine = torch.autograd.grad(loss, leaves, retain_graph=True)
        if weight is None:
            weight = torch.autograd.grad(loss, out, retain_graph=True)[0].contiguous()
        theirs = torch.autograd.grad(out, leaves, weight.clone(), retain_graph=True)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


@backends
def test_truncated_views_of_a_larger_leaf_leave_its_tail_alone(backend):
    """STR-07."""
    leaves = [random_tensor(20, 2, 4, seed=i).requires_grad_() for i in range(2)]
    k, v = (JaggedTensor(x[:-8], offsets_of([5, 0, 7])) for x in leaves)
    attend(random_tensor(3, 2, 4, seed=4), k, v, backend=backend).square().sum().backward()
    for x in leaves:
        assert not x.grad[12:].any()
        assert x.grad[:12].any()


@kinds
def test_gradients_are_compact_whatever_the_inputs_were(kind):
    """STR-10: the strides of an input are not those of its gradient."""
    inputs = AttentionCase((4, 0, 2), query=kind, q_lengths=(1, 2, 3)).inputs()
    leaves = [strided(packed.detach(), "odd row pitch").requires_grad_() for packed in map(packed_of, inputs)]
    boxes = [x.with_values(y) if isinstance(x, JaggedTensor) else y for x, y in zip(inputs, leaves, strict=True)]
    out = packed_of(attend(*boxes))
    for grad, leaf in zip(torch.autograd.grad(out.square().sum(), leaves), leaves, strict=True):
        assert not leaf.is_contiguous()
        assert grad.is_contiguous()


@backends
@kinds
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_read_with_their_strides_and_nothing_beyond_them(dtype, kind, backend):
    """EMP-12: offsets in the middle of a buffer of poison."""
    case = AttentionCase((4, 0, 2), query=kind, q_lengths=(1, 2, 3), causal=True, dtype=torch.float64)
    inputs = case.inputs()
    expected = run(*inputs, causal=True, backend=backend)
    moved = []
    for x in inputs:
        if isinstance(x, JaggedTensor):
            buffer = torch.full((12,), torch.iinfo(dtype).max, dtype=dtype)
            buffer[3:11:2] = x.offsets()
            x = JaggedTensor(x.values(), buffer[3:11:2])
        moved.append(x)
    for mine, theirs in zip(run(*moved, causal=True, backend=backend), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# -- numbers -----------------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("dim", [16, 64])
def test_a_single_key_is_returned_exactly_however_large(dim, backend):
    """NUM-01: the probability is 1, not exp of a rounding error."""
    big = torch.full((1, 1, dim), 133120.0, dtype=torch.bfloat16)
    k = JaggedTensor(big, torch.tensor([0, 1]))
    out, lse, *grads = run(big, k, k, backend=backend)
    assert torch.equal(out[0], big)
    assert lse.isfinite().all()
    assert all(x.isfinite().all() for x in grads)


@backends
def test_very_negative_logits_keep_their_softmax(backend):
    """NUM-02: no finite number stands for minus infinity."""
    dim, level = 128, -2.45e5
    query = torch.ones(1, 16, dim)
    keys = torch.full((64, 1, dim), level / dim)
    keys[0] = (level + 5000) / dim
    k = JaggedTensor(keys, torch.tensor([0, 64]))
    v = k.with_values(torch.randn(64, 1, dim, generator=torch.Generator().manual_seed(0)))
    out, lse = attend(query, k, v, scale=1.0, return_lse=True, backend=backend)
    assert torch.equal(out[0, 0], v.values()[0].expand(16, dim))
    torch.testing.assert_close(lse, torch.full_like(lse, level + 5000))
    one = JaggedTensor(keys[1:2], torch.tensor([0, 1]))
    jagged = JaggedTensor(query, torch.tensor([0, 1]))
    out, lse = attend(
        jagged, one, one.with_values(v.values()[:1]), scale=1.0, causal=True, return_lse=True, backend=backend
    )
    assert torch.equal(out.values()[0], v.values()[0].expand(16, dim))
    torch.testing.assert_close(lse, torch.full_like(lse, level))


@backends
def test_fp16_logits_may_pass_its_range(backend):
    """NUM-04: 40 * 40 * 128 is more than 65504."""
    k = make_jagged([7, 300], 1, 128, dtype=torch.float16).map_values(lambda x: torch.full_like(x, 40))
    v = make_jagged([7, 300], 1, 128, dtype=torch.float16, seed=1)
    q = torch.full((2, 1, 128), 40.0, dtype=torch.float16)
    out, lse, *grads = run(q, k, v, backend=backend)
    torch.testing.assert_close(out[0, 0, 0], v[0].float().mean(0)[0].half(), rtol=2e-3, atol=1e-3)
    assert lse.isfinite().all()
    assert all(x.isfinite().all() for x in grads)


@backends
def test_float32_is_computed_in_float32(backend):
    """NUM-05."""
    case = AttentionCase((128,), query=QueryKind.JAGGED, q_lengths=(128,), heads=1, kv_heads=1, dim=32, causal=True)
    got, exact = case.run(backend), case.exact()
    for mine, theirs in zip(got, exact, strict=True):
        finite = theirs.isfinite()
        assert (mine[finite] - theirs[finite]).abs().max() <= 1e-5 * theirs[finite].abs().max()


@backends
@pytest.mark.parametrize("length", [64, 70, 127, 129, 192])
def test_strongly_negative_logits_have_finite_gradients_in_the_tail(length, backend):
    """TAIL-06, TAIL-07: masked columns count for nothing, not for exp(0 - lse)."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.1 * torch.randn(length + 3, 1, 64, generator=generator)
    keys = (noise - 15).bfloat16()
    k = JaggedTensor(keys, torch.tensor([0, length, length + 3]))
    q = JaggedTensor((15 - noise[:7]).bfloat16(), torch.tensor([0, 5, 7]))
    v = make_jagged([length, 3], 1, 64, dtype=torch.bfloat16, seed=3)
    for options in ({}, {"causal": True}):
        got = run(q, k, JaggedTensor(v.values(), k.layout), backend=backend, **options)
        assert (got[1] < -1000).all()
        assert all(x.isfinite().all() for x in got)


# -- sequences ---------------------------------------------------------------------------------------------------------


@backends
@kinds
def test_no_sequence_sees_another(kind, backend):
    """ISO-01: whatever happens in sequence 1, the others have the same bits."""
    case = AttentionCase((3, 5, 2), query=kind, q_lengths=(2, 3, 4), dtype=torch.float16)
    q, k, v = case.inputs()
    before = run(q, k, v, backend=backend)
    changed = []
    for x in (k, v):
        values = x.values().detach().clone()
        values[3:8] = 100 * values[3:8].flip(0)
        changed.append(x.with_values(values))
    after = run(q, *changed, backend=backend)
    outside = [*range(3), *range(8, 10)]
    for name, a, b in zip(("dk", "dv"), before[3:], after[3:], strict=True):
        assert torch.equal(a[outside], b[outside]), name
    rows = [0, 2] if kind is not QueryKind.JAGGED else [0, 1, 5, 6, 7, 8]
    for name, a, b in zip(("out", "lse"), before[:2], after[:2], strict=True):
        assert torch.equal(a[rows], b[rows]), name


@backends
@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_every_batch_size_agrees_with_its_sequences_alone(batch, backend):
    """ISO-02."""
    lengths = tuple((3 * i + 2) % 8 for i in range(batch))
    q, k, v = AttentionCase(lengths, dtype=torch.float64).inputs()
    out = attend(q, k, v, backend=backend)
    for i in range(batch):
        torch.testing.assert_close(attend(q, k[i : i + 1], v[i : i + 1], backend=backend), out[i : i + 1])


@backends
@pytest.mark.parametrize("length", [1, 5, 33])
def test_the_place_of_a_sequence_in_its_batch_hardly_matters(length, backend):
    """ISO-04: to the last bits of float64; the neighbours only choose how products are blocked."""
    q = random_tensor(3, 2, 8, seed=1)
    k, v = random_tensor(length, 2, 8, seed=2), random_tensor(length, 2, 8, seed=3)
    alone = run(q, JaggedTensor.from_list([k]), JaggedTensor.from_list([v]), backend=backend)
    for lengths, place in (((length, 4, 0), 0), ((0, 31, length), 2), ((7, 0, length, 90), 2)):
        ks, vs = ([random_tensor(n, 2, 8, seed=9 + s + i) for i, n in enumerate(lengths)] for s in (0, 50))
        ks[place], vs[place] = k, v
        weight = torch.zeros(len(lengths), 3, 2, 8, dtype=torch.float64)
        weight[place] = random_tensor(1, 3, 2, 8, seed=11)[0]
        out, _, dq, dk, dv = run(
            q, JaggedTensor.from_list(ks), JaggedTensor.from_list(vs), weight=weight, backend=backend
        )
        begin = sum(lengths[:place])
        torch.testing.assert_close(out[place], alone[0][0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(dq, alone[2], rtol=1e-12, atol=1e-13)
        for mine, theirs in ((dk, alone[3]), (dv, alone[4])):
            torch.testing.assert_close(mine[begin : begin + length], theirs, rtol=1e-12, atol=1e-13)
            mine[begin : begin + length] = 0
            assert not mine.any()


@backends
@kinds
def test_the_same_inputs_give_the_same_bits(kind, backend):
    """DET-01 and contract 11, on a CPU."""
    case = AttentionCase((65, 0, 3, 40, 1), query=kind, q_lengths=(9, 4, 0, 7, 1), heads=4, dtype=torch.bfloat16)
    first = case.run(backend, deterministic=True)
    for _ in range(3):
        assert_all_equal(case.run(backend, deterministic=True), first)
        assert_all_equal(case.run(backend), first)


@backends
def test_the_gradient_of_a_broadcast_query_is_summed_wide_and_rounded_once(backend):
    """Contract 4: 400 sequences of one sign, whose bfloat16 running sum would stop growing."""
    case = AttentionCase((2,) * 400, q_length=1, heads=1, kv_heads=1, dtype=torch.bfloat16)
    _, k, v = case.inputs()
    q = torch.ones(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    both = k.values().detach().abs()
    both[1::2] = 0
    _, lse = attend(q, k.with_values(both), v, return_lse=True, backend=backend)
    (grad,) = torch.autograd.grad(lse.sum(), q)
    wide = q.detach().double().requires_grad_()
    scores = (both.double()[:, 0] @ wide[0, 0] / math.sqrt(8)).view(400, 2)
    (expected,) = torch.autograd.grad(scores.logsumexp(1).sum(), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=2**-8, atol=0)


@backends
def test_nothing_is_written_to_the_inputs(backend):
    q, k, v = AttentionCase((5, 0, 2), causal=True).inputs()
    before = [x.detach().clone() for x in (q, k.values(), v.values(), k.offsets())]
    run(q, k, v, causal=True, backend=backend)
    for x, y in zip((q, k.values(), v.values(), k.offsets()), before, strict=True):
        assert torch.equal(x, y)


@backends
def test_one_token_keeps_its_axes(backend):
    """EMP-13."""
    jt = make_jagged([1], 8, 16, dtype=torch.float16)
    out = attend(make_jagged([1], 8, 16, dtype=torch.float16, seed=1), jt, backend=backend)
    assert out.values().shape == (1, 8, 16)
    assert torch.equal(out.values(), jt.values())
