"""Portable kernels on a GPU past the limits of 32 bits and of grids: each result within its bound of float64, of all
sequences or of a sample with the last ones."""

import os

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor
from jaggedtensor.testing import offsets_of
from jaggedtensor.testing.bounds import Call
from jaggedtensor.testing.guards import poison_free_memory

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
GIB = 1 << 30
HERE = torch.cuda.get_device_properties(0).total_memory if torch.version.cuda and torch.cuda.is_available() else 0


def memory(gibibytes):
    return pytest.mark.skipif(gibibytes * GIB > HERE, reason=f"needs a GPU of {gibibytes} GiB")


def sample(batch):
    """Some sequences and the last of all."""
    return sorted({0, 1, batch // 2, batch - 2, batch - 1})


@pytest.mark.parametrize("batch", [12_288, 15_000])
def test_many_short_sequences(batch):
    """OVF-02: per-sequence padded scratch would pass 2^31."""
    lengths = (torch.arange(batch) * 37 % 57 + 8).tolist()
    for query in (16, lengths):
        call = Call.random(lengths, query, heads=(16, 16), dims=(128, 128), dtype=torch.float16)
        call.check(call.run(BACKEND), sample(batch))


@memory(60)
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("batch", [399, 400])
def test_queries_times_rounded_dimensions(batch, dim):
    """OVF-03: batch x heads x rounded length x dimension on both sides of 2^31."""
    call = Call.random([128] * batch, [10_496] * batch, heads=(4, 4), dims=(dim, dim))
    call.check(call.run(BACKEND), [0, batch - 1])


@memory(60)
@pytest.mark.parametrize("sequences", [511, 512, 513])
def test_offsets_times_strides(sequences):
    """OVF-05: 2^31 elements of the query at 512; int32 offsets give the bits of int64 ones."""
    call = Call.random([64] * sequences, [512] * sequences, heads=(32, 2), dims=(256, 256), offsets_dtype=torch.int32)
    got = call.run(BACKEND)
    call.check(got, [0, sequences - 1])
    wide = [JaggedTensor(x.values(), x.offsets().to(torch.int64)) for x in (call.query, call.keys)]
    values = wide[1].with_values(call.values.values())
    again = Call(wide[0], wide[1], values, {}, call.grad_out, call.grad_lse).run(BACKEND)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, got, strict=True))


@memory(60)
def test_keys_past_two_to_the_31():
    """Rows of keys, and of their gradients, of a shared query."""
    batch, length = 1100, 2000
    call = Call.random([length] * batch, 32, heads=(8, 8), dims=(128, 128))
    assert call.keys.values().numel() > 2**31
    call.check(call.run(BACKEND), [0, batch - 1])


@memory(30)
def test_padding_past_two_to_the_31():
    """OVF-06."""
    batch, longest = 1024, 2100
    lengths = torch.full((batch,), 1000)
    lengths[-1] = longest
    values = torch.randn(int(lengths.sum()), 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    batch_of = JaggedTensor.from_lengths(values, lengths.to("cuda"))
    padded = batch_of.to_padded(fill=7)
    assert padded.numel() > 2**31
    assert torch.equal(padded[-1], values[-longest:])
    assert torch.equal(padded[-2, :1000], values[-longest - 1000 : -longest])
    assert (padded[-2, 1000:] == 7).all()
    (padded[-1].float().square().sum() / 2).backward()
    assert torch.equal(values.grad[-longest:], values[-longest:])
    assert not values.grad[:-longest].any()


def test_lengths_past_two_to_the_31():
    """OVF-08: offsets are summed in int64; a negative length is refused."""
    lengths = torch.tensor([1 << 30] * 3, dtype=torch.int32, device="cuda")
    assert JaggedLayout.from_lengths(lengths).num_tokens == 3 << 30
    with pytest.raises(ValueError, match="lengths must be at least 0"):
        JaggedLayout.from_lengths(torch.tensor([3, -5], device="cuda"))


def test_more_sequences_than_an_axis_of_a_grid_has():
    """OVF-09."""
    call = Call.random([16] * 80_000, 8, heads=(4, 4))
    call.check(call.run(BACKEND), sample(80_000))
    call = Call.random([16] * 80_000, [16] * 80_000, heads=(4, 4), causal=True)
    call.check(call.run(BACKEND), sample(80_000))


@pytest.mark.parametrize("batch", [65_535, 65_536, 65_537])
def test_every_sequence_is_written(batch):
    """OVF-11: what is not written is NaN."""
    for query in (2, [2] * batch):
        call = Call.random([2] * batch, query, heads=(1, 1), dims=(16, 16))
        poison_free_memory(1 << 27, "cuda")
        got = call.run(BACKEND)
        for result in got:
            assert result.isfinite().all()
        call.check(got, sample(batch))


@pytest.mark.alone
def test_time_grows_with_the_number_of_sequences_alone():
    """OVF-12: of short ones. Work of the square of their number would take 16 times as long for each."""

    def milliseconds(batch):
        call = Call.random([34] * batch, [34] * batch, heads=(12, 12), dims=(128, 128))
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call.run(BACKEND)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times[1:])

    assert milliseconds(8192) < 16 * 3 * milliseconds(512)


def test_long_sequences():
    """More keys than a block of any size; and one program's sums of 16-bit products stay in 32 bits."""
    call = Call.random((100_000, 0, 1), 64, heads=(1, 1), dims=(64, 64))
    call.check(call.run(BACKEND))


def test_same_signs_over_a_large_batch():
    """The gradient of a shared query is a sum of many terms of one sign: accumulated in fp32, rounded once.

    The gradient of lse gives the sign: of grad_out alone the terms of a sequence cancel, and what is left is known no
    better than delta, which is computed from out in bf16.
    """
    call = Call.random([256] * 4096, 16, heads=(2, 2))
    for x in (call.keys.values(), call.values.values(), call.grad_out, call.grad_lse):
        x.abs_()
    got = call.run(BACKEND)
    q, k, v = call.query.double(), *(x.values().view(4096, 256, 2, 64).double() for x in (call.keys, call.values))
    score = torch.einsum("ihd,bjhd->bhij", q, k) / 8
    p = score.softmax(-1)
    dp = torch.einsum("bihd,bjhd->bhij", call.grad_out.double(), v)
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    delta = (out * call.grad_out.double()).sum(-1).transpose(1, 2) - call.grad_lse.double()
    ds = p * (dp - delta[..., None])
    dq = torch.einsum("bhij,bjhd->ihd", ds, k) / 8
    error = (got.dq.double() - dq).abs().max() / dq.abs().max()
    assert error < 2**-8, f"relative error {error:.2g}"


def test_empty_sequences_of_a_large_result_are_filled():
    """The kernel that fills them serves results too large to write twice."""
    lengths = [0 if i % 3 else 64 for i in range(6000)]
    call = Call.random(lengths, 64, heads=(4, 4))
    poison_free_memory(1 << 29, "cuda")
    got = call.run(BACKEND)
    empty = torch.tensor([not n for n in lengths], device="cuda")
    assert not got.out[empty].any()
    assert (got.lse[empty] == -torch.inf).all()
    call.check(got, [0, 1, 2, 5997, 5999])


def test_offsets_are_checked_against_their_rows():
    assert offsets_of((3, 4)).tolist() == [0, 3, 7]
    with pytest.raises(ValueError, match=r"offsets\[-1\]"):
        JaggedTensor(torch.zeros(2045, 1, 8, device="cuda"), offsets_of((0, 1, 2045)).to("cuda"))
