"""Attention in 8 bits: what a helper makes of values, and what attention makes of those, against float64."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jaggedtensor import JaggedTensor, attend, attend_fp8, dequantize_fp8, quantize_fp8
from jaggedtensor.kernels import dispatch
from jaggedtensor.ops.fp8 import choose_fp8
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

E4M3 = torch.float8_e4m3fn


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(lengths, *feature, seed=1):
    return JaggedTensor.from_lengths(normal(sum(lengths), *feature, seed=seed), torch.tensor(lengths))


def operands(query="broadcast"):
    keys = batch((5, 0, 130, 1), 2, 16)
    queries = {
        "broadcast": normal(3, 4, 16),
        "per sequence": normal(4, 3, 4, 16),
        "jagged": batch((2, 3, 140, 1), 4, 16, seed=2),
    }
    return queries[query], keys, batch((5, 0, 130, 1), 2, 24, seed=3)


@pytest.mark.parametrize(("per", "shape"), [("head", (2,)), ("tensor", ())])
def test_elements_lose_at_most_a_sixteenth_of_themselves(per, shape):
    x = normal(1000, 2, 16) * torch.tensor([1.0, 300.0])[:, None]
    x8, scale = quantize_fp8(x, per)
    assert x8.dtype == E4M3
    assert scale.dtype == torch.float32
    assert scale.shape == shape
    assert (torch.frexp(scale)[0] == 0.5).all()  # powers of two
    largest = x8.float().abs().amax((0, 2) if shape else None)
    assert ((largest > 224) & (largest <= 448)).all()
    error, size = (dequantize_fp8(x8, scale) - x).abs(), x.abs()
    fits = size > 2.0**-13 * size.amax((0, 2), keepdim=True) if shape else size > 2.0**-13 * size.max()
    assert fits.float().mean() > 0.9
    assert (error <= size / 16)[fits].all()
    assert torch.equal(dequantize_fp8(x8, scale, torch.bfloat16).double(), dequantize_fp8(x8, scale, torch.float64))


def test_a_scale_for_each_head_keeps_small_heads_beside_a_large_one():
    x = normal(500, 2, 16) * torch.tensor([1.0, 1e6])[:, None]
    errors = {}
    for per in ("head", "tensor"):
        errors[per] = (dequantize_fp8(*quantize_fp8(x, per)) - x)[:, 0].norm() / x[:, 0].norm()
    assert errors["head"] < 0.03
    assert errors["tensor"] == 1  # nothing is left


def test_zeros_nan_infinity_and_nothing_at_all_have_scales():
    x8, scale = quantize_fp8(torch.zeros(3, 2, 4))
    assert (scale == 1).all()
    assert (x8.float() == 0).all()
    x = torch.tensor([[[1.0, math.nan]], [[448.0, -2.0]]])
    x8, scale = quantize_fp8(x)
    assert scale == 1
    torch.testing.assert_close(x8.float(), x, rtol=0, atol=0, equal_nan=True)
    assert quantize_fp8(torch.tensor([[449.0]]))[1] == 2
    assert quantize_fp8(torch.tensor([[math.inf, -1.0]]))[0].float()[0, 0] == 448
    x8, scale = quantize_fp8(torch.zeros(0, 2, 4))
    assert x8.shape == (0, 2, 4)
    assert scale.tolist() == [1, 1]


def test_slack_has_no_part_in_a_scale():
    values = torch.cat([normal(8, 2, 4), torch.full((3, 2, 4), 1e30), torch.full((1, 2, 4), math.nan)])
    keys = JaggedTensor(values, torch.tensor([0, 5, 5, 8]))
    assert torch.equal(quantize_fp8(keys)[1], quantize_fp8(values[:8])[1])
    assert torch.equal(quantize_fp8(keys)[0].values()[:8].float(), quantize_fp8(values[:8])[0].float())
    assert quantize_fp8(keys)[0].layout is keys.layout


@pytest.mark.parametrize("query", ["broadcast", "per sequence", "jagged"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 3)}, {"scale": -0.3}], ids=str)
def test_attention_is_that_of_the_dequantised_values(query, options):
    by = [quantize_fp8(x) for x in operands(query)]
    scales = [scale for _, scale in by]
    wide = [dequantize_fp8(x8, scale, torch.float64) for x8, scale in by]
    wanted, wanted_lse = attend(*wide, return_lse=True, **options)
    for backend in (None, "cpu", "reference"):
        got, lse = attend_fp8(
            *(x8 for x8, _ in by), scales=scales, return_lse=True, backend=backend, out_dtype=torch.float16, **options
        )
        assert lse.dtype == torch.float32
        got, exact = (x.values() if isinstance(x, JaggedTensor) else x for x in (got, wanted))
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_how_far_it_is_from_attention_of_the_values_themselves():
    """5 % on normal values, of which half is that of a weighted sum; a wrong scale is far beyond."""
    query, keys, values = operands("jagged")
    exact = attend(*(x.map_values(torch.Tensor.double) for x in (query, keys, values))).values()
    by = [quantize_fp8(x) for x in (query, keys, values)]
    error = attend_fp8(*(x for x, _ in by), scales=[s for _, s in by]).values().double() - exact
    assert error.norm() < 0.07 * exact.norm()
    wrong = attend_fp8(*(x for x, _ in by), scales=[by[0][1], by[1][1], 2 * by[2][1]]).values().double() - exact
    assert wrong.norm() > 0.5 * exact.norm()


def test_values_may_be_the_keys_and_heads_left_out():
    keys, query = batch((5, 0, 3), 16), normal(4, 16)
    (q8, q_scale), (k8, k_scale) = quantize_fp8(query), quantize_fp8(keys)
    assert q_scale.shape == k_scale.shape == ()
    got = attend_fp8(q8, k8, scales=(q_scale, k_scale))
    wanted = attend(dequantize_fp8(q8, q_scale), dequantize_fp8(k8, k_scale))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted.to(torch.bfloat16))
    assert (got[1] == 0).all()


def test_a_gradient_is_refused_before_anything_is_computed():
    query, keys, _ = operands()
    q8, q_scale = quantize_fp8(query.requires_grad_())
    k8, k_scale = quantize_fp8(keys)
    assert q8.requires_grad  # nothing is lost on the way
    with pytest.raises(NotImplementedError, match=r"forward only.*under torch\.no_grad\(\), or use attend"):
        attend_fp8(q8, k8, scales=(q_scale, k_scale))
    with torch.no_grad():
        assert not attend_fp8(q8, k8, scales=(q_scale, k_scale)).requires_grad


def test_refusals_name_what_is_wrong():
    query, keys, _ = operands()
    (q8, q_scale), (k8, k_scale) = quantize_fp8(query), quantize_fp8(keys)
    call = partial(attend_fp8, q8, k8, scales=(q_scale, k_scale))
    with pytest.raises(TypeError, match=r"use attend_fp8$"):
        attend(q8, k8)
    with pytest.raises(TypeError, match=r"query must be of float8_e4m3fn, got float32.*use quantize_fp8"):
        attend_fp8(query, k8, scales=(q_scale, k_scale))
    with pytest.raises(TypeError, match="key must be a JaggedTensor"):
        attend_fp8(q8, k8.values(), scales=(q_scale, k_scale))
    with pytest.raises(ValueError, match=r"the scale of key must be of shape \[2\] \(its heads\) or \[\]"):
        attend_fp8(q8, k8, scales=(q_scale, q_scale))
    with pytest.raises(TypeError, match="the scale of query must be of fp32"):
        attend_fp8(q8, k8, scales=(q_scale.double(), k_scale))
    with pytest.raises(ValueError, match=r"scales must be of query, key and value .* got 4 of them"):
        attend_fp8(q8, k8, k8, scales=(q_scale, k_scale, k_scale, k_scale))
    with pytest.raises(TypeError, match="out_dtype must be bf16 or fp16"):
        call(out_dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="blackwell: runs on cuda, not on cpu"):
        call(backend="blackwell")
    with pytest.raises(ValueError, match="per must be 'head' or 'tensor', got 'row'"):
        quantize_fp8(query, "row")
    with pytest.raises(TypeError, match="quantised already"):
        quantize_fp8(q8)
    with pytest.raises(TypeError, match="floating point"):
        quantize_fp8(torch.ones(2, 2, dtype=torch.int32))


def test_who_serves_8_bits(monkeypatch):
    problem = AttentionProblem(QueryKind.BROADCAST, 128, 4, 4, 128, 128, E4M3, Device("cuda", (10, 0), 148, 227 << 10))
    choice, whole = choose_fp8(problem, "portable")
    assert not whole
    assert choice.implementation.name == "portable"
    choice, whole = choose_fp8(problem)  # never examined here
    assert not whole
    assert choice.implementation.name == "portable"
    (why,) = choice.passed_over["blackwell in 8 bits"]
    assert why == "has not passed python -m jaggedtensor.doctor on such a GPU here"
    choice, whole = choose_fp8(problem, "blackwell")
    assert whole
    assert choice.implementation.name == "blackwell"
    monkeypatch.setattr("jaggedtensor.kernels.dispatch._has_passed", lambda name, arch: True)
    choice, whole = choose_fp8(problem)
    assert whole
    assert choice.implementation.name == "blackwell"
    assert choice.passed_over["hopper"] == [
        "needs compute capability 9.x, not 10.0",
        "does not compute in torch.float8_e4m3fn",
    ]
    choice, whole = choose_fp8(replace(problem, head_dim=72))
    assert not whole
    assert choice.implementation.name == "blackwell"  # in bf16
    assert "multiples of 16), not 72 and 128" in choice.passed_over["blackwell in 8 bits"][0]
    with pytest.raises(NotImplementedError, match=r"multiples of 16\), not 72 and 128"):
        choose_fp8(replace(problem, head_dim=72), "blackwell")


def test_explain_says_who_takes_8_bits_and_who_dequantises():
    query, keys, _ = operands()
    (q8, _), (k8, _) = quantize_fp8(query), quantize_fp8(keys)
    told = str(k8.explain(q8, device="h200"))
    assert "bfloat16" in told
    assert "hopper (passed over:" in told
    assert "blackwell in 8 bits needs compute capability 10.x, not 9.0" in told
    told = str(k8.explain(q8, device="b200", backend="blackwell"))
    assert "float8_e4m3fn" in told
    assert "none: in 8 bits there is no gradient" in told
    assert "float32" in str(k8.explain(q8))


class Twice(torch.nn.Module):
    """Attention in 8 bits with something before and after it."""

    def __init__(self, backend=None):
        super().__init__()
        self.backend = backend

    def forward(self, query, values, offsets):
        keys = JaggedTensor(values, offsets)
        (q8, q_scale), (k8, k_scale) = quantize_fp8(query), quantize_fp8(keys)
        return attend_fp8(q8, k8, scales=(q_scale, k_scale), causal=True, backend=self.backend).float() * 2


def compiled_and_eager(module, lengths, **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(module, backend=counter, **options)
    for some in lengths:
        query, keys = normal(3, 4, 16), batch(some, 2, 16)
        with torch.no_grad():
            inputs = (query, keys.values(), keys.offsets())
            assert torch.equal(run(*inputs), module(*inputs))
    torch._dynamo.reset()
    return counter


def test_where_operands_are_dequantised_it_compiles_whole():
    counter = compiled_and_eager(Twice(), ((5, 0, 130, 1), (3, 9), (0, 2, 2, 4), (1, 1)), fullgraph=True)
    assert counter.frame_count <= 2  # the second for any batch


@pytest.fixture
def on_b200(monkeypatch):
    """Where a kernel takes 8 bits, here one that does the same slowly; the list gets what it was called with."""
    calls = []

    def forward(args, quantised):
        assert not torch.compiler.is_compiling()
        calls.append(args)
        q, k, v = (dequantize_fp8(x, s) for x, s in zip((args.q, args.k, args.v), quantised[:3], strict=True))
        window = dict(left=args.problem.left, right=args.problem.right)
        out, lse = attend_reference(q, k, v, args.q_offsets, args.k_offsets, scale=args.scale, **window)
        return out.to(quantised.out_dtype).contiguous(), lse.contiguous()

    b200 = Device("cuda", (10, 0), 148, 227 << 10)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: b200))
    monkeypatch.setattr("jaggedtensor.problem._PROBLEMS", {})
    monkeypatch.setitem(dispatch._LAUNCHERS, "blackwell", SimpleNamespace(forward=forward))
    return calls


def test_a_kernel_of_8_bits_is_an_operator_of_the_graph(on_b200):
    batches = ((5, 0, 130, 1), (3, 9), (0, 2, 2, 4), (1, 1))
    counter = compiled_and_eager(Twice("blackwell"), batches, fullgraph=True)
    assert len(on_b200) == 2 * len(batches)  # once as it is, once compiled
    assert all(args.schedule for args in on_b200)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("query", ["broadcast", "per sequence", "jagged"])
def test_the_operator_of_8_bits_keeps_its_promises(query, out_dtype, on_b200):
    by = [quantize_fp8(x) for x in operands(query)]
    (q, k, v), scales = (x.values() if isinstance(x, JaggedTensor) else x for x, _ in by), [s for _, s in by]
    q_offsets = by[0][0].offsets() if query == "jagged" else None
    half, options = out_dtype == torch.float16, ([], 0.25, -1, 0, "blackwell")
    arguments = (q, k, v, *scales, q_offsets, by[1][0].offsets(), None, *options, half, False, False)
    operator = torch.ops.jaggedtensor.attend_fp8.default
    assert operator(*arguments)[0].dtype == out_dtype
    tested = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # not sums of e4m3
    torch.library.opcheck(operator, arguments, test_utils=tested)
