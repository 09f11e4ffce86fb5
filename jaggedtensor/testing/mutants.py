"""Breaks kernels on purpose, in one place at a time, and counts how many of the breaks are found on the emulator.

>>> text = "@gluon.jit\\ndef role(full, ring):\\n    mbarrier.wait(full.index(0), phase)\\n    ring.load()\\n"
>>> [mutant.name for mutant in mutants_of(text)]  # doctest: +NORMALIZE_WHITESPACE
['role: delete mbarrier.wait(full.index(0), phase)', 'role: move down mbarrier.wait(full.index(0), phase)',
 'role: other phase in mbarrier.wait(full.index(0), phase)']

What is deleted or altered: waits, arrivals, expected bytes, commits, fences, phase flips, buffer indices, counts of
barriers, predicates. Arrivals, commits and fences are also moved before the statement that they follow, waits behind
the next, but not past another of their kind. A mutant is found when the emulator reports it or a value is wrong, under
some order and seed. One that is not found shows a test that is missing, or a fault that the emulator cannot see, or
changes nothing that matters: then the family says why.

    python -m jaggedtensor.testing.mutants tests/emulator/mechanisms/tma_ring.py

A family is a module, by its path or its dotted name, with a `FAMILY` (see `jaggedtensor.testing.families`). A table at
the end has the count of each; it exits with 1 if less than a share of some family's mutants (`--floor`) is found.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import ModuleType
from typing import Any

from jaggedtensor.testing.families import Bad

DELETED = {"init", "wait", "arrive", "expect", "tcgen05_commit", "fence_async_shared", "store_wait", "barrier"}
MOVED_UP = {"arrive", "tcgen05_commit", "fence_async_shared"}
MOVED_DOWN = {"wait", "store_wait"}
IDLE = {"index", "permute", "slice", "reshape", "reinterpret", "program_id", "range", "zeros"}  # touch no memory
Node = ast.stmt | ast.expr
Change = tuple[Node, str]  # a part of the tree and the text that takes its place
Edit = tuple[str, Node, list[Change]]  # what is done, the statement or call that shows where, and how


@dataclass(frozen=True)
class Mutant:
    """A source text with one change.

    Attributes:
        name: says what was changed, the same from run to run and wherever the line is.
        line: where, counted from 1.
    """

    name: str
    line: int
    text: str


def mutants_of(text: str) -> list[Mutant]:
    """Every mutant of the device functions in a module's source."""
    source = _Source(text)
    found: list[Mutant] = []
    seen = {text}
    names: Counter[str] = Counter()
    for function, root in _device_functions(ast.parse(text)):
        edits = sorted(_edits(source, root), key=lambda edit: edit[1].lineno)
        for what, shown, changes in edits:
            changed = source.replaced(*changes)
            if changed in seen:
                continue
            seen.add(changed)
            ast.parse(changed)
            name = f"{function}: {what} {source.short(shown)}"
            names[name] += 1
            number = f" #{names[name]}" if names[name] > 1 else ""
            found.append(Mutant(name + number, shown.lineno, changed))
    return found


def bad_variant(text: str, bad: Bad) -> str:
    """The source of a family with a known fault put in."""
    if bad.edit is None:
        return next(mutant.text for mutant in mutants_of(text) if mutant.name == bad.change)
    old, new = bad.edit
    code, marker, rest = text.partition("\nBAD = ")  # the list of faults is in the same file
    if code.count(old) != 1:
        raise ValueError(f"{bad.change}: expected once in the source, found {code.count(old)} times: {old}")
    return code.replace(old, new) + marker + rest


def _device_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions under `jit`, methods of aggregates too, with their qualified names."""

    def walk(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and any(_name(d) == "jit" for d in node.decorator_list):
                yield prefix + node.name, node

    yield from walk(tree.body, "")


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, of a call too; "" for anything else."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Source:
    """A text whose parts are replaced by their place in its syntax tree, which counts columns in bytes."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: Node) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: Node) -> str:
        begin, end = self.span(node)
        return self.data[begin:end].decode()

    def short(self, node: Node) -> str:
        """On one line, for names."""
        return " ".join(self.of(node).split())

    def replaced(self, *changes: Change) -> str:
        data = self.data
        for node, new in sorted(changes, key=lambda change: self.span(change[0]), reverse=True):
            begin, end = self.span(node)
            lost = (
                data[begin:end].count(b"\n") - new.count("\n") if len(changes) == 1 else 0
            )  # lines keep their numbers
            data = data[:begin] + (new + "\n" * max(0, lost)).encode() + data[end:]
        return data.decode()


def _edits(source: _Source, function: ast.FunctionDef) -> Iterator[Edit]:
    """The changes of one device function."""
    for parent in ast.walk(function):
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(body, list):
                for before, statement, after in zip([None, *body], body, [*body[1:], None], strict=False):
                    yield from _edits_of_statement(source, before, statement, after)


def _acts(statement: ast.stmt | None, kind: set[str]) -> bool:
    """Does it touch memory or barriers, and is it not one of `kind`, past which moving changes nothing?"""
    if statement is None or (isinstance(statement, ast.Expr) and _name(statement.value) in kind):
        return False
    return any(isinstance(node, ast.Call) and _name(node) not in IDLE for node in ast.walk(statement))


def _edits_of_statement(
    source: _Source, before: ast.stmt | None, statement: ast.stmt, after: ast.stmt | None
) -> Iterator[Edit]:
    of = source.of
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.BitXor):
        yield "delete", statement, [(statement, "pass")]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        name = _name(statement.value)
        if name in DELETED:
            yield "delete", statement, [(statement, "pass")]
        # Two arrivals, or two waits, may change places.
        if name in MOVED_UP and _acts(before, MOVED_UP - {"fence_async_shared"}):
            assert before is not None
            yield "move up", statement, [(before, of(statement)), (statement, of(before))]
        if name in MOVED_DOWN and _acts(after, MOVED_DOWN):
            assert after is not None
            yield "move down", statement, [(statement, of(after)), (after, of(statement))]
    if isinstance(statement, ast.Assign) and _name(statement.value) == "warpgroup_mma_wait":
        assert isinstance(statement.value, ast.Call)
        deps = {k.arg: k.value for k in statement.value.keywords}["deps"]
        one = isinstance(deps, (ast.Tuple, ast.List)) and len(deps.elts) == 1
        kept = deps.elts[0] if one else deps  # type: ignore[attr-defined]
        yield "delete", statement, [(statement.value, of(kept))]
    # What is inside of a loop or a branch is a statement of its own.
    parts = [getattr(statement, field) for field in ("test", "iter") if hasattr(statement, field)]
    for part in parts if hasattr(statement, "body") else [statement]:
        for node in ast.walk(part):
            if isinstance(node, ast.Call):
                yield from _edits_of_call(source, statement, node)
            elif isinstance(node, ast.BinOp) and _flips(node):
                kept = node.left if isinstance(node.op, ast.BitXor) else node.right
                yield "no flip in", statement, [(node, of(kept))]


def _edits_of_call(source: _Source, statement: ast.stmt, call: ast.Call) -> Iterator[Edit]:
    of, name = source.of, _name(call)
    keywords = {k.arg: k.value for k in call.keywords}

    def argument(place: int, *names: str) -> ast.expr | None:
        return call.args[place] if len(call.args) > place else next((keywords[n] for n in names if n in keywords), None)

    phase, size, count = argument(1, "phase"), argument(1, "bytes_per_cta"), argument(1, "count")
    pending = argument(0, "pendings", "num_outstanding")
    if name == "wait" and phase:
        yield "other phase in", call, [(phase, f"({of(phase)}) ^ 1")]
    if name == "expect" and size:
        yield "half the bytes in", call, [(size, f"({of(size)}) // 2")]
    if name == "init" and count:
        yield "one more in", call, [(count, f"{of(count)} + 1")]
    if name in ("store_wait", "warpgroup_mma_wait") and pending:
        yield "one more in", call, [(pending, f"{of(pending)} + 1")]
    if name in ("arrive", "expect", "wait", "tcgen05_commit") and "pred" in keywords:
        yield "always", call, [(keywords["pred"], "True")]
    if name == "index" and len(call.args) == 1 and not isinstance(call.args[0], ast.Constant):
        assert isinstance(call.func, ast.Attribute)
        at, buffers = of(call.args[0]), of(call.func.value)
        initialises = any(isinstance(n, ast.Call) and _name(n) == "init" for n in ast.walk(statement))
        other = "0" if initialises else f"(({at}) + 1) % {buffers}.shape[0]"
        yield f"{'first' if initialises else 'next'} {source.short(call)} in", statement, [(call.args[0], other)]
    barriers = keywords.get("mbarriers")
    if isinstance(barriers, (ast.List, ast.Tuple)):
        for gone in barriers.elts:
            rest = ", ".join(of(barrier) for barrier in barriers.elts if barrier is not gone)
            yield f"no {source.short(gone)} in", call, [(barriers, f"[{rest}]")]


def _flips(node: ast.BinOp) -> bool:
    """Is it `x ^ 1` or `1 - x`?"""
    if isinstance(node.op, ast.BitXor):
        return isinstance(node.right, ast.Constant) and node.right.value == 1
    return isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant) and node.left.value == 1


# Running

Run = tuple[str, int]  # an order of the emulator, and a seed
WRONG_VALUE, NO_END = "wrong value", "no end"


def schedules(seeds: int) -> list[Run]:
    """Every order of the emulator, those that draw from a seed with `seeds` of them."""
    from jaggedtensor.kernels.emulator import ORDERS

    return [(order, seed) for seed in range(seeds) for order in ORDERS]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `kind` of the finding, or "" when nothing was found."""

    kind: str
    detail: str = ""
    schedule: str = ""
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether the mutant was told from the original by a finding."""
        return bool(self.kind) and not self.broken

    @property
    def broken(self) -> bool:
        """The run failed for a reason that is no finding, such as something that the emulator does not know."""
        return self.kind.startswith("failed")


class _Replaced(importlib.abc.MetaPathFinder):
    """Imports a module by its dotted name from another file."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path) if name == self.name else None


def load_module(name: str, path: str | Path | None = None) -> ModuleType:
    """A module by its dotted name, or by the path of its file (`name` may be one), or `name` from another file."""
    if path is None and not name.endswith(".py"):
        return importlib.import_module(name)
    dotted = "_family_" + Path(name).stem
    spec = importlib.util.spec_from_file_location(dotted, path or name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[dotted] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_of(module: str) -> str:
    """The text of a module, without importing it."""
    if module.endswith(".py"):
        return Path(module).read_text()
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def judge(family: str, module: str, text: str, runs: Sequence[Run], every: bool = False) -> list[Verdict]:
    """Runs a family with a module of it replaced by `text`, until something is found, or all runs if `every`.

    Gives the verdicts that found something, or one that did not. For a process of its own, since it imports the
    changed module under the name of the right one.
    """
    if module in sys.modules:
        raise RuntimeError(f"{module} is imported already, so it cannot be replaced: judge it in a process of its own")
    begin = time.monotonic()
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (Path(module).name if module.endswith(".py") else module.rpartition(".")[2] + ".py")
        path.write_text(text)
        sys.meta_path.insert(0, _Replaced(module, str(path)))
        for order, seed in runs:
            kind, detail = _outcome(family, path if family == module else None, order, seed)
            if kind:
                verdicts.append(Verdict(kind, detail, f"{order} {seed}", time.monotonic() - begin))
                if not every:
                    break
    return verdicts or [Verdict("", seconds=time.monotonic() - begin)]


def _outcome(family: str, path: Path | None, order: str, seed: int) -> tuple[str, str]:
    from jaggedtensor.kernels.emulator.errors import EmulationError, KernelRaised

    try:
        load_module(family, path).FAMILY.run(order, seed)
    except AssertionError as error:
        return WRONG_VALUE, str(error)
    except KernelRaised as error:
        return f"failed: {error.kind}", str(error)
    except EmulationError as error:
        return error.kind, str(error)
    except Exception as error:
        return f"failed: {type(error).__name__}", str(error)
    return "", ""


@dataclass(frozen=True)
class Task:
    """One text to be judged: the right one (`mutant` is None), a mutant, or a known-bad variant."""

    family: str
    module: str
    name: str
    text: str


def judge_all(
    tasks: Sequence[Task], runs: Sequence[Run], *, jobs: int = 2, limit: float = 60.0, every: bool = False
) -> Iterator[tuple[Task, list[Verdict]]]:
    """Judges texts in processes of their own, as they end; one that is not done in `limit` seconds is stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton.experimental.gluon.language", "jaggedtensor.kernels.emulator"])
    waiting = list(reversed(tasks))
    running: dict[Any, tuple[Task, Any, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                receive, send = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(task, runs, every, send), daemon=True)
                process.start()
                send.close()
                running[receive] = task, process, time.monotonic() + limit
            soonest = min(end for _, _, end in running.values())
            ended = wait_for_any(list(running), timeout=max(0.0, soonest - time.monotonic()))
            for receive, (task, process, end) in list(running.items()):
                if receive in ended:
                    verdicts = _received(receive)
                elif end <= time.monotonic():
                    process.kill()
                    verdicts = [Verdict(NO_END, f"not done after {limit:.0f} s", seconds=limit)]
                else:
                    continue
                del running[receive]
                process.join()
                yield task, verdicts
    finally:
        for _, process, _ in running.values():
            process.kill()


def _child(task: Task, runs: Sequence[Run], every: bool, send: Any) -> None:
    import torch

    torch.set_num_threads(1)
    send.send(judge(task.family, task.module, task.text, runs, every))


def _received(receive: Any) -> list[Verdict]:
    try:
        return receive.recv()
    except EOFError:
        return [Verdict("failed: the process died")]


# Reporting


@dataclass(frozen=True)
class Score:
    """What a family's mutants came to; `right` is the verdict on the unchanged text, which must find nothing."""

    family: str
    right: Verdict
    verdicts: dict[str, Verdict]
    equivalent: dict[str, str]

    @property
    def survivors(self) -> list[str]:
        """Not found and not explained; a run that failed for another reason counts as not found."""
        return [name for name, v in self.verdicts.items() if not v.found and name not in self.equivalent]

    @property
    def mistaken(self) -> list[str]:
        """Explained as equivalent, but found, or there is no such mutant."""
        return [n for n in self.equivalent if n not in self.verdicts or self.verdicts[n].found]

    @property
    def counts(self) -> tuple[int, int]:
        """Found, and all that are not equivalent."""
        total = len([name for name in self.verdicts if name not in self.equivalent])
        return total - len(self.survivors), total

    def passes(self, floor: float) -> bool:
        """Whether enough are found, no excuse is wrong, and the unchanged kernel is right."""
        found, total = self.counts
        return found >= floor * total and not self.mistaken and not self.right.kind

    def __str__(self) -> str:
        killed, total = self.counts
        by = Counter(v.kind for v in self.verdicts.values() if v.found)
        lines = [
            f"{self.family}: {killed} / {total} found, {len(self.equivalent)} equivalent; "
            + ", ".join(f"{kind} {n}" for kind, n in by.most_common())
        ]
        if self.right.kind:
            lines.append(f"  the unchanged kernel does not pass: {self.right.kind}: {self.right.detail}")
        for name in self.survivors:
            kind = self.verdicts[name].kind
            lines.append(f"  survives: {name}" + (f" ({kind}: {self.verdicts[name].detail[:200]})" if kind else ""))
        lines += [f"  explained as equivalent, but is not: {name}" for name in self.mistaken]
        return "\n".join(lines)


def score(
    family: str,
    runs: Sequence[Run],
    *,
    jobs: int = 2,
    limit: float = 60.0,
    only: int | None = None,
    title: str = "",
) -> Score:
    """Judges the mutants of a family, or `only` so many, evenly picked, with a bar of progress on a terminal."""
    about = load_module(family).FAMILY
    tasks = [
        Task(family, module, mutant.name, mutant.text)
        for module in about.modules or (family,)
        for mutant in mutants_of(source_of(module))
    ]
    names = {task.name for task in tasks}
    if only is not None:
        tasks = [tasks[i * len(tasks) // only] for i in range(min(only, len(tasks)))]
    first = (about.modules or (family,))[0]
    right, verdicts = Verdict(""), {}
    judged = judge_all([Task(family, first, "", source_of(first)), *tasks], runs, jobs=jobs, limit=limit)
    for task, found in _with_progress(judged, len(tasks) + 1, title + about.name):
        if task.name:
            verdicts[task.name] = found[0]
        else:
            right = found[0]
    verdicts = {task.name: verdicts[task.name] for task in tasks}  # in the order of the source
    equivalent = {k: v for k, v in about.equivalent.items() if k in verdicts or k not in names}
    return Score(about.name, right, verdicts, equivalent)


def _with_progress(items: Iterable[Any], total: int, name: str) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, total=total, desc=name, disable=not sys.stderr.isatty(), leave=False)


FLOOR = 0.95  # share of a family's mutants that must be found


def table_of(scores: Sequence[Score], seconds: Sequence[float]) -> str:
    """A line for each family, and one for all."""
    width = max(len(s.family) for s in scores)
    rows = [f"{'family':{width}} {'mutants':>8} {'found':>6} {'share':>7} {'equivalent':>11} {'minutes':>8}"]
    total = [0, 0, 0]
    for result, took in zip(scores, seconds, strict=True):
        numbers = (result.counts[1], result.counts[0], len(result.equivalent))
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        rows.append(_line(result.family.ljust(width), numbers, took))
    return "\n".join([*rows, _line("all".ljust(width), total, sum(seconds))])


def _line(name: str, numbers: Sequence[int], seconds: float) -> str:
    mutants, found, equivalent = numbers
    return f"{name} {mutants:8} {found:6} {found / max(1, mutants):7.1%} {equivalent:11} {seconds / 60:8.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the score of each family, then a table of all; 1 if one is below the floor or wrong otherwise, else 0."""
    parser = argparse.ArgumentParser(prog="python -m jaggedtensor.testing.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("family", nargs="+", help="a file or a dotted module with a FAMILY")
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each order that has a choice")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--sample", type=int, help="only so many mutants of each family, evenly picked")
    parser.add_argument("--floor", type=float, default=FLOOR, help="share of each family's that must be found")
    parser.add_argument("--verbose", action="store_true", help="print the verdict on every mutant")
    given = parser.parse_args(arguments)
    scores, seconds = [], []
    for number, family in enumerate(given.family):
        begin = time.monotonic()
        title = f"{number + 1}/{len(given.family)} "
        runs = schedules(given.seeds)
        result = score(family, runs, jobs=given.jobs, limit=given.limit, only=given.sample, title=title)
        print(result, flush=True)
        if given.verbose:
            for name, verdict in result.verdicts.items():
                print(f"  {verdict.kind or 'nothing found'} [{verdict.schedule}, {verdict.seconds:.1f} s]: {name}")
        scores.append(result)
        seconds.append(time.monotonic() - begin)
    print(table_of(scores, seconds))
    return 0 if all(result.passes(given.floor) for result in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
