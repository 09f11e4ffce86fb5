"""Portable kernels on a GPU: query heads that share keys, and masks."""

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


# -- heads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(12, 3), (12, 4), (8, 2), (6, 1), (9, 3), (16, 16), (5, 5)], ids=str)
def test_query_heads_share_key_heads_in_any_ratio(heads):
    """GQA-01."""
    for query in (3, (65, 3)):
        check(Call.random((65, 3), query, heads=heads, causal=isinstance(query, tuple)))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_large_groups_of_query_heads(group):
    """GQA-04."""
    check(Call.random((1792, 0, 1), (1792, 5, 1), heads=(4 * group, 4), dims=(128, 128), causal=True))
    check(Call.random((3584, 0, 1), 9, heads=(4 * group, 4), dims=(128, 128)))


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (7, 2), (4, 8)], ids=str)
def test_other_ratios_are_refused(heads):
    """GQA-03."""
    with pytest.raises(ValueError, match=f"{heads[1]}.*{heads[0]}"):
        Call.random((5, 3), 4, heads=heads).run(BACKEND)


# -- masks -----------------------------------------------------------------------------------------------------------


MASKS = [
    {"causal": True},
    {"window": (0, 0)},
    {"window": (32, 64)},
    {"window": (None, 300)},
    {"window": (300, None)},
    {"window": (128, None), "causal": True},
    {"window": 2**31 - 1},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@kinds
def test_masks_are_aligned_from_the_end(kind, mask):
    """MSK-01, MSK-02, MSK-05, MSK-10: more queries than keys, fewer, as many."""
    k_lengths, q_lengths = (6, 5, 3, 9, 64, 32, 0, 500), (5, 2, 7, 1, 129, 129, 3, 260)
    check(Call.random(k_lengths, heads=(2, 1), **mask, **query_of(kind, 150, q_lengths)))


def test_rows_that_see_nothing():
    """MSK-02."""
    got = check(Call.random((64,), (129,), causal=True))
    assert (got.lse[:65] == -torch.inf).all()
    assert not got.out[:65].any()
    assert not got.dq[:65].any()


def test_a_window_counts_keys_before_and_after():
    """MSK-04: `left` keys before the own one, and the own one."""
    call = Call.random((10,), (10,), heads=(1, 1), dims=(16, 16), dtype=torch.float32, window=(3, 0))
    call.keys.values().zero_()
    call.values.values().zero_()
    call.values.values()[:, 0, :10] = torch.eye(10, device="cuda")
    out = call.run(BACKEND).out[:, 0, :10]
    assert (out > 0).sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert [row.nonzero().flatten().max().item() for row in out] == list(range(10))


@pytest.mark.parametrize("dim", [59, 64])
def test_a_window_at_the_end_of_many_keys(dim):
    """MSK-07, MSK-08: whole blocks before it are masked."""
    for window in ((0, 256), (60, 0), (19_000, 0)):
        got = check(Call.random((20_000,), (16,), dims=(dim, dim), dtype=torch.float16, window=window))
        assert got.out.isfinite().all()
