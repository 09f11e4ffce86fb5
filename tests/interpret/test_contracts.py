"""What the portable kernels promise besides values: which rows they touch, which kernels they launch, equal bits."""

import itertools
import math

import numpy
import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import AttentionCase, make_jagged, offsets_of
from jaggedtensor.testing.bounds import Call, check_attention
from jaggedtensor.testing.guards import embedded, guarded_allocations
from jaggedtensor.testing.launches import recorded_launches

KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
numpy.seterr(all="ignore")  # inf and NaN in lanes that a mask drops


def case_of(kind, **options):
    settings = dict(query=kind, q_length=5, q_lengths=(20, 2, 0, 9), heads=2, kv_heads=1, dim=16, value_dim=24)
    return AttentionCase((20, 0, 1, 70), **settings | options)


def packed(x):
    return x.values() if isinstance(x, JaggedTensor) else x


def assert_equal_bits(got, wanted, names=("out", "lse", "dq", "dk", "dv")):
    for mine, theirs, name in zip(got, wanted, names, strict=True):
        assert torch.equal(mine, theirs), name


# -- nothing to do -----------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("k_lengths", "q_length", "q_lengths"),
    [((0, 0, 0), 3, (4, 0, 7)), ((), 3, ()), ((9,), 0, (0,)), ((0, 3), 0, (0, 0)), ((0,), 130, (130,))],
    ids=["no keys", "no sequences", "no queries", "neither", "more rows than a block"],
)
def test_batches_without_keys_queries_or_sequences_train(k_lengths, q_length, q_lengths, causal, kind):
    """EMP-04, EMP-05: results of the right shapes, exact zeros, and no grid of size 0."""
    case = AttentionCase(k_lengths, query=kind, q_length=q_length, q_lengths=q_lengths, causal=causal, k_slack=2)
    with recorded_launches() as launches, guarded_allocations():
        got = check_attention(case, "portable")
    assert all(size > 0 for launch in launches for size in launch.grid)
    for gradient in got[2:]:
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("lengths", [(0, 0, 40), (40, 0, 0), (0, 1, 0), (1, 1, 1), (0, 17, 0, 17, 0)], ids=str)
def test_empty_sequences_at_every_place(lengths):
    """EMP-01, EMP-02, EMP-08."""
    for kind in KINDS:
        q_lengths = tuple((3 * i + n) % 23 for i, n in enumerate(lengths))
        check_attention(AttentionCase(lengths, query=kind, q_lengths=q_lengths, dim=16, value_dim=16), "portable")


# -- memory ------------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2)}], ids=str)
def test_every_row_is_written_and_nothing_else(kind, options):
    """TAIL-04, SLK-01, EMP-12: new memory is NaN, results stand between guards, inputs and offsets between poison."""
    case = case_of(kind, k_slack=3, q_slack=2, **options)
    call = Call.of_case(case)
    q, k, v = call.query, call.keys, call.values
    keys = JaggedTensor(embedded(k.values()), embedded(k.offsets(), fill=1 << 40), validate=False)
    values = keys.with_values(embedded(v.values()))
    if isinstance(q, JaggedTensor):
        query = JaggedTensor(embedded(q.values()), embedded(q.offsets(), fill=1 << 40), validate=False)
    else:
        query = embedded(q)
    grads = (embedded(call.grad_out), embedded(call.grad_lse))
    call = Call(query, keys, values, call.options, *grads)
    with guarded_allocations() as made:
        got = call.run("portable")
    assert made
    call.check(got)
    assert_equal_bits(got, Call.of_case(case).run("portable"))


def test_a_large_result_is_filled_by_the_kernel(monkeypatch):
    """The zeros of empty sequences are not written twice where that would cost."""
    from jaggedtensor.kernels.portable.attention_fwd import launch

    monkeypatch.setattr(launch, "SMALL", 0)
    for kind in (QueryKind.BROADCAST, QueryKind.PER_SEQUENCE):
        with guarded_allocations(), recorded_launches() as launches:
            check_attention(case_of(kind, q_length=70), "portable")
        assert launches[0].name == "fill_kernel"


@kinds
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_what_is_in_slack_changes_no_bit(kind, poison):
    """SLK-02, SLK-03, SLK-04."""
    case = case_of(kind, k_slack=3, q_slack=3, causal=True)
    q, k, v = case.inputs()

    def run(value):
        boxes = []
        for x in (q, k, v):
            if isinstance(x, JaggedTensor):
                values = x.values().detach().clone()
                values[x.num_tokens :] = value
                x = x.with_values(values)
            boxes.append(x)
        call = Call.of(*boxes, causal=True)
        got = call.run("portable")
        call.check(got)
        return got

    assert_equal_bits(run(poison), run(0.0))


def test_slack_of_a_layout_whose_lengths_the_host_does_not_know():
    """As on a GPU, or in a CUDA graph: the number of tokens is on the device alone."""
    layout = JaggedLayout.with_capacity(4, max_tokens=50, max_length=30)
    for lengths in ((20, 0, 1, 9), (0, 0, 0, 0), (30, 20, 0, 0)):
        layout.copy_(offsets_of(lengths))
        k = make_jagged(lengths, 2, 16, dtype=torch.float32, slack=50 - sum(lengths)).values()
        keys = JaggedTensor(k, layout)
        for query in (torch.randn(5, 2, 16), torch.randn(4, 3, 2, 16), keys):
            call = Call.of(query, keys, keys.with_values(k * 0.5))
            with guarded_allocations():
                got = call.run("portable")
            call.check(got)


# -- strides -----------------------------------------------------------------------------------------------------------


def fused(x):
    larger = x.new_full((*x.shape[:-2], 3 * x.shape[-2], x.shape[-1]), math.nan)
    larger[..., x.shape[-2] : 2 * x.shape[-2], :] = x
    return larger[..., x.shape[-2] : 2 * x.shape[-2], :]


def every_other(x):
    larger = x.new_full((2 * x.shape[0], *x.shape[1:]), math.nan)
    larger[::2] = x
    return larger[::2]


def misaligned(x):
    flat = x.new_full((x.numel() + 1,), math.nan)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def odd_pitch(x):
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 9), math.nan)
    larger[..., : x.shape[-1]] = x
    return larger[..., : x.shape[-1]]


def columns_last(x):
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def heads_first(x):
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


HOWS = [fused, every_other, misaligned, odd_pitch, columns_last, heads_first]


@kinds
@pytest.mark.parametrize("how", HOWS, ids=lambda f: f.__name__)
def test_any_strides_read_the_same_numbers(how, kind):
    """STR-01, STR-02, STR-04, STR-05, STR-10."""
    call = Call.of_case(case_of(kind, dtype=torch.bfloat16))
    boxes = [x.with_values(how(x.values().detach())) if isinstance(x, JaggedTensor) else how(x.detach()) for x in
             (call.query, call.keys, call.values)]  # fmt: skip
    strided = Call(*boxes, call.options, how(call.grad_out), every_other(call.grad_lse))
    with guarded_allocations():
        got = strided.run("portable")
    assert_equal_bits(got, call.run("portable"))
    assert all(x.is_contiguous() for x in got)


@kinds
def test_expanded_gradients(kind):
    """STR-08: sum() gives a gradient whose strides are 0."""
    call = Call.of_case(case_of(kind))
    zero = call.grad_out.new_tensor(1.5)
    for expanded in (zero.expand(call.grad_out.shape), call.grad_out[:, :1].expand(call.grad_out.shape)):
        strided = Call(call.query, call.keys, call.values, {}, expanded, call.grad_lse).run("portable")
        dense = Call(call.query, call.keys, call.values, {}, expanded.contiguous(), call.grad_lse).run("portable")
        assert_equal_bits(strided, dense)


@kinds
def test_one_tensor_in_all_three_roles(kind):
    x = make_jagged((20, 0, 3), 2, 16, dtype=torch.float32, requires_grad=True)
    query = (
        x
        if kind is QueryKind.JAGGED
        else x.values()[:3]
        if kind is QueryKind.BROADCAST
        else x.values()[:9].unflatten(0, (3, 3))
    )
    grads = []
    for backend in ("portable", "reference"):
        out = packed(x.attend(query, backend=backend))
        grads.append(torch.autograd.grad(out.square().sum(), x.values())[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


# -- what is launched --------------------------------------------------------------------------------------------------

SUBSETS = [subset for subset in itertools.product([False, True], repeat=3) if any(subset)]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda s: "".join(n for n, on in zip("qkv", s, strict=True) if on))
@pytest.mark.parametrize(
    ("kind", "length", "dim"),
    [*((kind, 5, 16) for kind in KINDS), (QueryKind.BROADCAST, 140, 16), (QueryKind.BROADCAST, 40, 72)],
    ids=lambda x: getattr(x, "name", x),
)
def test_what_nobody_needs_is_not_computed(kind, length, dim, subset):
    """AUT-01: the others are as in a full run. A broadcast query comes whole, in two parts, or to two kernels."""
    boxes = AttentionCase(
        (20, 0, 3), query=kind, q_length=length, q_lengths=(9, 0, 2), heads=1, kv_heads=1, dim=dim, value_dim=16
    ).inputs()

    def run(needed):
        leaves = [packed(x).detach().requires_grad_(on) for x, on in zip(boxes, needed, strict=True)]
        q, k, v = (x.with_values(y) if isinstance(x, JaggedTensor) else y for x, y in zip(boxes, leaves, strict=True))
        with recorded_launches() as launches:
            packed(k.attend(q, v, backend="portable")).square().sum().backward()
        return [x.grad for x in leaves], launches

    grads, launches = run(subset)
    for mine, theirs, on in zip(grads, run((True, True, True))[0], subset, strict=True):
        assert (mine is not None) == on
        if on:
            torch.testing.assert_close(mine, theirs)
    names = [launch.name for launch in launches]
    if kind is QueryKind.BROADCAST and dim == 16:
        parts = [launch.args for launch in launches if launch.name == "broadcast_kernel"]
        assert [args[13] for args in parts] == list(range(-(-length // 128)))
        for args in parts:
            dk, dv, dq = args[5:8]
            assert tuple(x is not None for x in (dq, dk, dv)) == subset
    else:
        assert ("queries_kernel" in names) == subset[0]
        assert ("keys_kernel" in names) == (subset[1] or subset[2])
        for launch in launches:
            if launch.name == "keys_kernel":
                assert tuple(x is not None for x in launch.args[5:7]) == subset[1:]


@kinds
def test_a_gradient_of_lse_alone(kind):
    """AUT-04; and a gradient of NaN where a row sees nothing adds nothing."""
    case = case_of(kind, window=(3, 0))
    boxes = case.inputs()
    grads = []
    for backend in ("portable", "reference"):
        leaves = [packed(x) for x in boxes]
        _, lse = boxes[1].attend(boxes[0], boxes[2], **case.options, return_lse=True, backend=backend)
        weight = torch.where(lse == -math.inf, math.nan, torch.linspace(-1, 1, lse.numel()).view(lse.shape))
        assert weight.isnan().any()
        grads.append(torch.autograd.grad(lse, leaves[:2], weight))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@kinds
def test_no_launch_depends_on_lengths_but_for_its_grid(kind):
    """Constants, strides and options stay, so that nothing is compiled anew."""
    seen = set()
    for lengths in ((33, 0, 1, 20), (1, 2, 3, 4), (0, 0, 40, 0)):
        with recorded_launches() as launches:
            case = AttentionCase(lengths, query=kind, q_length=5, q_lengths=lengths, k_slack=1, dim=16, value_dim=16)
            case.run("portable", deterministic=True)
        for launch in launches:
            if launch.name in ("delta_kernel", "clear_kernel", "fill_kernel"):
                continue  # sizes that they do not specialise on
            args = list(launch.args)
            if launch.name == "forward_kernel":
                args.pop(10)  # nor on how many sequences may be empty
            seen.add((launch.name, describe(tuple(args)), tuple(sorted(launch.options.items()))))
    assert len(seen) == len({name for name, _, _ in seen})


def describe(x):
    if isinstance(x, torch.Tensor):
        return x.dtype
    return tuple(describe(y) for y in x) if isinstance(x, tuple) else x


# -- equal bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "length"),
    [*((kind, 5) for kind in KINDS), (QueryKind.BROADCAST, 140)],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_same_bits_every_time(kind, length):
    """DET-01: the gradient of a broadcast query too."""
    call = Call.of_case(case_of(kind, q_length=length, dtype=torch.bfloat16))
    assert_equal_bits(call.run("portable"), call.run("portable"))


@kinds
def test_a_sequence_sees_only_itself(kind):
    """ISO-01: another sequence changes in every value, and these are the same bits."""
    case = case_of(kind, causal=True)
    call = Call.of_case(case)
    changed = []
    for x in (call.query, call.keys, call.values):
        if isinstance(x, JaggedTensor):
            values = x.values().detach().clone()
            begin, end = x.offsets()[3:5].tolist()
            values[begin:end] = 100.0
            x = x.with_values(values)
        elif kind is QueryKind.PER_SEQUENCE:
            x = x.detach().clone()
            x[3] = 100.0
        changed.append(x)
    first, second = call.run("portable"), Call(*changed, call.options, call.grad_out, call.grad_lse).run("portable")
    rows, q_rows = slice(0, 21), slice(0, 22) if kind is QueryKind.JAGGED else slice(0, 3)
    for name in ("out", "lse", *(() if kind is QueryKind.BROADCAST else ("dq",))):
        assert torch.equal(getattr(first, name)[q_rows], getattr(second, name)[q_rows]), name
    for name in ("dk", "dv"):
        assert torch.equal(getattr(first, name)[rows], getattr(second, name)[rows]), name


@kinds
def test_the_place_in_the_batch_changes_no_bit(kind):
    """ISO-04: alone, first, last; the neighbours do not matter."""
    one = AttentionCase(
        (70,), query=kind, q_length=5, q_lengths=(20,), heads=2, kv_heads=2, dim=16, value_dim=16, seed=3
    )
    q, k, v = (packed(x).detach() for x in one.inputs())
    grad_out = torch.randn(*(q.shape if q.dim() == 3 and kind is QueryKind.JAGGED else (1, *q.shape[-3:])))
    results = []
    for before, after in ((), ()), ((17, 0), (1,)), ((1,), (5,)):
        k_lengths, place = (*before, 70, *after), len(before)

        def around(x, rows=1.0, before=before, after=after):
            pads = [torch.randn(int(sum(n) * rows), *x.shape[1:]) for n in (before, after)]
            return torch.cat((pads[0], x, pads[1]))

        keys = JaggedTensor(around(k), offsets_of(k_lengths))
        values = keys.with_values(around(v))
        if kind is QueryKind.JAGGED:
            query = JaggedTensor(around(q), offsets_of((*before, 20, *after)))
            do, rows = around(grad_out), slice(sum(before), sum(before) + 20)
        else:
            do = torch.randn(len(k_lengths), *grad_out.shape[1:])
            do[place] = grad_out[0]
            rows = slice(place, place + 1)
            query = q
            if kind is QueryKind.PER_SEQUENCE:
                query = torch.randn(len(k_lengths), *q.shape[1:])
                query[place] = q[0]
        call = Call.of(query, keys, values)
        got = Call(query, keys, values, {}, do, torch.zeros_like(call.grad_lse)).run("portable")
        kv_rows = slice(sum(before), sum(before) + 70)
        results.append((got.out[rows], got.lse[rows], got.dk[kv_rows], got.dv[kv_rows]))
    for other in results[1:]:
        assert_equal_bits(other, results[0], ("out", "lse", "dk", "dv"))


# -- numbers -----------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_key_gives_its_value_however_large_the_score(kind, dtype):
    """NUM-01, NUM-04, EMP-13."""
    size = 133120.0 if dtype != torch.float16 else 40.0
    case = AttentionCase(
        (1, 1, 0), query=kind, q_length=2, q_lengths=(1, 2, 1), heads=1, kv_heads=1, dtype=dtype, dim=64
    )
    q, k, v = case.inputs()
    for x in (q, k):
        packed(x).data.fill_(size)
    out, lse = k.attend(q, v, return_lse=True, backend="portable")
    out = packed(out)
    wanted = packed(k.attend(q, v, backend="reference"))
    assert torch.equal(out, wanted)
    assert not lse.isnan().any()
    for gradient in torch.autograd.grad(out.square().sum(), [packed(x) for x in (q, k, v)]):
        assert gradient.isfinite().all()


def test_a_row_whose_logits_are_all_far_below_zero():
    """NUM-02: no finite number stands for minus infinity."""
    level = -2.45e5
    k = torch.full((64, 1, 128), level / 128)
    k[0] = (level + 5000) / 128
    keys = JaggedTensor(k, offsets_of((64,)))
    values = keys.with_values(torch.randn(64, 1, 16))
    out, lse = keys.attend(torch.ones(1, 16, 128), values, scale=1.0, return_lse=True, backend="portable")
    torch.testing.assert_close(out, values.values()[0].expand(1, 1, 16, 16))
    torch.testing.assert_close(lse, torch.full((1, 16, 1), level + 5000), rtol=1e-6, atol=0)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_past_the_end_do_not_count_where_scores_are_far_below_zero(kind, dtype):
    """TAIL-06, TAIL-07: all logits are about -120, and exp(0 - lse) would overflow."""
    c = (120 * 8 / 64) ** 0.5
    for lengths in ((64, 1, 40), (130, 16, 65)):
        case = AttentionCase(
            lengths, query=kind, q_length=5, q_lengths=(64, 3, 17), heads=1, kv_heads=1, dim=64, dtype=dtype
        )
        call = Call.of_case(case)
        packed(call.query).data.fill_(c)
        call.keys.values().data.fill_(-c)
        got = call.run("portable")
        assert got.lse.max() < -100
        call.check(got)
        # Gradients so large that delta does not fit into fp16, but dS, where values are alike, does.
        call.values.values().data.fill_(4.0)
        call = Call(call.query, call.keys, call.values, {}, torch.full_like(call.grad_out, 1000.0), call.grad_lse)
        assert call.run("portable").dq.isfinite().all()


def test_fp32_is_fp32():
    """NUM-05."""
    case = AttentionCase(
        (128,), query=QueryKind.JAGGED, q_lengths=(128,), heads=1, kv_heads=1, dim=32, value_dim=32, causal=True
    )
    got, exact = case.run("portable"), case.exact()
    for mine, wanted in zip(got, exact, strict=True):
        assert (mine.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
