"""The Hopper forward, held to float64 by the cases of its test; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/hopper_forward.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import load_module

TEST = Path(__file__).resolve().parents[1] / "test_hopper_forward.py"
CASES = ["one consumer", "broadcast, two heads", "jagged", "causal, more queries than keys"]


def run(order: str, seed: int) -> None:
    test = load_module(str(TEST))
    # Several tiles for a CTA, whose O leaves through the buffer that the next Q comes into.
    wide = test.case_of((65, 30, 64, 70), q_length=70, dim=256)
    for case in [*(test.CASES[name] for name in CASES), wide]:
        with pytest.MonkeyPatch.context() as patch:
            test.run(case, patch, order, seed)
    for case, change in (test.STRAYING[name] for name in ("jagged", "causal", "fp16")):
        with pytest.MonkeyPatch.context() as patch:
            test.run(case, patch, order, seed, change=change)


EQUIVALENT = {
    "consume_role: next channels.out.index(part) in staging = channels.out.index(part)": (
        "any buffer will do, as long as each consumer has its own"
    ),
    "Channel.slot: next self.buffers.index(at.index * self.parts + part) in "
    "buffer = self.buffers.index(at.index * self.parts + part)": "all roles go round the ring from one place on",
    "Slot.publish: delete mbarrier.arrive(self.full, count=1)": "nothing in this family publishes",
    "Ring.take_turn: delete mbarrier.wait(channels.turns.index(self.part), self.turn ^ (1 - self.part))": (
        "turns are there for speed: no data is ordered by them"
    ),
}

FAMILY = Family(
    "hopper_forward",
    runner=run,
    modules=[
        "jaggedtensor.kernels.hopper.attention_fwd.channels",
        "jaggedtensor.kernels.hopper.attention_fwd.loads",
        "jaggedtensor.kernels.hopper.attention_fwd.device",
        "jaggedtensor.kernels.shared.pipeline",
        "jaggedtensor.kernels.shared.anchor",
    ],
    equivalent=EQUIVALENT,
)
