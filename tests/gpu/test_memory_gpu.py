"""Portable kernels on a GPU read and write what they should: slack, strides, places in memory."""

import itertools
import math
import os

import pytest
import torch
from torch import nn

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import offsets_of
from jaggedtensor.testing.bounds import Call, query_of
from jaggedtensor.testing.guards import embedded, guarded_allocations

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
NAMES = ("out", "lse", "dq", "dk", "dv")


def check(call):
    """Results are compared bit by bit here."""
    return call.checked(BACKEND, deterministic=True)


def assert_equal_bits(got, wanted):
    for mine, theirs, name in zip(got, wanted, NAMES, strict=True):
        assert torch.equal(mine, theirs), name


def remade(call, change):
    """The same call with other tensors in memory; `change` gets and gives packed values, and gradients."""

    def box(x):
        return x.with_values(change(x.values())) if isinstance(x, JaggedTensor) else change(x)

    return Call(box(call.query), box(call.keys), box(call.values), call.options, change(call.grad_out), call.grad_lse)


# -- slack -----------------------------------------------------------------------------------------------------------


def test_layers_before_attention_never_see_slack():
    """SLK-01: the gradient of their weights is that of trimmed input."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, 144, 432, 944], device="cuda")
    leaf = torch.randn(946, 64, device="cuda", dtype=torch.bfloat16)
    project = nn.Linear(64, 3 * 16 * 64, bias=False, device="cuda", dtype=torch.bfloat16)

    def weight_gradient(rows):
        project.zero_grad()
        values = project(leaf[:rows]).view(rows, 3, 16, 64)
        q, k, v = (JaggedTensor(values[:, i], offsets) for i in range(3))
        with guarded_allocations():
            out = k.attend(q, v, causal=True, backend=BACKEND).values()
            out[:944].float().square().sum().backward()
        assert not out[944:].any()
        return project.weight.grad.clone()

    with_slack = weight_gradient(946)
    assert with_slack.isfinite().all()
    trimmed = weight_gradient(944)
    assert (with_slack - trimmed).abs().max() <= 1e-2 * trimmed.abs().max()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@kinds
def test_what_is_in_slack_changes_no_bit(kind, poison):
    """SLK-02."""
    call = Call.random((21,), **query_of(kind, 5, (21,)), heads=(16, 1), dims=(128, 128), slack=3, causal=True)

    def filled(value):
        def change(x):
            x = x.clone()
            if x.shape[0] == 24:
                x[21:] = value
            return x

        return remade(call, change)

    assert_equal_bits(check(filled(poison)), check(filled(0.0)))


def test_rows_before_slack_are_those_of_trimmed_input():
    """SLK-03, SLK-04: also where one sequence is not the whole buffer."""
    for lengths, rows in (((100, 100), 256), ((900,), 1024)):
        for query in (17, lengths):
            slack = rows - sum(lengths)
            call = Call.random(lengths, query, slack=slack)
            trimmed = remade(call, lambda x, rows=rows, slack=slack: x[: rows - slack] if x.shape[0] == rows else x)
            if not isinstance(query, int):
                trimmed = Call(*list(vars(trimmed).values())[:5], call.grad_lse[: sum(lengths)])
            got, wanted = check(call), check(trimmed)
            for mine, theirs, name in zip(got, wanted, NAMES, strict=True):
                assert torch.equal(mine[: theirs.shape[0]], theirs), name


@pytest.mark.parametrize("offsets", [[3, 100, 200], [0, 200, 100], [0, 100, 300]], ids=str)
def test_malformed_offsets_are_refused(offsets):
    """SLK-03, SLK-06, EMP-01."""
    with pytest.raises(ValueError, match="offsets"):
        JaggedTensor(torch.zeros(256, 2, 64, device="cuda"), torch.tensor(offsets, device="cuda"))


def test_operands_that_do_not_fit_each_other_are_refused():
    """SLK-06: names the tensor."""
    keys = JaggedTensor(torch.zeros(20, 2, 64, device="cuda"), offsets_of((12, 8)).to("cuda"))
    other = JaggedTensor(torch.zeros(20, 2, 64, device="cuda"), offsets_of((10, 10)).to("cuda"))
    query = torch.zeros(4, 2, 64, device="cuda")
    with pytest.raises(ValueError, match="value must be on the layout of key"):
        keys.attend(query, other, backend=BACKEND)
    with pytest.raises(ValueError, match="rows of new_values"):
        keys.with_values(torch.zeros(10, 2, 64, device="cuda"))
    with pytest.raises(ValueError, match="must be on cuda"):
        keys.attend(query.cpu(), backend=BACKEND)


def test_a_declared_length_hides_no_token():
    """SLK-07."""
    offsets = offsets_of((1000, 2520, 1440)).to("cuda")
    with pytest.raises(ValueError, match="max_length"):
        JaggedLayout(offsets, max_length=1024)
    call = Call.random((1000, 2520, 1440), 9)
    layout = JaggedLayout(offsets, max_length=4096, validate=False)
    keys = JaggedTensor(call.keys.values(), layout)
    declared = Call(call.query, keys, keys.with_values(call.values.values()), {}, call.grad_out, call.grad_lse)
    assert_equal_bits(check(declared), check(call))


# -- strides ---------------------------------------------------------------------------------------------------------


def test_columns_of_one_fused_buffer():
    """STR-01: gradients go back into the right ones."""
    tokens = 93 + 117 + 128
    fused = torch.randn(tokens, 4, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layout = JaggedLayout(offsets_of((93, 117, 128)).to("cuda"))

    def gradients(split):
        q, k, v = (JaggedTensor(split(fused, i), layout) for i in range(3))
        out = k.attend(q, v, causal=True, backend=BACKEND).values()
        return torch.autograd.grad(out.float().square().sum(), fused)[0]

    got, wanted = gradients(lambda x, i: x[:, i]), gradients(lambda x, i: x[:, i].contiguous())
    assert torch.equal(got, wanted)
    assert not got[:, 3].any()


def every_other(x):
    larger = x.new_full((2 * x.shape[0], *x.shape[1:]), math.nan)
    larger[::2] = x
    return larger[::2]


def heads_first(x):
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def columns_last(x):
    return x.transpose(-2, -1).contiguous().transpose(-2, -1)


def odd_pitch(x):
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 9), math.nan)
    larger[..., : x.shape[-1]] = x
    return larger[..., : x.shape[-1]]


def padded_rows(x):
    larger = x.new_full((x.shape[0], x[0].numel() + 64), math.nan)
    larger[:, : x[0].numel()] = x.flatten(1)
    return larger[:, : x[0].numel()].view(x.shape)


@pytest.mark.parametrize(
    "how", [every_other, heads_first, columns_last, odd_pitch, padded_rows], ids=lambda f: f.__name__
)
def test_all_combinations_of_strides(how):
    """STR-02, STR-05, STR-10: each of q, k, v and the gradient strided or contiguous."""
    call = Call.random((300, 0, 77), (300, 4, 77), heads=(3, 3))
    wanted = check(call)
    for chosen in itertools.product([False, True], repeat=4):
        boxes = [
            x.with_values(how(x.values())) if on else x
            for x, on in zip((call.query, call.keys, call.values), chosen, strict=False)
        ]
        grad_out = how(call.grad_out) if chosen[3] else call.grad_out
        with guarded_allocations():
            got = Call(*boxes, {}, grad_out, call.grad_lse).run(BACKEND, deterministic=True)
        assert_equal_bits(got, wanted)


@pytest.mark.parametrize("shift", [1, 4, 8])
@kinds
def test_places_that_are_not_aligned(kind, shift):
    """STR-04: also of a single row."""

    def change(x):
        flat = x.new_full((x.numel() + shift,), math.nan)
        flat[shift:] = x.flatten()
        return flat[shift:].view(x.shape)

    for lengths in ((93, 0, 117), (1,)):
        call = Call.random(lengths, **query_of(kind, 5, lengths))
        assert_equal_bits(check(remade(call, change)), check(call))


@pytest.mark.parametrize("pitch", [64, 73, 80])
@pytest.mark.parametrize("heads", [1, 3])
def test_row_pitches_that_are_no_multiple_of_16_bytes(heads, pitch):
    """STR-05."""

    def change(x):
        larger = x.new_full((*x.shape[:-1], pitch), math.nan)
        larger[..., :64] = x
        return larger[..., :64]

    call = Call.random((130, 5), 40, heads=(heads, heads))
    assert_equal_bits(check(remade(call, change)), check(call))


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own parts, as versions go
def test_views_of_a_larger_leaf_compiled_and_not():
    """STR-07: called at full size first; the rest of the leaf gets exact zeros."""
    leaf = torch.randn(2, 428, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    query = torch.randn(8, 4, 64, device="cuda", dtype=torch.bfloat16)

    def run(k, v, offsets):
        keys = JaggedTensor(k, offsets)
        return keys.attend(query, keys.with_values(v), backend=BACKEND)

    torch._dynamo.reset()
    grads = []
    for call in (run, torch.compile(run, backend="aot_eager")):
        call(leaf[0], leaf[1], offsets_of((228, 0, 200)).to("cuda"))
        out = call(leaf[0, :-128], leaf[1, :-128], offsets_of((100, 0, 200)).to("cuda"))
        (grad,) = torch.autograd.grad(out.float().square().sum(), leaf)
        assert not grad[:, 300:].any()
        grads.append(grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("kind", [QueryKind.BROADCAST, QueryKind.JAGGED], ids=lambda kind: kind.name)
def test_gradients_without_strides(kind):
    """STR-08."""
    call = Call.random((5, 90), **query_of(kind, 3, (5, 9)), dims=(8, 8), causal=True)
    for grad_out in (
        call.grad_out.new_tensor(0.5).expand(call.grad_out.shape),
        call.grad_out[:1].expand_as(call.grad_out),
    ):
        expanded = Call(call.query, call.keys, call.values, call.options, grad_out, call.grad_lse)
        dense = Call(call.query, call.keys, call.values, call.options, grad_out.contiguous(), call.grad_lse)
        assert_equal_bits(expanded.run(BACKEND, deterministic=True), check(dense))


def test_inputs_between_poison():
    """No row beside the tensors is read into a result."""
    for query in (70, (130, 3, 1)):
        call = Call.random((129, 1, 64), query, dims=(72, 40), window=(20, 7))
        assert_equal_bits(check(remade(call, embedded)), check(call))


def test_offsets_of_either_width_and_both():
    """OFS-06."""
    results = []
    for mine, theirs in itertools.product([torch.int32, torch.int64], repeat=2):
        call = Call.random((70, 0, 33), (5, 9, 64), offsets_dtype=theirs, causal=True)
        query = JaggedTensor(call.query.values(), call.query.offsets().to(mine))
        other = Call(query, call.keys, call.values, call.options, call.grad_out, call.grad_lse)
        results.append(other.run(BACKEND, deterministic=True))
    for other in results[1:]:
        assert_equal_bits(other, results[0])
