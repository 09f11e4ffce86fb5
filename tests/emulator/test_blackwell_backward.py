"""The Blackwell backward for a broadcast query on the emulator: values, races, fences and deadlocks, in many orders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import launch
from jaggedtensor.kernels.blackwell.plan import plan_broadcast_backward
from jaggedtensor.kernels.emulator import ORDERS
from jaggedtensor.problem import AttentionArgs
from jaggedtensor.testing.guards import poison_free_memory
from jaggedtensor.testing.mutants import load_module, schedules, score

FAMILY = Path(__file__).parent / "families" / "blackwell_backward.py"
family = load_module(str(FAMILY))
Case = family.Case
SEEDS = 2
CASES = {
    "tiles cut between two CTAs": Case((300, 0, 129, 1, 600)),
    "more CTAs than tiles": Case((70,), processors=4),
    "two heads, groups of two": Case((129, 5), q_len=37, kv_heads=2, group=2),
    "D and Dv of 128": Case((260, 0, 1, 140), dim=128, value_dim=128, dtype=torch.bfloat16),
    "value dimension of its own": Case((65, 130), dim=72, value_dim=40, dtype=torch.bfloat16),
    "one row of each head": Case((200, 3), q_len=1, group=4),
    "many short sequences": Case((1, 2, 0, 1, 30, 1, 0, 5), q_len=3, processors=1),
    "large scores": Case((150, 70), q_len=40, spread=60.0, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_are_right_under_every_order(case):
    for order, seed in schedules(SEEDS):
        family.run(case, order, seed)


def test_rings_of_any_depth():
    for k_stages, v_stages in ((2, 1), (3, 1), (2, 4)):
        for order, seed in schedules(1):
            family.run(Case((600, 3)), order, seed, k_stages=k_stages, v_stages=v_stages)


def test_dq_of_many_tiles_of_the_same_sign_is_summed_without_drift():
    """One CTA adds dQ up over 96 tiles; with operands of one sign its rounding errors would all point the same way."""
    case = Case((64 * 128, 0, 32 * 128), q_len=2, processors=1, same_sign=True)
    family.run(case, "eager", 0)


@st.composite
def drawn_cases(draw):
    """Batches of a few tiles, with an empty and a one-token sequence somewhere."""
    others = draw(st.lists(st.integers(0, 400), min_size=1, max_size=2))
    dim, value_dim = draw(st.sampled_from([(64, 64), (64, 64), (128, 128), (40, 72), (128, 64)]))
    group = draw(st.sampled_from([1, 1, 2, 4]))
    return Case(
        tuple(draw(st.permutations([0, 1, *others]))),
        q_len=draw(st.integers(1, 128 // group)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=group,
        dim=dim,
        value_dim=value_dim,
        processors=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16])),
        spread=draw(st.sampled_from([1.0, 5.0])),
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=drawn_cases(), order=st.sampled_from(ORDERS), seed=st.integers(0, 100))
def test_any_batch(case, order, seed):
    family.run(case, order, seed)


@pytest.mark.parametrize("lengths", [(130, 0, 1, 70), (0, 0)], ids=["keys", "no key at all"])
def test_the_launcher_copies_fills_and_sums(lengths, emulated):
    """For operands as users have them: columns apart, gradients expanded, rows past the last sequence."""
    reports = emulated(launch)
    case = Case(lengths, q_len=20, kv_heads=2, group=2, value_dim=40)
    layout, tokens, rows = JaggedLayout.from_lengths(torch.tensor(lengths)), sum(lengths), sum(lengths) + 3
    offsets = layout.offsets()
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(20, 4, 64, generator=generator).half()
    k = torch.randn(rows, 64, 2, generator=generator).half().transpose(1, 2)
    v = torch.randn(rows, 2, 40, generator=generator).half()
    k[tokens:], v[tokens:] = float("nan"), float("nan")
    grad_out = torch.randn(len(lengths), 1, 4, 1, generator=generator).half().expand(-1, 20, -1, 40)
    grad_lse = torch.randn(len(lengths), 4, 20, generator=generator)
    exact = [x.double().requires_grad_() for x in (q, k[:tokens], v[:tokens])]
    out, lse = family.forward(*exact, offsets.tolist(), -0.2)
    wanted = torch.autograd.grad((out, lse), exact, (grad_out.double(), grad_lse.double()))
    schedule = plan_broadcast_backward(case.problem, layout, rows)
    args = AttentionArgs(case.problem, q, k, v, None, offsets, -0.2, True, False, schedule)
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


def test_a_few_mutants_are_found():
    """A sample; `make mutants` takes them all."""
    result = score(str(FAMILY), schedules(1), jobs=1, limit=60, only=6)
    assert not result.right.kind, str(result)
    assert not result.survivors, str(result)
    assert not result.mistaken, str(result)
