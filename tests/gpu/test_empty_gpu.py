"""Portable kernels on a GPU: empty and single-token sequences, in every place and number."""

import os
import random

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing.bounds import Call, query_of

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def check(call, **options):
    return call.checked(BACKEND, **options)


def test_first_sequences_without_queries():
    """EMP-01."""
    got = check(Call.random((0, 1, 2045), (0, 0, 1023), heads=(32, 32), dims=(128, 128)))
    assert not got.dk[0].any()
    assert not got.dv[0].any()


def test_queries_empty_at_both_ends_of_a_wide_head():
    """EMP-02."""
    got = check(Call.random((2538, 1742, 840, 3072), (0, 1208, 840, 0), heads=(4, 1), dims=(256, 256)))
    for gradient in (got.dk, got.dv):
        assert not gradient[:2538].any()
        assert not gradient[5120:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("query", [128, (4, 0, 7)], ids=["broadcast", "jagged"])
def test_no_keys_at_all(query, causal):
    """EMP-04."""
    got = check(Call.random((0, 0, 0), query, heads=(8, 8), causal=causal))
    assert not got.out.any()
    assert (got.lse == -torch.inf).all()
    assert not got.dq.any()


@pytest.mark.parametrize(
    ("k_lengths", "query"),
    [((), 4), ((), ()), ((3952,), 0), ((3, 0, 9), (0, 0, 0))],
    ids=["no sequences", "no sequences, jagged", "a query of no rows", "jagged queries all empty"],
)
def test_no_sequences_or_no_queries(k_lengths, query):
    """EMP-05."""
    check(Call.random(k_lengths, query, heads=(10, 10), dtype=torch.float16))


@pytest.mark.parametrize("dim", [128, 192])
def test_keyless_sequences_among_others_in_any_order(dim):
    """EMP-07: the same bits each of 50 times."""
    draw = random.Random(0)
    lengths = [draw.choice([0, 1, 127, 128, 129, 1024]) for _ in range(256)]
    for query in (64, [draw.choice([0, 1, 64, 65]) for _ in lengths]):
        call = Call.random(lengths, query, dims=(dim, dim))
        first = check(call, deterministic=True)
        for _ in range(50):
            again = call.run(BACKEND, deterministic=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))


@kinds
def test_fewer_blocks_than_workers(kind):
    """EMP-08: whole heads for most programs, and nothing for many."""
    for lengths in ((1, 4096), (129, 0, 1), (1,), (0, 1, 0)):
        check(Call.random(lengths, heads=(4, 4), **query_of(kind, 17, [7] * len(lengths))))


def test_nothing_past_the_last_offset_is_read():
    """EMP-12: offsets end where poison begins."""
    for lengths in ((129, 0, 1, 130), (1, 1, 1, 1)):
        call = Call.random(lengths, 70, heads=(56, 56))
        wanted = check(call)
        poisoned = torch.full((len(lengths) + 1 + 64,), 0x7F7F7F7F, dtype=torch.int64, device="cuda")
        poisoned[: len(lengths) + 1] = call.keys.offsets()
        keys = type(call.keys)(call.keys.values(), poisoned[: len(lengths) + 1])
        other = Call(call.query, keys, keys.with_values(call.values.values()), {}, call.grad_out, call.grad_lse)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(check(other), wanted, strict=True))


def test_one_token_in_one_sequence():
    """EMP-13: no axis is lost, and the only key's value comes out."""
    call = Call.random((1,), (1,), heads=(8, 8), dims=(16, 16), dtype=torch.float16)
    got = check(call)
    assert got.out.shape == (1, 8, 16)
    assert torch.equal(got.out, call.values.values())


def test_queries_of_length_one_and_grouped_heads():
    """EMP-14: another sequence at the end changes nothing before it."""
    short = check(Call.random((3, 0, 5), (1, 0, 1), heads=(9, 3), causal=True))
    call = Call.random((3, 0, 5), (1, 0, 1), heads=(9, 3), causal=True)
    again = check(call)
    assert torch.equal(short.out, again.out)
    longer = Call.random((3, 0, 5, 4), (1, 0, 1, 2), heads=(9, 3), causal=True)
    check(longer)


@pytest.mark.parametrize("length", [1, 64, 128])
def test_many_sequences_of_one_block(length):
    """EMP-16: the same bits each time."""
    for query in (32, [1] * 512):
        call = Call.random([length] * 512, query, heads=(2, 2), dims=(128, 128))
        first = check(call, deterministic=True)
        for _ in range(25):
            again = call.run(BACKEND, deterministic=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, first, strict=True))
