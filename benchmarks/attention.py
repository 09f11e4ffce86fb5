"""Attention of jagged batches on a GPU, beside what else computes it.

    python benchmarks/attention.py --suite pma,self,dense --peers fa2,fa3,fa4 --json benchmarks/results/nvidia-h200.json
    python benchmarks/attention.py --overhead --memory --peers fa2
    python benchmarks/attention.py --device cpu --tiny --backend cpu --peers nested,padded        # a dry run

Every contender is compared with a float64 reference before it is timed; one that is wrong gets no speed. See
docs/benchmarks.md for the method.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from checks import Deviation, Reference
from peers import PEERS, Bound, Contender, contender
from supervise import LOST_DEVICE, Journal, Skip, supervise
from timing import FULL, QUICK, Call, Effort, host_microseconds, interleaved, sustained
from workloads import PASSES, SMALL, SUITES, WORKLOADS, Inputs, Workload

from jaggedtensor.kernels.dispatch import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
MEMORY_WORKLOAD = "pma128-lognormal"
COSTS = ("overhead", "memory")  # tasks that measure no speed

PRESENT = "present"

Without = dict[str, str]  # contender -> why it has no number


@dataclass(frozen=True)
class Setup:
    """Who is measured, where and for how long. The first of `names` is ours, the others are peers."""

    names: list[str]
    device: torch.device
    passes: list[str] = field(default_factory=lambda: ["fwd", "bwd"])
    effort: Effort = FULL
    sustained_peers: bool = False


class NotMeasured(Exception):
    """A contender gets no speed: above all, because what it computes is not attention."""


class Field:
    """The contenders of one task, and why some have dropped out."""

    def __init__(self, task: str, setup: Setup, journal: Journal, skip: Without) -> None:
        self._task, self._device, self._journal = task, setup.device, journal
        self.without: Without = dict(skip)
        self.contenders: dict[str, Contender] = {}
        for name in setup.names:
            if name in skip:
                continue
            entrant = contender(name)
            reason = self.attempt(name, partial(_presence, entrant, setup.device))
            if reason == PRESENT:
                self.contenders[name] = entrant
            elif reason is not None:
                self.without[name] = reason

    def for_pass(self) -> Field:
        """The same, where who drops out is missing from one pass only."""
        twin = copy.copy(self)
        twin.without = dict(self.without)
        return twin

    def attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """What the action returns once the device has done all of it; None, with a reason kept, if it raises."""
        self._journal.doing(self._task, name)
        try:
            result = action()
            _synchronize(self._device)
        except Exception as error:
            self.without[name] = _describe(error)
            result = None
        if result is None:
            self._recover()
        self._journal.doing(self._task, None)
        return result

    def _recover(self) -> None:
        try:
            _free_memory(self._device)
            _synchronize(self._device)
        except Exception:  # the context is gone: nothing more can run in this process
            print(f"{self._task}: the GPU takes no more work in this process", flush=True)
            os._exit(LOST_DEVICE)


def _presence(entrant: Contender, device: torch.device) -> str:
    return entrant.missing(device) or PRESENT


def measure(
    workload: Workload, setup: Setup, journal: Journal | None = None, skip: Without | None = None
) -> Iterator[dict[str, Any]]:
    """A result for each pass. `skip` names contenders that must not run."""
    began = time.monotonic()
    device, ours = setup.device, setup.names[0]
    journal = Journal() if journal is None else journal
    journal.doing(workload.name, "inputs")
    sets = _number_of_sets(workload, len(setup.names), device)
    inputs = [Inputs.make(workload, device, seed) for seed in range(sets)]
    reference = Reference.of(inputs[0], gradients=any(which != "fwd" for which in setup.passes))
    _synchronize(device)
    journal.doing(workload.name, None)
    _print_notes(workload, inputs, device)

    entrants = Field(workload.name, setup, journal, skip or {})
    bound = {name: _bind(name, workload.name, inputs, reference, entrants) for name in entrants.contenders}
    if bound.get(ours) and not (inputs[0].lengths == 0).any():
        check = partial(_check_with_an_empty_one, entrants.contenders[ours], workload, device)
        entrants.attempt(ours, check)

    for which in setup.passes:
        row = _measure_pass(workload, setup, which, bound, reference, entrants.for_pass())
        print(f"{_progress(row)} [{time.monotonic() - began:.0f} s]", flush=True)
        yield row
        _free_memory(device)


def _bind(name: str, task: str, inputs: list[Inputs], reference: Reference, entrants: Field) -> list[Bound]:
    """The contender with each set of inputs; with none if it fails, with the first if it has no memory for more."""
    entrant = entrants.contenders[name]
    first = entrants.attempt(name, partial(_bind_and_check, entrant, inputs[0], reference))
    bound = [] if first is None else [first]
    for other in inputs[1:] if bound else []:
        more = entrants.attempt(name, partial(entrant.bind, other))
        if more is None:
            print(f"{task} {name}: one set of inputs only, {entrants.without.pop(name)}", flush=True)
        else:
            bound.append(more)
    return bound


def _measure_pass(
    workload: Workload,
    setup: Setup,
    which: str,
    bound: dict[str, list[Bound]],
    reference: Reference,
    entrants: Field,
) -> dict[str, Any]:
    ours, *peers = setup.names
    calls: dict[str, list[Call]] = {}
    for name, own in bound.items():
        if name not in entrants.without:
            entrant = entrants.contenders[name]
            made = entrants.attempt(name, partial(_calls, entrant, own, which, reference))
            if made is not None:
                calls[name] = made
    times = interleaved(calls, setup.effort, setup.device, entrants.attempt)
    long: dict[str, float] = {}
    for name, burst_ms in times.items():
        if name == ours or setup.sustained_peers:
            took = entrants.attempt(name, partial(sustained, calls[name], burst_ms, setup.effort, setup.device))
            if took is not None:
                long[name] = took

    ms = times.get(ours)
    row: dict[str, Any] = {
        "workload": workload.name,
        "pass": which,
        "backend": ours,
        "ms": ms,
        "sustained_ms": long.get(ours),
        "tflops": None if ms is None else workload.flops(which) / ms / 1e9,
        "floor_share": None if ms is None else workload.floor_ms(which) / ms,
        "peers": {name: times[name] for name in peers if name in times},
        "without": {name: entrants.without[name] for name in peers if name not in times},
    }
    if ms is None:
        row["error"] = entrants.without[ours]
    if setup.sustained_peers:
        row["peers_sustained"] = {name: long[name] for name in peers if name in long}
    return row


def _calls(entrant: Contender, bound: list[Bound], which: str, reference: Reference) -> list[Call]:
    """What is timed, on each set of inputs, once its gradients are known to be right."""
    if which == "fwd":
        return [x.infer for x in bound]
    if entrant.forward_only:
        raise NotMeasured("forward only")
    _check_gradients(bound[0], reference)
    if which == "both":
        return [x.train for x in bound]
    return [partial(x.backward, x.forward()) for x in bound]  # each over a graph that is kept


def _bind_and_check(entrant: Contender, inputs: Inputs, reference: Reference) -> Bound:
    bound = entrant.bind(inputs)
    _poison(bound)
    _insist(reference.check_forward(bound.pack_out(bound.infer())))
    return bound


def _check_gradients(bound: Bound, reference: Reference) -> None:
    _poison(bound)
    out = bound.forward()
    _insist(reference.check_forward(bound.pack_out(out)))
    _poison(bound)
    _insist(reference.check_backward(*bound.pack_gradients(bound.backward(out, retain_graph=False))))


def _check_with_an_empty_one(entrant: Contender, workload: Workload, device: torch.device) -> bool:
    """For workloads without an empty sequence: the same problem with one among a few."""
    drawn = workload.draw().sort().values
    few = torch.stack((drawn[0], drawn.new_zeros(()), drawn[len(drawn) // 2]))
    inputs = Inputs.make(workload, device, seed=len(drawn), lengths=few)
    reference = Reference.of(inputs)
    _check_gradients(_bind_and_check(entrant, inputs, reference), reference)
    return True


def _poison(bound: Bound) -> None:
    """Leaves NaN in the memory that outputs and gradients will probably get, so that what is not written shows."""
    held = [torch.full_like(x, math.nan, requires_grad=False) for x in (*bound.leaves, bound.grad_out)]
    del held


def _insist(deviation: Deviation) -> None:
    if deviation.wrong:
        raise NotMeasured(f"WRONG: {deviation}")


def overhead(setup: Setup, journal: Journal, skip: Without) -> dict[str, Any]:
    """Host time of an eager forward of a small problem, once all that can be cached is."""
    device = setup.device
    entrants = Field("overhead", setup, journal, skip)
    inputs = Inputs.make(SMALL, device, seed=0)
    repeats = 300 if device.type == "cuda" else 30
    microseconds: dict[str, dict[str, float]] = {}
    for name, entrant in entrants.contenders.items():
        bound = entrants.attempt(name, partial(entrant.bind, inputs))
        for how, call in () if bound is None else (("without grad", bound.infer), ("with grad", bound.forward)):
            took = entrants.attempt(name, partial(host_microseconds, call, device, repeats=repeats))
            if took is not None:
                microseconds.setdefault(name, {})[how] = took
    problem = f"{inputs.batch} sequences, {inputs.k.shape[0]} tokens, Lq {SMALL.q_len}, H {SMALL.heads}, D {SMALL.dim}"
    return {"problem": problem, "microseconds": microseconds, "without": entrants.without}


def memory(workload: Workload, setup: Setup, journal: Journal, skip: Without) -> dict[str, Any]:
    """The most memory that a training step holds beyond its inputs, schedules and whatever else it makes included."""
    device = setup.device
    entrants = Field("memory", setup, journal, skip)
    inputs = Inputs.make(workload, device, seed=0)
    beyond: dict[str, int] = {}

    def peak(entrant: Contender) -> int:
        for _ in range(2):  # the first one compiles
            _free_memory(device)
            before = 0
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            gradients = entrant.bind(inputs).train()
            _synchronize(device)
            del gradients
        return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0

    for name, entrant in entrants.contenders.items():
        if entrant.forward_only:
            entrants.without[name] = "forward only"
            continue
        size = entrants.attempt(name, partial(peak, entrant))
        if size is not None:
            beyond[name] = size
    return {
        "workload": workload.name,
        "inputs": inputs.nbytes,
        "beyond_inputs": beyond,
        "without": entrants.without,
    }


def _number_of_sets(workload: Workload, contenders: int, device: torch.device) -> int:
    """Two sets of inputs if they fit beside what each contender keeps: its output, a copy of a query, gradients."""
    if device.type != "cuda":
        return 2
    free, _ = torch.cuda.mem_get_info(device)
    needed = workload.least_bytes("fwd") * (2 + contenders) + workload.least_bytes("bwd")
    return 2 if 2 * needed < 0.8 * free else 1


def _print_notes(workload: Workload, inputs: list[Inputs], device: torch.device) -> None:
    size = sum(x.nbytes for x in inputs)
    if len(inputs) == 1:
        print(f"{workload.name}: memory holds one set of inputs, so they do not rotate", flush=True)
    if device.type == "cuda" and size < 2 * torch.cuda.get_device_properties(device).L2_cache_size:
        print(f"{workload.name}: {size / 1e6:.0f} MB of inputs, some of which may stay in the cache", flush=True)


def _progress(row: dict[str, Any]) -> str:
    head = f"{row['workload']} {row['pass']}: {row['backend']} "
    if row["ms"] is None:
        head += row["error"]
    else:
        head += f"{row['ms']:.3f} ms ({row['floor_share']:.0%} of the floor)"
    return ", ".join(
        (
            head,
            *(f"{name} {ms:.3f}" for name, ms in row["peers"].items()),
            *(f"{name} ({why})" for name, why in row["without"].items()),
        )
    )


def _describe(error: Exception) -> str:
    if isinstance(error, NotMeasured):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    if "out of memory" in lines[0].lower() or isinstance(error, MemoryError):
        return f"out of memory ({lines[0][:80]})"
    return f"{type(error).__name__}: {lines[0][:160]}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _where(options: argparse.Namespace) -> dict[str, Any]:
    """What a result was measured with."""
    device = torch.device(options.device)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"none ({platform.machine()})",
        "torch": torch.__version__,
        "triton": triton,
        "commit": options.commit or _commit(),
    }


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _names(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(choices)}, got {name!r}")
        return list(dict.fromkeys(names))

    return parse


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", type=_names(SUITES), help="of pma, self, dense, separated by commas; all by default")
    add("--workload", nargs="+", choices=tuple(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    add("--passes", type=_names(PASSES), default=["fwd", "bwd"], help="of fwd, bwd, both (end to end); default fwd,bwd")
    add("--backend", choices=BACKENDS, default="portable", help="of this library; default portable")
    add("--peers", type=_names((*PEERS, *BACKENDS)), default=[], help=", ".join((*PEERS, "or another backend")))
    add("--json", type=Path, metavar="FILE", help="where the results go, and costs beside them")
    add("--markdown", type=Path, metavar="FILE", help="put the table between the markers of this file")
    add("--plot", type=Path, metavar="FILE", help="draw the shares of the floor")
    add("--overhead", action="store_true", help="host time of a small forward")
    add("--memory", action="store_true", help=f"peak memory of a training step on {MEMORY_WORKLOAD}")
    add("--quick", action="store_true", help="fewer and shorter bursts")
    add("--sustained-peers", action="store_true", help="the time of peers without pauses, too")
    add("--device", default="cuda")
    add("--tiny", action="store_true", help="small workloads of the same names: a dry run")
    add("--commit", help="what the results are of, where git cannot say")
    add("--patience", type=float, default=240, metavar="S", help="stop what does not stir for so long; default 240")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.backend in options.peers:
        parser.error(f"--peers must not name the backend {options.backend} itself")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU; a dry run without one is --device cpu --tiny --backend cpu")
    return options


def tasks_of(options: argparse.Namespace) -> list[str]:
    costs = [kind for kind in COSTS if getattr(options, kind)]
    if options.workload:
        return [*dict.fromkeys(options.workload), *costs]
    if options.suite is None and costs:
        return costs
    return [name for name, w in WORKLOADS.items() if w.suite in (options.suite or SUITES)] + costs


def run_child(options: argparse.Namespace) -> None:
    order = json.loads(options.child)
    journal, skip = Journal(order["journal"]), order["skip"]
    setup = Setup(
        [options.backend, *options.peers],
        torch.device(options.device),
        options.passes,
        QUICK if options.quick or options.tiny else FULL,
        options.sustained_peers,
    )
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    where = _where(options)
    for task in order["tasks"]:
        journal.doing(task, None)
        left_out = skip.get(task, {})
        if task == "overhead":
            journal.record(task, {task: overhead(setup, journal, left_out)})
        elif task == "memory":
            workload = _sized(WORKLOADS[MEMORY_WORKLOAD], options)
            journal.record(task, {task: memory(workload, setup, journal, left_out)})
        else:
            for row in measure(_sized(WORKLOADS[task], options), setup, journal, left_out):
                journal.record(task, row | where)
        journal.done(task)
        _free_memory(setup.device)


def _sized(workload: Workload, options: argparse.Namespace) -> Workload:
    return workload.tiny() if options.tiny else workload


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    options = parse(arguments)
    if options.child:
        run_child(options)
        return 0

    def start(journal: Path, tasks: list[str], skip: Skip) -> list[str]:
        order = json.dumps({"journal": str(journal), "tasks": tasks, "skip": skip})
        return [sys.executable, str(Path(__file__).resolve()), *arguments, "--child", order]

    def split(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = [record for record in records if "workload" in record]
        return rows, {kind: cost for record in records if "workload" not in record for kind, cost in record.items()}

    def save(records: list[dict[str, Any]]) -> None:
        if options.json is None:
            return
        rows, costs = split(records)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        for path, content in ((options.json, rows), (report.costs_path(options.json), costs)):
            if content:
                path.write_text(json.dumps(content, indent=1) + "\n")

    outcome = supervise(start, tasks_of(options), options.peers, patience_s=options.patience, progress=save)
    rows, costs = split(outcome.records)
    report.render(rows, costs, options.markdown, options.plot)
    print()
    for line in (
        *([report.table(rows)] if rows else []),
        *report.absences(rows),
        *report.cost_lines(costs),
        *report.bars(rows, costs),
        *(f"{task} given up, {why}" for task, why in outcome.given_up.items()),
        f"{time.monotonic() - began:.0f} s in all",
    ):
        print(line)
    wrong = any(row["ms"] is None for row in rows)
    return 1 if wrong or outcome.given_up else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
