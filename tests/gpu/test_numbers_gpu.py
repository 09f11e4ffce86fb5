"""Portable kernels on a GPU: extreme numbers, equal bits, one configuration at a time."""

import os
import subprocess
import sys

import pytest
import torch

from jaggedtensor import JaggedTensor
from jaggedtensor.problem import QueryKind
from jaggedtensor.testing import offsets_of
from jaggedtensor.testing.bounds import Call, query_of
from jaggedtensor.testing.guards import poison_free_memory

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
portable_only = pytest.mark.skipif(BACKEND != "portable", reason="asks the portable kernels for their blocks")
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def check(call, **options):
    return call.checked(BACKEND, **options)


def same_bits(first, second):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def constant(call, q, k):
    query = call.query.values() if isinstance(call.query, JaggedTensor) else call.query
    query.fill_(q)
    call.keys.values().fill_(k)
    return call


# -- extreme numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 64])
@kinds
def test_one_key_gives_its_value_whatever_the_score(kind, dim):
    """NUM-01: x * scale is not kept exact beside a rounded maximum."""
    call = constant(Call.random((1, 1), **query_of(kind, 1, (1, 2)), heads=(1, 1), dims=(dim, dim)), 133120.0, 133120.0)
    call.values.values().fill_(133120.0)
    got = call.run(BACKEND)
    assert (got.out == 133120.0).all()
    assert all(x.isfinite().all() for x in got)


def test_no_finite_number_stands_for_minus_infinity():
    """NUM-02."""
    level = -2.45e5
    call = constant(
        Call.random((64,), 4, heads=(16, 1), dims=(128, 128), dtype=torch.float32, scale=1.0), 1.0, level / 128
    )
    call.keys.values()[0] = (level + 5000) / 128
    got = call.run(BACKEND)
    torch.testing.assert_close(got.out, call.values.values()[0].expand_as(got.out), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.lse, torch.full_like(got.lse, level + 5000), rtol=1e-6, atol=0)
    one = constant(Call.random((1, 0), (3, 1), heads=(6, 2), causal=True), 8.0, -4000.0)
    got = one.run(BACKEND)
    assert torch.equal(got.out[2], one.values.values()[0].repeat_interleave(3, 0))
    assert (got.lse[2] < -1e4).all()


@kinds
def test_scores_past_the_range_of_half_precision(kind):
    """NUM-04."""
    call = Call.random((7, 300), **query_of(kind, 7, (7, 300)), dims=(128, 128), dtype=torch.float16)
    got = check(constant(call, 40.0, 40.0))
    assert all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("dims", [(32, 32), (128, 64)], ids=str)
@kinds
def test_fp32_is_fp32(kind, dims):
    """NUM-05: the bounds are those of fp32 products."""
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    lengths = (128, 0, 70)
    check(
        Call.random(lengths, **query_of(kind, 40, lengths), heads=(1, 1), dims=dims, dtype=torch.float32, causal=True)
    )


@portable_only
def test_tf32_is_used_where_torch_allows_it():
    """NUM-05, through either of torch's interfaces."""
    call = Call.random((300,), 40, heads=(1, 1), dtype=torch.float32)
    exact = call.run(BACKEND).out
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        rounded = call.run(BACKEND).out
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert 1e-5 < (exact - rounded).abs().max() < 1e-2


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@kinds
def test_scales_of_any_sign(kind, scale):
    lengths = (300, 0, 33)
    check(Call.random(lengths, **query_of(kind, 20, lengths), scale=scale))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_large_logits(kind, dtype):
    """Softmax is nearly one-hot."""
    lengths = (129, 0, 64, 300)
    call = Call.random(lengths, **query_of(kind, 33, lengths), dtype=dtype)
    query = call.query.values() if kind is QueryKind.JAGGED else call.query
    query.mul_(6)
    call.keys.values().mul_(6)
    check(call)


# -- equal bits ------------------------------------------------------------------------------------------------------


def test_gradient_of_a_shared_query_over_thousands_of_sequences():
    """DET-01: no atomics, the same bits each time."""
    lengths = (torch.arange(4096) * 7919 % 200 + 1).tolist()
    call = Call.random(lengths, 32, heads=(8, 8), dims=(128, 128))
    first = call.run(BACKEND)
    assert all(same_bits(call.run(BACKEND), first) for _ in range(9))


def test_gradients_of_long_jagged_queries():
    """DET-01."""
    call = Call.random((8192,), (8192,), dims=(128, 128), causal=True)
    first = check(call, deterministic=True)
    assert all(same_bits(call.run(BACKEND, deterministic=True), first) for _ in range(9))


def test_nothing_uninitialised_is_read():
    """DET-03: memory between steps is NaN."""
    call = Call.random([4] * 20, [4] * 20, heads=(4, 4), dims=(32, 32))
    pooled = Call.random([4] * 20, 4, heads=(4, 4), dims=(32, 32))
    firsts = [check(call, deterministic=True), check(pooled, deterministic=True)]
    for step in range(1000):
        if step % 50 == 0:
            poison_free_memory(1 << 22, "cuda")
        for one, first in zip((call, pooled), firsts, strict=True):
            assert same_bits(one.run(BACKEND, deterministic=True), first)


def test_repeats_of_a_backward_pass_with_large_numbers():
    """DET-04."""
    call = Call.random([128] * 300, [2048] * 300, heads=(1, 1), dims=(128, 128), dtype=torch.float16)
    call.query.values().mul_(3)
    call.keys.values().mul_(3)
    first = call.run(BACKEND, deterministic=True)
    call.check(first, [0, 150, 299])
    assert all(same_bits(call.run(BACKEND, deterministic=True), first) for _ in range(25))


def test_random_numbers_of_the_caller_stay_as_they_were():
    before = torch.cuda.get_rng_state()
    Call.random((40, 0, 3), 5).run(BACKEND)
    assert torch.equal(before, torch.cuda.get_rng_state())


# -- configurations --------------------------------------------------------------------------------------------------


def test_the_first_call_of_a_process_gives_what_later_ones_do():
    """TUN-01: nothing is tuned at a user's first call."""
    code = f"""
import torch
from jaggedtensor.testing.bounds import Call, query_of
for lengths, query in (((300, 0, 5), 20), ((64,), (64,)), ((1, 1), 1), ((129, 7), 200), ((500,), (3,))):
    call = Call.random(lengths, query)
    first = call.run({BACKEND!r})
    call.check(first)
    assert all(torch.equal(a, b) for a, b in zip(call.run({BACKEND!r}), first))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


TILES = [(m, n, warps, stages) for m, n in ((16, 16), (32, 64), (64, 32)) for warps in (4, 8) for stages in (1, 2, 3)]


@portable_only
@pytest.mark.parametrize(("m", "n", "warps", "stages"), TILES, ids=str)
def test_each_configuration_alone(m, n, warps, stages, monkeypatch):
    """TUN-02, TUN-05, DET-04: whatever the blocks, warps and stages; memory is NaN, so nobody fills in for another."""
    from dataclasses import replace

    from jaggedtensor.kernels.portable import tiling, variants
    from jaggedtensor.kernels.portable.attention_bwd import config as backward
    from jaggedtensor.kernels.portable.attention_bwd import launch as backward_launch
    from jaggedtensor.kernels.portable.attention_fwd import config as forward
    from jaggedtensor.kernels.portable.attention_fwd import launch as forward_launch

    original = tiling.tiling_of

    def forced(problem, blocks, bytes_of):
        made = original(problem, blocks, bytes_of)
        return replace(made, block_m=m, block_n=n, num_warps=warps, num_stages=stages)

    # What is kept for a problem, whose blocks are otherwise always the same.
    forget = (forward_launch._CALLS.clear, variants._COMPILED.clear, backward_launch.config_of.cache_clear)
    for config in (forward, backward):
        monkeypatch.setattr(config, "tiling_of", forced)
    for clear in forget:
        clear()
    try:
        for query in (m, (300, 1, 77)):
            check(Call.random((300, 1, 77), query, heads=(1, 1)))
    finally:
        monkeypatch.undo()
        for clear in forget:
            clear()


def test_offsets_on_the_device_alone_give_the_same():
    """A layout that was never validated: the host does not know a length."""
    call = Call.random((300, 0, 65), 20, slack=3)
    offsets = offsets_of((300, 0, 65)).to("cuda")
    keys = JaggedTensor(call.keys.values(), offsets, validate=False)
    blind = Call(call.query, keys, keys.with_values(call.values.values()), {}, call.grad_out, call.grad_lse)
    assert same_bits(check(blind), check(call))
