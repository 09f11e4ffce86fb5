"""compute-sanitizer's tools and ConSan over small problems, each checked against float64 on the way.

    python benchmarks/sanitize.py                                  # on a GPU: everything, some minutes
    python benchmarks/sanitize.py --tools racecheck --only hopper --seconds 120
    python benchmarks/sanitize.py --list

First the kernels are compiled, side by side and without a tool, into a folder that all that follows shares, so that
a tool's time is not spent on compilation. Then each of compute-sanitizer's tools runs its share of the problems, and
ConSan (of Triton, which instruments kernels while it compiles them) each problem in a process of its own. A line is
printed for each problem and tool as soon as it is known. Controls (sanitize_controls.py) say what a tool can be trusted
with: faults that it must find, and right kernels without anything of ours that could be at fault. Where a tool is known
to be mistaken about one (UNSURE), what it says is printed, and not judged.

Not counted is a kind of race that racecheck reports as it does not see what orders it: what the compiler tells roles.

Exits with 1 if a problem is wrong or a tool reports something else, and if a control's fault is not found that the tool
must find. What has not finished in its time is said, and no fault.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

SANITIZERS = ("memcheck", "racecheck", "synccheck")  # of compute-sanitizer
TOOLS = (*SANITIZERS, "consan")
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ("--racecheck-report", "analysis")}
RIGHT, WRONG = ("quiet", "channel", "narrow"), ("hasty", "careless", "overrun")  # controls
FAULTS = {"racecheck": ("careless",), "consan": ("hasty", "careless"), "memcheck": ("overrun",)}  # to be found
UNSURE = {"racecheck": ("channel", "narrow", "hasty")}  # mbarriers are no order to it: right or wrong, it reports them
TOLD = "##"  # begins the lines of a child that its parent reads

K, LONG, Q = (70, 0, 130, 1), (300, 0, 130, 1), (64, 3, 150, 0)
PROBLEMS: dict[str, dict[str, Any]] = {
    "portable, 20 rows for all": dict(query=20, heads=(2, 1)),
    "portable, 200 rows for all": dict(query=200),
    "portable, jagged, causal": dict(query=Q, heads=(2, 1), causal=True),
    "portable, jagged, 128": dict(query=Q, dims=(128, 128)),
    "portable, one for each, fp32, window": dict(query=20, per_sequence=True, window=(40, 3), dtype="float32"),
    "hopper, 20 rows for all": dict(query=20, heads=(2, 1)),
    "hopper, 100 rows for all, 128": dict(query=100, dims=(128, 128)),
    "hopper, 200 rows for all": dict(query=200),
    "hopper, 200 rows for all, 128": dict(query=200, dims=(128, 128)),
    "hopper, a sequence that is cut": dict(k_lengths=(1500, 0, 37), query=70, heads=(1, 1)),
    "hopper, jagged, causal": dict(query=Q, heads=(4, 2), causal=True, slack=3),
    "hopper, jagged, 128": dict(query=Q, heads=(2, 1), dims=(128, 128), slack=3),
    "hopper, jagged, 128, causal, the same bits": dict(
        query=(200, 3, 150, 0), k_lengths=(270, 0, 130, 1), dims=(128, 128), causal=True, deterministic=True
    ),
    "hopper, jagged, 128, all as long": dict(k_lengths=(1100,), query=(1100,), dims=(128, 128)),
    # Rows are anchored at the maximum of their tile's first block, which large scores spoil; a second launch mends it.
    "hopper, jagged, 128, anchored": dict(k_lengths=LONG, query=Q, dims=(128, 128), scale=2.0, dtype="float16"),
    "hopper, 200 rows for all, anchored": dict(k_lengths=LONG, query=200, scale=2.0, dtype="float16"),
    "hopper, one for each, 128, window": dict(query=20, per_sequence=True, dims=(128, 128), window=(40, 3)),
}


# -- a child, which runs problems ------------------------------------------------------------------------------------


def run(name: str) -> None:
    """Forward and backward of a problem, or a control.

    Raises:
        AssertionError: a result is not what float64 says.
    """
    if name in RIGHT + WRONG:
        return getattr(importlib.import_module("sanitize_controls"), name)()
    import torch

    from jaggedtensor import JaggedLayout, JaggedTensor
    from jaggedtensor.schedules.types import ScheduleKind, TileAxis
    from jaggedtensor.testing.bounds import Call

    options = dict(PROBLEMS[name])
    lengths, dtype = options.pop("k_lengths", K), getattr(torch, options.pop("dtype", "bfloat16"))
    call = Call.random(lengths, dtype=dtype, **options)
    if "cut" in name:  # which is decided where the lengths are known on the host
        layout = JaggedLayout.from_lengths(torch.tensor(lengths)).to("cuda")
        keys = JaggedTensor(call.keys.values(), layout)
        call = replace(call, keys=keys, values=keys.with_values(call.values.values()))
    with more_than_enough() if "anchored" in name else nullcontext():
        got = call.run(name.partition(",")[0])
    torch.cuda.synchronize()
    call.check(got)
    schedules = [*call.keys.layout._schedules]
    if "cut" in name:
        assert ScheduleKind.STREAM_K in {schedule.kind for schedule in schedules}
    if "as long" in name:  # tiles of the backward pass have parts, which another kernel adds up
        assert any(schedule.axis is TileAxis.KEY and schedule.slots for schedule in schedules)


def more_than_enough() -> AbstractContextManager[Any]:
    """Little work is as much as it takes for the Hopper forward to anchor its rows."""
    from jaggedtensor.kernels.hopper.attention_fwd import launch

    return patch.object(launch, "MUCH", 0)


def child(names: Sequence[str]) -> None:
    """Run problems one after the other, and tell the parent of each."""
    import torch
    from triton import knobs

    compiling = [0.0]

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiling[0] += times.total / 1e6

    knobs.compilation.listener = listen
    for name in names:
        print(TOLD, "begin", name, flush=True)
        compiling[0], begin = 0.0, time.monotonic()
        try:
            run(name)
            verdict = "right"
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            verdict = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        taken = time.monotonic() - begin - compiling[0]
        print(TOLD, "end", f"{taken:.1f} s and {compiling[0]:.0f} s of compilation:", verdict, flush=True)
        try:
            torch.cuda.synchronize()
        except Exception:  # the context is lost
            os._exit(1)
    os._exit(0)  # without the binding code's report of leaks


# -- the parent ------------------------------------------------------------------------------------------------------


PLACE = re.compile(r"(Write|Read) access at (\w+)\+0x[0-9a-f]+ in ([^:\s]+):(\d+)")


def of_the_compiler(report: str) -> bool:
    """Whether both sides of a race are what the compiler adds to a kernel with roles.

    The default role writes into shared memory which role each other warp plays next, or that there is none; the others
    read it. Between the two, and before the next write, all warps pass named barrier 1. These instructions have the
    line of the kernel's `def`, which no instruction of a role has. tests/compile/test_sanitize.py reads them from the
    machine code.
    """
    places = PLACE.findall(report)
    return len(places) > 1 and all(is_first_line(*place) for _, *place in places)


def files_of(name: str) -> list[Path]:
    """A file that a report names. Without a folder, it is one of this project."""
    found = [Path(name)] if os.path.isabs(name) else Path(__file__).parents[1].rglob(f"*/{name}")
    return [path for path in found if path.is_file()]


@functools.cache
def is_first_line(kernel: str, name: str, line: str) -> bool:
    """Whether a line of a file is that of the `def` of a kernel."""
    lines = [path.read_text().splitlines()[int(line) - 1 : int(line)] for path in files_of(name)]
    return any(found and found[0].startswith(f"def {kernel}(") for found in lines)


@dataclass
class Finding:
    """What came of a problem under a tool."""

    name: str
    verdict: str = "did not finish"
    reports: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[str]:
        """Reports but those that are known."""
        return [report for report in self.reports if not of_the_compiler(report)]

    @property
    def is_open(self) -> bool:
        """Nobody knows."""
        return "did not finish" in self.verdict or "not reached" in self.verdict

    def is_fine(self, tool: str) -> bool:
        """Right, and nothing reported; or a fault that was put in, and found, as far as the tool can."""
        if self.name in UNSURE.get(tool, ()):
            return "right" in self.verdict
        wrong = bool(self.errors) or not (self.is_open or "right" in self.verdict)
        return wrong if self.name in FAULTS.get(tool, ()) else not wrong and not self.is_open

    def line(self, tool: str) -> str:
        said = [f"{len(self.errors)} reports"] if self.errors else []
        known = sum(map(of_the_compiler, self.reports))
        said += [f"{known} of the compiler's messages to roles"] if known else []
        missed = self.name in FAULTS.get(tool, ()) and not (self.is_open or self.is_fine(tool))
        said = said or ["its fault is not found" if missed else "nothing"]
        unsure = " (not judged)" if self.name in UNSURE.get(tool, ()) else ""
        return f"{tool:10}{self.name:44}{self.verdict}; {', '.join(said)}{unsure}"


@dataclass
class Run:
    """A tool over some problems, in as many children as it takes."""

    tool: str
    names: list[str]
    environment: dict[str, str]
    until: float
    verbose: bool = False
    findings: list[Finding] = field(default_factory=list)

    def all(self) -> list[Finding]:
        waiting = list(self.names)
        while waiting and time.monotonic() < self.until:
            done = self._child(waiting)
            if not done:
                break
            waiting = waiting[done:]
        self.findings += [Finding(name, "was not reached") for name in waiting]
        return self.findings

    def _child(self, names: list[str]) -> int:
        """How many of the problems have been begun."""
        command = [sys.executable, __file__, "--child", *names]
        if self.tool in SANITIZERS:
            command = [
                "compute-sanitizer", "--tool", self.tool, "--target-processes", "application-only", "--show-backtrace",
                "no", "--strip-paths", "no", "--print-limit", "0", "--kernel-name", "regex=^[a-z][a-z0-9_]*_kernel$",
                *OPTIONS.get(self.tool, ()), *command,
            ]  # fmt: skip
        process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        stop = threading.Timer(max(0.0, self.until - time.monotonic()), lambda: os.killpg(process.pid, signal.SIGKILL))
        stop.start()
        begun, finding, report, rest = 0, Finding("start"), "", []
        assert process.stdout is not None
        for raw in process.stdout:
            text = raw.decode(errors="replace").rstrip()
            if self.verbose:
                print(f"{'':10}{text}", flush=True)
            if text.startswith(TOLD):
                _, what, told = text.split(" ", 2)
                if what == "begin":
                    begun += 1
                    finding, rest = Finding(told), []
                    self.findings.append(finding)
                else:
                    finding.verdict = told
                    print(finding.line(self.tool), flush=True)
                    for error in finding.errors if self.tool != "consan" else ():
                        print(f"{'':10}{error}", flush=True)
                    if "right" not in told and not finding.is_fine(self.tool):
                        print("\n".join(f"{'':10}{line}" for line in rest[-12:]), flush=True)
            elif text.startswith("========="):
                said = text.strip("= ")
                if not said and report:
                    finding.reports.append(report)
                    report = ""
                elif report or re.match(
                    r"Error: |Warning: |Internal |Invalid |Barrier |Program hit|Uninit|Misaligned|.*[Rr]ace", said
                ):
                    report = f"{report} {said}".strip()
            else:
                rest.append(text)
        if report:
            finding.reports.append(report)
        process.wait()
        stop.cancel()
        if finding.verdict == "did not finish":
            print(finding.line(self.tool), flush=True)
            if not finding.is_fine(self.tool):
                print("\n".join(f"{'':10}{line}" for line in rest[-12:]), flush=True)
        return begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of problems")
    parser.add_argument("--seconds", type=float, default=1200, help="of all tools together, compilation included")
    parser.add_argument("--processes", type=int, default=2, help="of each of compute-sanitizer's tools")
    parser.add_argument("--compiling", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--verbose", action="store_true", help="all that the children say")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    names = [name for name in PROBLEMS if any(part in name for part in arguments.only)]
    if arguments.list:
        return print(*names, sep="\n")
    sys.exit(run_tools(arguments, names))


def run_tools(arguments: argparse.Namespace, names: list[str]) -> int:
    """The exit status."""
    until = time.monotonic() + arguments.seconds
    cache = os.environ.get("TRITON_CACHE_DIR") or tempfile.mkdtemp(prefix="sanitize-")
    plain = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
    consan = {**plain, "TRITON_INSTRUMENTATION_MODE": "consan"}
    exact = {**plain, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that an allocation ends where its tensor does
    outcomes: list[tuple[str, list[Finding]]] = []

    def go(tool: str, names: Sequence[str], environment: dict[str, str]) -> None:
        outcomes.append((tool, Run(tool, list(names), environment, until, arguments.verbose).all()))

    # Compilation with ConSan takes longest: it goes on beside the rest. Portable kernels come last there.
    instrumented = [*RIGHT[1:], *FAULTS["consan"], *sorted(names, key=lambda name: name.startswith("portable"))]
    sanitized = [tool for tool in SANITIZERS if tool in arguments.tools]
    with ThreadPoolExecutor(arguments.compiling) as side, ThreadPoolExecutor(arguments.compiling) as pool:
        jobs: list[Any] = []
        if "consan" in arguments.tools:
            jobs += [side.submit(go, "consan", [name], consan) for name in instrumented]
        if sanitized:
            first = [pool.submit(go, "none", [name], plain) for name in (*names, "channel", "narrow")]
            for job in first:
                job.result()
        shares = max(1, min(arguments.processes, len(names)))
        for tool in sanitized:
            environment = exact if tool == "memcheck" else plain
            controls = dict.fromkeys((*RIGHT, *UNSURE.get(tool, ()), *FAULTS.get(tool, ())))
            jobs.append(pool.submit(go, tool, [*controls], environment))
            jobs += [pool.submit(go, tool, names[i::shares], environment) for i in range(shares)]
        for job in jobs:
            job.result()
    bad = [(tool, finding) for tool, findings in outcomes for finding in findings if not finding.is_fine(tool)]
    open_ = [(tool, finding) for tool, finding in bad if finding.is_open]
    print("\nunfinished:", *(f"{tool}: {finding.name}" for tool, finding in open_), sep="\n  ")
    print(
        "faults:",
        *(finding.line(tool) for tool, finding in bad if (tool, finding) not in open_),
        sep="\n  ",
        flush=True,
    )
    return int(len(bad) > len(open_))


if __name__ == "__main__":
    main()
