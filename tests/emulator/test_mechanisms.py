"""Each mechanism on the emulator: right values under every order, and known faults found by the check that is for them.

Every family has tiles without steps, with one, two, and more than its rings are deep, at least two tiles for a CTA,
and a ring that is deeper than a tile is long.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import Task, bad_variant, judge_all, load_module, schedules, source_of

FOLDER = Path(__file__).parent / "mechanisms"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.py"))
SEEDS = 4


def family_of(name: str) -> Family:
    return load_module(str(FOLDER / f"{name}.py")).FAMILY


CASES = [(name, i) for name in FAMILIES for i in range(len(family_of(name).cases))]


@pytest.mark.parametrize(("name", "i"), CASES, ids=lambda value: str(value))
def test_values_are_right_under_every_order(name: str, i: int) -> None:
    case = family_of(name).cases[i]
    for order, seed in schedules(SEEDS):
        case.emulate(order, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_known_faults_are_found_by_the_check_that_is_for_them(name: str) -> None:
    path = str(FOLDER / f"{name}.py")
    bad = {b.change: b for b in family_of(name).bad}
    assert len(bad) >= 5
    tasks = [Task(path, path, change, bad_variant(source_of(path), b)) for change, b in bad.items()]
    wrong = []
    for task, verdicts in judge_all(tasks, schedules(SEEDS // 2), jobs=1, limit=60, every=True):
        kinds, expected = {verdict.kind for verdict in verdicts}, bad[task.name].kinds
        if expected[0] not in kinds or not kinds <= set(expected):
            wrong.append(f"{task.name}: {sorted(kinds)}, expected {expected}")
    assert not wrong, "\n".join(wrong)
