"""The Blackwell backward in a pass for each gradient, on the emulator: values, races, fences and deadlocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor.kernels.blackwell.attention_bwd_wide import launch
from jaggedtensor.kernels.blackwell.attention_bwd_wide.config import Gradient
from jaggedtensor.kernels.blackwell.plan import plan_wide_backward
from jaggedtensor.kernels.emulator import ORDERS
from jaggedtensor.testing.mutants import load_module

FAMILY = Path(__file__).parent / "families" / "blackwell_backward_wide.py"
family = load_module(str(FAMILY))
Case, J, P, B = family.Case, family.J, family.P, family.B
BF16 = torch.bfloat16
CASES = {
    "tiles of no, one and several blocks": Case((150, 0, 129, 1, 70), (150, 3, 5, 1, 0), dtype=BF16),
    "narrow, in rings of four": Case((330, 0, 20, 1), (300, 3, 1, 1), dim=64, value_dim=40, processors=1),
    "causal": Case((20, 260), (64, 200), right=0, processors=1),
    "a window, two heads in groups of two": Case((300, 5), (140, 9), kv_heads=2, group=2, dim=136, left=40, right=70),
    "groups of three, causal": Case((200, 5), (90, 9), group=3, dim=64, value_dim=192, right=0, dtype=BF16),
    "groups of six": Case((130, 0, 5), (30, 4, 9), kv_heads=2, group=6, dim=72, value_dim=72, left=30),
    "groups of 128": Case((130, 5), (2, 1), group=128, dim=64, value_dim=64),
    "queries per sequence, dimensions apart": Case((65, 130, 0), q_len=140, query=P, dim=248, value_dim=40),
    "a broadcast query of several blocks": Case((65, 130, 0, 1), q_len=140, query=B, kv_heads=2, processors=8),
    "a broadcast query, many sequences for a CTA": Case((70, 1, 0, 5, 130), q_len=20, query=B, group=3, processors=1),
    "a broadcast query with a window": Case((65, 230), q_len=140, query=B, left=90, right=3, dim=192, value_dim=128),
    "a broadcast query with a block mask": Case((300, 0, 170), q_len=290, query=B, kept=0.5, dim=128, value_dim=128),
    "a block mask": Case((300, 5, 200), (290, 9, 130), kept=0.6, group=2, dim=64),
    "more CTAs than tiles": Case((70,), (5,), processors=4),
    "more CTAs than tiles of a broadcast query": Case((70,), q_len=5, query=B, processors=7),
    "large scores": Case((150, 70), (40, 130), spread=60.0, dtype=BF16),
}
IN_EVERY_ORDER = 2  # cases; each of the others has two of the six


@pytest.mark.parametrize("name", CASES)
def test_values_are_right(name):
    number = list(CASES).index(name)
    for seed, order in enumerate(ORDERS if number < IN_EVERY_ORDER else ORDERS[number % 3 :: 3]):
        family.run(CASES[name], order, seed)


def test_shares_of_dq_have_the_same_bits():
    case = Case((200, 1, 70), q_len=130, query=B, dim=64, value_dim=64, processors=4)
    x = family.inputs_of(case)
    config = launch.select(case.problem, Gradient.QUERY)
    orders = ("random", "late", "starve")
    first, *others = (family.run_pass(x, config, order, seed)[0] for seed, order in enumerate(orders))
    assert all(torch.equal(first, y) for y in others)


def test_scores_far_below_zero_overflow_nothing():
    """TAIL-06 and 07: a last block that is half full, all of whose scores are about -120."""
    for length in (64, 192, 129):
        family.run(Case((length, 37), (length, 5), shift=-120.0 / 16, processors=1), "random", 0)


@st.composite
def drawn_cases(draw):
    """Batches of a few tiles, with an empty and a one-token sequence somewhere."""
    lengths = draw(st.permutations([0, 1, draw(st.integers(0, 200))]))
    dim, value_dim = draw(st.sampled_from([(256, 256), (64, 64), (128, 128), (40, 72), (192, 128), (8, 256)]))
    group = draw(st.sampled_from([1, 1, 2, 3, 8, 12]))
    query = draw(st.sampled_from([J, J, P, B]))
    window = st.sampled_from([-1, -1, 0, 1, 60, 200])
    return Case(
        tuple(lengths),
        tuple(draw(st.integers(0, 200 // group)) for _ in lengths) if query is J else (),
        q_len=draw(st.integers(1, 200 // group)),
        query=query,
        kv_heads=draw(st.sampled_from([1, 2])),
        group=group,
        dim=dim,
        value_dim=value_dim,
        left=draw(window),
        right=draw(window),
        kept=draw(st.sampled_from([None, None, 0.5])),
        processors=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from([torch.float16, BF16])),
        spread=draw(st.sampled_from([1.0, 5.0])),
    )


@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=drawn_cases(), order=st.sampled_from(ORDERS), seed=st.integers(0, 100))
def test_any_batch(case, order, seed):
    family.run(case, order, seed)


@pytest.mark.parametrize(
    "case",
    [
        Case((130, 0, 1, 70), (20, 3, 0, 140), kv_heads=2, group=3, dim=136, value_dim=40),
        Case((130, 0, 1, 70), (20, 3, 0, 140), kv_heads=2, group=2, kept=0.6, right=0),
        Case((130, 0, 1, 70), q_len=70, query=B, group=6, left=50, dim=136, value_dim=64),
        Case((130, 0, 1, 70), q_len=300, query=B, kept=0.5, dim=64, value_dim=64),
        Case((130, 0, 1, 70), q_len=9, query=P),
        Case((0, 0), q_len=9, query=P),
        Case((0, 0), q_len=9, query=B),
    ],
    ids=["jagged", "jagged, a mask", "broadcast", "broadcast, a mask", "per sequence", "no key", "no key, broadcast"],
)
def test_the_launcher_copies_fills_and_sums(case, emulated, gradients_are_right):
    """For operands as users have them: columns apart, and rows past the last sequence."""
    reports = emulated(launch)
    x = family.inputs_of(case)
    schedule = plan_wide_backward(case.problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0], x.mask)
    results = gradients_are_right(launch, x, case, schedule, reports)
    assert len(reports) == (3 if sum(case.k_lengths) else 0)
    reports.clear()
    assert [y is None for y in launch.backward(*results, (True, False, True))] == [False, True, False]
    assert len(reports) == (2 if sum(case.k_lengths) else 0)  # a pass that nobody needs is not made
