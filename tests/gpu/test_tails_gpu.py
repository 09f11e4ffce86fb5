"""Portable kernels on a GPU: lengths around the ends of blocks, and sequences that know nothing of each other."""

import itertools
import os

import pytest
import torch

from jaggedtensor.problem import QueryKind
from jaggedtensor.testing.bounds import Call, query_of

BACKEND = os.environ.get("JAGGEDTENSOR_TEST_BACKEND", "portable")
KINDS = list(QueryKind)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def check(call, **options):
    return call.checked(BACKEND, **options)


# -- ends of blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128])
@kinds
def test_every_length_around_250_and_500(kind, dim):
    """TAIL-01, TAIL-09: one batch has them all, so one sequence's tail lies beside the next one's head."""
    lengths = [*range(240, 261), *range(480, 521, 2), 31, 33, 4250]
    check(Call.random(lengths, heads=(2, 1), dims=(dim, dim), **query_of(kind, 33, lengths)))


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_head_of_a_length_that_is_no_multiple(dim, heads):
    """TAIL-03."""
    for query in (49, (49, 65, 130)):
        check(Call.random((49, 65, 130), query, heads=heads, dims=(dim, dim), dtype=torch.float16))


@kinds
def test_every_row_is_written(kind):
    """TAIL-04."""
    lengths = (913, 513, 300, 128, 17, 1)
    for causal in (False, True):
        check(Call.random(lengths, heads=(2, 2), causal=causal, slack=3, **query_of(kind, 100, lengths)))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_far_below_zero_beside_the_end_of_a_block(kind, dtype):
    """TAIL-06, TAIL-07: every remainder of a block's length; exp(0 - lse) would overflow."""
    level = (120 * 8 / 64) ** 0.5
    lengths = [704, 64, 192, 320, *range(1, 130, 8)]
    call = Call.random(lengths, heads=(1, 1), dtype=dtype, **query_of(kind, 20, lengths))
    query = call.query if isinstance(call.query, torch.Tensor) else call.query.values()
    query.fill_(level)
    call.keys.values().fill_(-level)
    assert check(call).lse.max() < -100
    call.values.values().fill_(4.0)
    loud = Call(call.query, call.keys, call.values, {}, torch.full_like(call.grad_out, 1000.0), call.grad_lse)
    assert loud.run(BACKEND).dq.isfinite().all()


def test_one_sequence_with_very_negative_scores_among_others():
    """TAIL-07."""
    call = Call.random((37, 200, 129), (5, 64, 1), dtype=torch.float16)
    call.keys.values()[37:237] = -5.0
    call.query.values()[5:69] = 5.0
    check(call)


# -- isolation -------------------------------------------------------------------------------------------------------


@kinds
def test_a_sequence_is_alone(kind):
    """ISO-01: every value of the others may change."""
    lengths = (300, 500, 200)
    calls = [Call.random(lengths, seed=1, causal=True, **query_of(kind, 40, lengths)) for _ in range(2)]
    calls[1].keys.values()[300:800] = 1e4
    calls[1].values.values()[300:800] = torch.nan
    if kind is QueryKind.JAGGED:
        calls[1].query.values()[300:800] = torch.inf
    first, second = (call.run(BACKEND) for call in calls)
    for rows in (slice(0, 300), slice(800, None)):
        assert torch.equal(first.dk[rows], second.dk[rows])
        assert torch.equal(first.dv[rows], second.dv[rows])
    parts = (slice(0, 300), slice(800, None)) if kind is QueryKind.JAGGED else (0, 2)
    for part in parts:
        assert torch.equal(first.out[part], second.out[part])
        if kind is not QueryKind.BROADCAST:
            assert torch.equal(first.dq[part], second.dq[part])


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_backends_agree_on_batches_of_any_size(batch):
    """ISO-02."""
    lengths = [70, 0, 129, 1, 300, 64, 5][:batch]
    for query in (20, lengths):
        check(Call.random(lengths, query, heads=(4, 2)))


@kinds
def test_neighbours_and_places_change_no_bit(kind):
    """ISO-04: alone, first, last, among a thousand others."""
    one = Call.random((333,), **query_of(kind, 40, (222,)), seed=5)
    results = []
    for before, after in (([], []), ([], [17, 0]), ([64, 0], []), ([7] * 500, [33] * 500)):
        lengths, place = [*before, 333, *after], len(before)
        q_lengths = [n // 2 for n in before] + [222] + [n // 2 for n in after]
        call = Call.random(lengths, **query_of(kind, 40, q_lengths), seed=6)
        rows = slice(sum(before), sum(before) + 333)
        mine = (
            slice(sum(q_lengths[:place]), sum(q_lengths[: place + 1]))
            if kind is QueryKind.JAGGED
            else slice(place, place + 1)
        )
        call.keys.values()[rows] = one.keys.values()
        call.values.values()[rows] = one.values.values()
        call.grad_out[mine] = one.grad_out
        call.grad_lse[mine] = one.grad_lse
        query = one.query
        if kind is QueryKind.JAGGED:
            call.query.values()[mine] = one.query.values()
            query = call.query
        elif kind is QueryKind.PER_SEQUENCE:
            call.query[mine] = one.query
            query = call.query
        got = Call(query, call.keys, call.values, {}, call.grad_out, call.grad_lse).run(BACKEND)
        results.append((got.out[mine], got.lse[mine], got.dk[rows], got.dv[rows]))
    for other in itertools.chain(results[1:]):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))
