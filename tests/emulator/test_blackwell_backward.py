"""The Blackwell backward for a broadcast query on the emulator: values, races, fences and deadlocks, in many orders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor.testing.mutants import load_module, schedules

family = load_module(str(Path(__file__).parent / "families" / "blackwell_backward.py"))
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
