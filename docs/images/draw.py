"""Draws the pictures beside it: `python docs/images/draw.py` (needs matplotlib)."""

import sys
from pathlib import Path

import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.ops.plan import MACHINES, plan_of
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.schedules.plot import SHOWN, draw_loads, draw_padding, draw_plan, new_figure
from jaggedtensor.schedules.simulate import simulate

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))
from lengths import lengths  # noqa: E402

HISTORIES = torch.tensor([9, 2, 31, 5, 14, 3, 1, 40, 6, 11, 0, 4, 18, 7, 2, 26, 3, 8, 1, 12])


def padding() -> None:
    figure = new_figure(10, 3.2)
    padded, packed = figure.subplots(1, 2)
    draw_padding(padded, packed, HISTORIES)
    figure.savefig(HERE / "padding.png")


def schedules() -> None:
    """Few workers, so that each tile can be seen."""
    layout = JaggedLayout.from_lengths(HISTORIES)
    runs = {kind: simulate(layout.schedule(kind, q_len=1, heads=1, workers=6, block_kv=1)) for kind in SHOWN}
    figure = new_figure(10, 2.9)
    draw_loads(figure.subplots(1, len(SHOWN), sharey=True), runs)
    figure.savefig(HERE / "schedules.png")


def plan() -> None:
    machine = MACHINES["h200"]
    problem = AttentionProblem(QueryKind.BROADCAST, 128, 4, 4, 128, 128, torch.bfloat16, machine.device)
    draw_plan(plan_of(problem, lengths("lognormal"), machine=machine)).savefig(HERE / "plan.png")


if __name__ == "__main__":
    padding()
    schedules()
    plan()
