"""The mutation tool itself: what it changes, what it counts, and a small part of its work on a mechanism."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor.testing.families import Bad, Operands, WrongValue
from jaggedtensor.testing.mutants import (
    Score,
    Task,
    Verdict,
    bad_variant,
    judge_all,
    load_module,
    main,
    mutants_of,
    schedules,
    score,
    source_of,
    table_of,
)

MECHANISMS, FAMILIES = Path(__file__).parent / "mechanisms", Path(__file__).parent / "families"
ROLE = '''
@gluon.jit
def role(a, full, empty, acc, n):
    """Mühsam: a letter of two bytes before what is changed."""
    phase = 0
    for i in range(n):
        mbarrier.wait(full.index(i % 2), phase)
        value = a.index(i % 2).load()
        fence_async_shared()
        mbarrier.arrive(empty.index(0), pred=i > 0)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        tcgen05_mma(
            value, a, acc, mbarriers=[full, empty]
        )
        phase = phase ^ 1
        use(value)


def on_the_host(full):
    mbarrier.wait(full, 0)
'''


def changes(text: str) -> dict[str, str]:
    """For each mutant the lines that differ."""
    found = {}
    for mutant in mutants_of(text):
        before, after = text.splitlines(), mutant.text.splitlines()
        assert len(before) == len(after), "line numbers must stay"
        found[mutant.name] = "; ".join(b.strip() for a, b in zip(before, after, strict=True) if a != b)
    return found


def test_every_synchronisation_of_device_code_is_deleted_or_altered_once() -> None:
    assert changes(ROLE) == {
        "role: delete mbarrier.wait(full.index(i % 2), phase)": "pass",
        "role: move down mbarrier.wait(full.index(i % 2), phase)": (
            "value = a.index(i % 2).load(); mbarrier.wait(full.index(i % 2), phase)"
        ),
        "role: other phase in mbarrier.wait(full.index(i % 2), phase)": "mbarrier.wait(full.index(i % 2), (phase) ^ 1)",
        "role: next full.index(i % 2) in mbarrier.wait(full.index(i % 2), phase)": (
            "mbarrier.wait(full.index(((i % 2) + 1) % full.shape[0]), phase)"
        ),
        "role: next a.index(i % 2) in value = a.index(i % 2).load()": (
            "value = a.index(((i % 2) + 1) % a.shape[0]).load()"
        ),
        "role: delete fence_async_shared()": "pass",
        "role: move up fence_async_shared()": "fence_async_shared(); value = a.index(i % 2).load()",
        "role: delete mbarrier.arrive(empty.index(0), pred=i > 0)": "pass",
        "role: move up mbarrier.arrive(empty.index(0), pred=i > 0)": (
            "mbarrier.arrive(empty.index(0), pred=i > 0); fence_async_shared()"
        ),
        "role: always mbarrier.arrive(empty.index(0), pred=i > 0)": "mbarrier.arrive(empty.index(0), pred=True)",
        "role: delete acc = warpgroup_mma_wait(1, deps=(acc,))": "acc = acc",
        "role: one more in warpgroup_mma_wait(1, deps=(acc,))": "acc = warpgroup_mma_wait(1 + 1, deps=(acc,))",
        "role: no full in tcgen05_mma( value, a, acc, mbarriers=[full, empty] )": "value, a, acc, mbarriers=[empty]",
        "role: no empty in tcgen05_mma( value, a, acc, mbarriers=[full, empty] )": "value, a, acc, mbarriers=[full]",
        "role: no flip in phase = phase ^ 1": "phase = phase",
    }


@pytest.mark.parametrize("path", sorted(MECHANISMS.glob("*.py")), ids=lambda p: p.stem)
def test_mutants_of_the_mechanisms_are_sources_with_one_change_each(path: Path) -> None:
    text = path.read_text()
    mutants = mutants_of(text)
    assert len({m.name for m in mutants}) == len({m.text for m in mutants}) == len(mutants) >= 5
    for mutant in mutants:
        assert mutant.text != text
        ast.parse(mutant.text)
        before, after = text.splitlines(), mutant.text.splitlines()
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        moved = sorted(before) == sorted(after)
        assert changed >= 1
        assert moved or changed < 10


@pytest.mark.parametrize("path", sorted(FAMILIES.glob("*.py")), ids=lambda p: p.stem)
def test_each_excuse_of_a_kernel_family_is_for_a_mutant_that_there_is(path: Path) -> None:
    family = load_module(str(path)).FAMILY
    names = {mutant.name for module in family.modules for mutant in mutants_of(source_of(module))}
    assert len(names) >= 20
    assert not set(family.equivalent) - names


def test_an_edit_that_does_not_fit_the_source_is_refused() -> None:
    text = 'a = 1\nb = 1\nBAD = [Bad("", (), ("b = 1", "b = 2"))]\n'
    assert bad_variant(text, Bad("b", ("race",), ("b = 1", "b = 2"))).startswith("a = 1\nb = 2\nBAD")
    for old in ("= 1", "c = 1"):
        with pytest.raises(ValueError, match="expected once"):
            bad_variant(text, Bad("c", ("race",), (old, "")))


def test_outputs_that_are_not_written_or_differ_are_wrong_values() -> None:
    expected = torch.arange(6.0).view(2, 3)
    got = expected.clone()
    Operands((), {"out": (got, expected)}).check()
    got[1, 2] += 0.25
    Operands((), {"out": (got, expected)}, tolerance=0.25).check()
    for wrong in (5.25, float("nan")):
        got[1, 2] = wrong
        with pytest.raises(WrongValue, match=r"out: 1 of 6 values are wrong, the first at \(1, 2\)"):
            Operands((), {"out": (got, expected)}).check()


def test_a_score_counts_failed_runs_as_survivors_and_names_wrong_excuses() -> None:
    verdicts = {
        "found": Verdict("race"),
        "excused": Verdict(""),
        "found though excused": Verdict("deadlock"),
        "failed": Verdict("failed: KeyError", "x"),
        "not found": Verdict(""),
    }
    equivalent = {"excused": "why", "found though excused": "why", "gone": "why"}
    score = Score("family", Verdict(""), verdicts, equivalent)
    assert score.counts == (1, 3)
    assert score.survivors == ["failed", "not found"]
    assert score.mistaken == ["found though excused", "gone"]
    assert "survives: failed (failed: KeyError: x)" in str(score)


def test_a_family_passes_with_enough_found_and_nothing_wrong() -> None:
    verdicts = {f"mutant {i}": Verdict("race" if i else "") for i in range(20)}
    enough = Score("short", Verdict(""), verdicts, {})
    assert enough.passes(0.95)
    assert not enough.passes(0.96)
    assert not Score("broken", Verdict("race"), verdicts, {}).passes(0.5)
    assert not Score("excused", Verdict(""), verdicts, {"mutant 1": "why"}).passes(0.5)
    lines = table_of([enough, Score("a longer name", Verdict(""), verdicts, {"mutant 0": "why"})], [60.0, 90.0])
    assert [line.split()[-5:] for line in lines.splitlines()[1:]] == [
        ["20", "19", "95.0%", "0", "1.0"],
        ["19", "19", "100.0%", "1", "1.5"],
        ["39", "38", "97.4%", "1", "2.5"],
    ]


def test_a_family_below_the_floor_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of this one's device function a wait may go without anybody noticing."""
    family = tmp_path / "family.py"
    family.write_text(
        "from jaggedtensor.testing.families import Family\n"
        "def jit(f): return f\n"
        "@jit\n"
        "def role(x):\n"
        "    mbarrier.wait(x)\n"
        "FAMILY = Family('careless', runner=lambda order, seed: None)\n"
    )
    assert main([str(family), "--seeds", "1"]) == 1
    printed = capsys.readouterr().out
    assert "survives: role: delete mbarrier.wait(x)" in printed
    assert printed.splitlines()[-1].split()[:5] == ["all", "1", "0", "0.0%", "0"]
    assert main([str(family), "--seeds", "1", "--floor", "0"]) == 0


@pytest.mark.parametrize("path", sorted(MECHANISMS.glob("*.py")), ids=lambda p: p.stem)
def test_a_few_mutants_of_each_mechanism_are_found(path: Path) -> None:
    """A sample; `make mutants` takes them all."""
    result = score(str(path), schedules(1), jobs=1, limit=60, only=8)
    assert not result.right.kind, str(result)
    assert not result.survivors, str(result)
    assert not result.mistaken, str(result)


def test_a_mutant_that_never_ends_is_stopped(tmp_path: Path) -> None:
    """Beside one that ends the process, and one that raises what is no finding."""
    family = tmp_path / "family.py"
    family.write_text("from jaggedtensor.testing.families import Family\nFAMILY = Family('none')\n")
    endings = {
        "hangs": "import time\ntime.sleep(1000)\n",
        "dies": "import os\nos._exit(3)\n",
        "raises": "raise KeyError('x')\n",
        "asserts": "assert False\n",
        "passes": "",
    }
    tasks = [Task(str(family), str(family), name, text + family.read_text()) for name, text in endings.items()]
    judged = [*judge_all(tasks[:1], [("random", 0)], limit=2), *judge_all(tasks[1:], [("random", 0)], jobs=4, limit=60)]
    assert {task.name: [verdict.kind for verdict in verdicts] for task, verdicts in judged} == {
        "hangs": ["no end"],
        "dies": ["failed: the process died"],
        "raises": ["failed: KeyError"],
        "asserts": ["wrong value"],
        "passes": [""],
    }


def test_a_module_that_the_family_imports_is_mutated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mutated_helper.py").write_text("VALUE = 1\n")
    family = tmp_path / "family.py"
    family.write_text(
        "from jaggedtensor.testing.families import Family\n"
        "def run(order, seed):\n"
        "    import mutated_helper\n"
        "    assert mutated_helper.VALUE == 1\n"
        "FAMILY = Family('imports', runner=run, modules=['mutated_helper'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    tasks = [Task(str(family), "mutated_helper", name, name) for name in ("VALUE = 1", "VALUE = 2")]
    kinds = {t.name: vs[0].kind for t, vs in judge_all(tasks, [("random", 0)], limit=60)}
    assert kinds == {"VALUE = 1": "", "VALUE = 2": "wrong value"}
