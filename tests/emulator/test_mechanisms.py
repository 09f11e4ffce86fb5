"""Each mechanism on the emulator: right values under every order, and known faults found by the check that is for them.

Every family has tiles without steps, with one, two, and more than its rings are deep, at least two tiles for a CTA,
and a ring that is deeper than a tile is long.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import triton

from jaggedtensor import env
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


@pytest.mark.skipif(env.INTERPRETING, reason="the compiler is not there under TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", FAMILIES)
def test_mechanisms_compile_and_take_the_memory_that_the_emulator_counts(name: str) -> None:
    family = family_of(name)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < family.triton:
        pytest.skip(f"needs Triton {family.triton}")
    case = family.cases[1]
    report, compiled = case.emulate("round_robin", 0), case.compile()
    # The compiler adds what roles are told in, and room for reductions.
    assert report.shared_peak <= compiled.metadata.shared <= report.shared_peak + 1024
    # Tensor memory is given out in powers of two, of 32 columns or more.
    columns = max(32, 1 << (report.tensor_peak - 1).bit_length()) if report.tensor_peak else 0
    assert compiled.metadata.tmem_size == columns


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
