"""The Blackwell backward of pairs of CTAs on the emulator: values, races, fences and deadlocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.blackwell.attention_bwd_2cta import launch
from jaggedtensor.kernels.blackwell.plan import plan_pair_backward
from jaggedtensor.kernels.emulator import ORDERS
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import AttentionArgs
from jaggedtensor.testing.guards import poison_free_memory
from jaggedtensor.testing.mutants import load_module, schedules, score

FAMILY = Path(__file__).parent / "families" / "blackwell_backward_2cta.py"
family = load_module(str(FAMILY))
case, J, P = family.case, family.J, family.P
CASES = {
    "pairs of no, one and several blocks, a CTA without keys": case((300, 0, 129, 1, 70), (150, 3, 5, 1, 0)),
    "bf16, a pair for all tiles": case((257, 0, 20), (260, 3, 1), dtype=torch.bfloat16, processors=2),
    "causal": case((20, 300), (64, 200), right=0, processors=2),
    "a window, two heads in groups of four": case((300, 5), (70, 9), kv_heads=2, group=4, left=40, right=70),
    "queries per sequence, dimensions apart": case((65, 130, 0), query=P, q_len=140, dim=72, value_dim=80),
    "a group of all that a CTA has": case((130, 3), (3, 2), group=64),
    "more pairs than tiles": case((70,), (5,), processors=6),
    "large scores": case((150, 70), (40, 130), spread=60.0, dtype=torch.bfloat16),
}
IN_EVERY_ORDER = 1  # cases; each of the others has one of the six


@pytest.mark.parametrize(("number", "name"), [*enumerate(CASES)])
def test_values_are_right(number, name):
    for seed, order in enumerate(ORDERS if number < IN_EVERY_ORDER else ORDERS[number % 6 :: 6]):
        family.run(CASES[name], order, seed)


def test_scores_far_below_zero_overflow_nothing():
    """TAIL-06 and 07: a last block that is half full, all of whose scores are about -120."""
    for length in (64, 129):
        family.run(case((length, 37), (length, 5), shift=-120.0 * 11.4, processors=2), "random", 0)


@st.composite
def drawn_cases(draw):
    """Batches of a few tiles, with an empty and a one-token sequence somewhere."""
    lengths = draw(st.permutations([0, 1, draw(st.integers(0, 400))]))
    query, group = draw(st.sampled_from([J, J, P])), draw(st.sampled_from([1, 1, 2, 8]))
    window = st.sampled_from([-1, -1, 0, 1, 60, 200])
    return case(
        tuple(lengths),
        tuple(draw(st.integers(0, 200 // group)) for _ in lengths) if query is J else (),
        query=query,
        q_len=draw(st.integers(1, 200 // group)),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=group,
        dim=draw(st.sampled_from([128, 72])),
        value_dim=draw(st.sampled_from([128, 96])),
        left=draw(window),
        right=draw(window),
        processors=draw(st.sampled_from([2, 4])),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        spread=draw(st.sampled_from([1.0, 5.0])),
    )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(case=drawn_cases(), order=st.sampled_from(ORDERS), seed=st.integers(0, 100))
def test_any_batch(case, order, seed):
    family.run(case, order, seed)


@pytest.mark.parametrize("query", [J, P], ids=["jagged", "per sequence"])
def test_the_launcher_copies_fills_and_rounds(query, emulated):
    """For operands as users have them: columns apart, gradients expanded, rows past the last sequence."""
    reports = emulated(launch)
    lengths, q_lengths = (130, 0, 270), (20, 0, 30) if query is J else (20, 20, 20)
    each = case(lengths, q_lengths if query is J else (), query=query, q_len=20, kv_heads=2, group=2, dim=96)
    keys, queries = (JaggedLayout.from_lengths(torch.tensor(x)) for x in (lengths, q_lengths))
    offsets, q_offsets, tokens = keys.offsets(), queries.offsets() if query is J else None, sum(lengths)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(*((50,) if query is J else (3, 20)), 4, 96, generator=generator).half()
    k = torch.randn(tokens + 3, 96, 2, generator=generator).half().transpose(1, 2)
    v = torch.randn(tokens + 3, 2, 128, generator=generator).half()
    k[tokens:], v[tokens:] = float("nan"), float("nan")
    grad_out = torch.randn(*q.shape[:-1], 1, generator=generator).half().expand(*q.shape[:-1], 128)
    exact = [x.double().requires_grad_() for x in (q, k[:tokens], v[:tokens])]
    out, lse = attend_reference(*exact, q_offsets, offsets, scale=-0.2, left=-1, right=-1)
    grad_lse = torch.randn(lse.shape, generator=generator).masked_fill(~lse.isfinite(), 0)
    wanted = torch.autograd.grad((out, lse.nan_to_num(neginf=0)), exact, (grad_out.double(), grad_lse.double()))
    schedule = plan_pair_backward(each.problem, keys, queries if query is J else None, tokens + 3, q.shape[0])
    args = AttentionArgs(each.problem, q, k, v, q_offsets, offsets, -0.2, True, False, schedule)
    poison_free_memory(1 << 20, "cpu")
    results = args, grad_out, grad_lse, out.detach().half(), lse.detach().float()
    got = launch.backward(*results, (True, True, True))
    for report in reports:
        report.raise_if_bad()
    for name, x, right in zip(("dq", "dk", "dv"), got, wanted, strict=True):
        assert x.dtype == torch.float16, name
        error = (x[: len(right)].double() - right).norm()
        assert error <= 3e-3 * right.norm(), f"{name}: {error}"
        assert (x[len(right) :] == 0).all(), name
    assert [x is None for x in launch.backward(*results, (True, False, True))] == [False, True, False]


def test_what_has_no_tile_launches_nothing(monkeypatch):
    monkeypatch.setattr(launch, "launch", None)
    each = case((0, 0), (3, 0))
    keys, queries = (JaggedLayout.from_lengths(torch.tensor(x)) for x in (each.k_lengths, each.q_lengths))
    q, k = torch.randn(3, 1, 128).half(), torch.randn(0, 1, 128).half()
    schedule = plan_pair_backward(each.problem, keys, queries, 0, 3)
    args = AttentionArgs(each.problem, q, k, k, queries.offsets(), keys.offsets(), 0.1, False, False, schedule)
    dq, dk, dv = launch.backward(args, q, None, q * 0, torch.full((3, 1), float("-inf")), (True, True, True))
    assert dq.shape == q.shape
    assert not dq.any()
    assert dk.shape == dv.shape == k.shape


def test_pairs_may_begin_at_the_same_queries():
    family.run(replace(CASES["bf16, a pair for all tiles"], processors=4), "starve", 0, staggered=False)


def test_a_few_mutants_are_found():
    """A sample; `make mutants` takes them all."""
    result = score(str(FAMILY), schedules(1), jobs=1, limit=60, only=4)
    assert not result.right.kind, str(result)
    assert not result.survivors, str(result)
    assert not result.mistaken, str(result)
