"""The Blackwell backward that keeps its keys on one CTA, on the emulator: values, races, fences and deadlocks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.blackwell.attention_bwd_1cta import launch
from jaggedtensor.kernels.blackwell.plan import plan_general_backward
from jaggedtensor.kernels.emulator import ORDERS
from jaggedtensor.testing.mutants import load_module

FAMILY = Path(__file__).parent / "families" / "blackwell_backward_general.py"
family = load_module(str(FAMILY))
Case, J, P, B = family.Case, family.J, family.P, family.B
CASES = {
    "tiles of no, one and several blocks": Case((150, 0, 129, 1, 70), (150, 3, 5, 1, 0)),
    "D and Dv of 128": Case((150, 0, 20), (260, 3, 1), dim=128, value_dim=128, dtype=torch.bfloat16),
    "causal, D and Dv of 128": Case((20, 260), (64, 200), dim=128, value_dim=128, right=0, processors=1),
    "a window, two heads in groups of two": Case((300, 5), (140, 9), kv_heads=2, group=2, left=40, right=70),
    "queries per sequence, dimensions apart": Case((65, 130, 0), q_len=140, query=P, dim=72, value_dim=40),
    "a broadcast query of several blocks": Case((65, 130, 0, 1), q_len=140, query=B, kv_heads=2, processors=4),
    "a broadcast query with a window": Case((65, 230), q_len=20, query=B, left=90, right=3, processors=2),
    "a block mask": Case((300, 5, 200), (290, 9, 130), kept=0.6),
    "more CTAs than tiles": Case((70,), (5,), processors=4),
    "large scores": Case((150, 70), (40, 130), spread=60.0, dtype=torch.bfloat16),
}


IN_EVERY_ORDER = 2  # cases; each of the others has two of the six


@pytest.mark.parametrize("name", CASES)
def test_values_are_right(name):
    number = list(CASES).index(name)
    for seed, order in enumerate(ORDERS if number < IN_EVERY_ORDER else ORDERS[number % 3 :: 3]):
        family.run(CASES[name], order, seed)


def test_dq_added_in_turns_has_the_same_bits():
    """By three CTAs that run at the same time."""
    case = Case((300, 5), (130, 9), deterministic=True, right=0, processors=3, group=2)
    family.same_bits(case, [("random", 0), ("late", 1), ("starve", 2)])


def test_shares_of_dq_have_the_same_bits():
    case = Case((200, 1), q_len=130, query=B)
    family.same_bits(case, [("random", 0), ("late", 1)])


@given(
    lengths=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=4),
    left=st.sampled_from([-1, 0, 100, 400]),
    right=st.sampled_from([-1, 0, 100, 400]),
    heads=st.integers(1, 4),
    processors=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_turns_cannot_wait_in_a_circle(lengths, left, right, heads, processors):
    """Every CTA walks one list from its end, in which those whose turn comes before a tile's are behind it: then the
    tile that is furthest back of all that are not done waits for nothing, and its CTA is at it."""
    k_lengths, q_lengths = zip(*lengths, strict=True)
    case = Case(k_lengths, q_lengths, kv_heads=heads, left=left, right=right, deterministic=True, processors=processors)
    layouts = [JaggedLayout.from_lengths(torch.tensor(x)) for x in (k_lengths, q_lengths)]
    tiles, offsets = plan_general_backward(case.problem, *layouts, sum(k_lengths), sum(q_lengths))
    for begin, end in pairwise(offsets.tolist()):
        places = [(row[0], row[4], row[1]) for row in tiles[begin:end].tolist()]  # sequence, keys, head
        assert places == sorted(places)
    for block in {(row[0], row[1], i) for row in tiles.tolist() if row[0] >= 0 for i in range(row[2], row[3])}:
        keys = sorted(r[4] for r in tiles.tolist() if (r[0], r[1]) == block[:2] and r[2] <= block[2] < r[3])
        assert keys == list(range(keys[0], keys[-1] + 1))  # so the number of those behind is a difference
        last = (k_lengths[block[0]] - 1) // 128
        if right >= 0:
            last = min(last, (block[2] * 128 + 127 + k_lengths[block[0]] - q_lengths[block[0]] + right) // 128)
        assert keys[-1] == last


def test_scores_far_below_zero_overflow_nothing():
    """TAIL-06 and 07: a last block that is half full, all of whose scores are about -120."""
    for length in (64, 192, 129):
        family.run(Case((length, 37), (length, 5), shift=-120.0 * 8, processors=1), "random", 0)


@st.composite
def drawn_cases(draw):
    """Batches of a few tiles, with an empty and a one-token sequence somewhere."""
    lengths = draw(st.permutations([0, 1, draw(st.integers(0, 200))]))
    dim, value_dim = draw(st.sampled_from([(64, 64), (64, 64), (128, 128), (40, 72), (128, 64)]))
    group = draw(st.sampled_from([1, 1, 2, 8]))
    query = draw(st.sampled_from([J, J, P, B]))
    window = st.sampled_from([-1, -1, 0, 1, 60, 200])
    left, right = draw(window), draw(window)
    kept = draw(st.sampled_from([None, None, 0.5])) if query is not B else None
    return Case(
        tuple(lengths),
        tuple(draw(st.integers(0, 200 // group)) for _ in lengths) if query is J else (),
        q_len=draw(st.integers(1, 200 // group)),
        query=query,
        kv_heads=draw(st.sampled_from([1, 2])),
        group=group,
        dim=dim,
        value_dim=value_dim,
        left=left,
        right=right,
        deterministic=draw(st.booleans()) and kept is None,
        kept=kept,
        processors=draw(st.integers(2, 3)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        spread=draw(st.sampled_from([1.0, 5.0])),
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=drawn_cases(), order=st.sampled_from(ORDERS), seed=st.integers(0, 100))
def test_any_batch(case, order, seed):
    family.run(case, order, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case((130, 0, 1, 70), (20, 3, 0, 140), kv_heads=2, group=2, value_dim=40, deterministic=True),
        Case((130, 0, 1, 70), (20, 3, 0, 140), kv_heads=2, group=2, kept=0.6, right=0),
        Case((130, 0, 1, 70), q_len=70, query=B, kv_heads=2, group=2, left=50),
        Case((130, 0, 1, 70), q_len=9, query=P, dim=80),
        Case((0, 0), q_len=9, query=P),
    ],
    ids=["jagged, in turns", "jagged, a mask", "broadcast", "per sequence", "no key at all"],
)
def test_the_launcher_copies_fills_and_sums(case, emulated, gradients_are_right):
    """For operands as users have them: columns apart, and rows past the last sequence."""
    reports = emulated(launch, together=case.deterministic)
    x = family.inputs_of(case)
    schedule = plan_general_backward(case.problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0], x.mask)
    results = gradients_are_right(launch, x, case, schedule, reports)
    if case.query is P:
        assert [y is None for y in launch.backward(*results, (True, False, True))] == [False, True, False]
