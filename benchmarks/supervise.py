"""Runs a benchmark in a child process, so that a contender that takes its process with it does not take the results.

The child keeps a journal: what it is doing, and with which contender; what it measured. When it dies or hangs while it
runs an optional contender, another child starts over with that task, without that contender.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

LOST_DEVICE = 17  # the exit code of a child whose GPU takes no more work

Record = dict[str, Any]
Skip = dict[str, dict[str, str]]  # task -> contender -> why


class Journal:
    """The child's side: lines of JSON, each on disk before the next thing happens."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path

    def doing(self, task: str, contender: str | None) -> None:
        """`None`: its own work."""
        self._write({"doing": [task, contender]})

    def record(self, task: str, record: Record) -> None:
        self._write({"record": record, "task": task})

    def done(self, task: str) -> None:
        self._write({"done": task})

    def _write(self, entry: Record) -> None:
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")


@dataclass
class Story:
    """What a journal says."""

    records: list[tuple[str, Record]] = field(default_factory=list)  # (task, record)
    done: list[str] = field(default_factory=list)
    last: tuple[str, str | None] | None = None  # (task, contender)

    @classmethod
    def read(cls, path: Path) -> Story:
        story = cls()
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                break  # the child was stopped as it wrote this
            entry = json.loads(line)
            if "doing" in entry:
                story.last = tuple(entry["doing"])
            elif "record" in entry:
                story.records.append((entry["task"], entry["record"]))
            else:
                story.done.append(entry["done"])
        return story


@dataclass
class Outcome:
    records: list[Record]
    given_up: dict[str, str]  # task -> why


def supervise(
    start: Callable[[Path, list[str], Skip], list[str]],
    tasks: Iterable[str],
    optional: Collection[str],
    *,
    patience_s: float,
    progress: Callable[[list[Record]], None] = lambda records: None,
) -> Outcome:
    """Sees to it that all tasks are done.

    Args:
        start: the command of a child, given the path of its journal, its tasks, and the contenders to leave out.
        optional: contenders without which a task is still worth doing.
        patience_s: a child that writes nothing for so long is stopped.
        progress: gets all records so far whenever there are more.

    Raises:
        RuntimeError: a child failed before it began with a task.
    """
    todo, given_up = list(tasks), {}
    skip: Skip = {}
    kept: list[tuple[str, Record]] = []
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder, "journal")
            journal.touch()
            ending = _watch(start(journal, todo, skip), journal, patience_s, partial(_progress, progress, kept))
            story = Story.read(journal)
        kept += [(task, record) for task, record in story.records if task in story.done]
        todo = [task for task in todo if task not in story.done]
        if ending is None and not todo:
            break
        ending = ending or "stopped early"
        task, contender = story.last or (None, None)
        if task not in todo:
            raise RuntimeError(f"the benchmark did not start: its process {ending}")
        if contender is not None and contender in optional:
            skip.setdefault(task, {})[contender] = f"its process {ending}"
        else:
            given_up[task] = f"{contender or 'the benchmark'}: its process {ending}"
            kept += [(name, record) for name, record in story.records if name == task]
            todo.remove(task)
    records = [record for _, record in kept]
    progress(records)
    return Outcome(records, given_up)


def _progress(progress: Callable[[list[Record]], None], kept: list[tuple[str, Record]], more: list[Record]) -> None:
    progress([record for _, record in kept] + more)


def _watch(
    command: list[str], journal: Path, patience_s: float, progress: Callable[[list[Record]], None]
) -> str | None:
    """Runs a child; how it ended, None if well."""
    child = subprocess.Popen(command)
    size, seen, since = 0, 0, time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(0.2)
            if journal.stat().st_size != size:
                size, since = journal.stat().st_size, time.monotonic()
                records = [record for _, record in Story.read(journal).records]
                if len(records) != seen:
                    seen = len(records)
                    progress(records)
            elif time.monotonic() - since > patience_s:
                return f"did not stir for {patience_s:.0f} s"
    finally:
        child.kill()
        child.wait()
    if child.returncode == LOST_DEVICE:
        return "lost the GPU to an error in a kernel"
    if child.returncode < 0:
        return f"ended by signal {-child.returncode}"
    return f"ended with code {child.returncode}" if child.returncode else None
