"""Runs the Hopper mechanisms and their known-bad variants on the GPU at hand, with and without ConSan.

    python tests/emulator/hardware.py results.json

Each run has a process of its own, since many hang, and some seconds from its launch; several run at a time. The
result of a run is "right", "wrong value", "hang", "assert" (ConSan's, with what it says) or an error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
FAMILIES = [
    "tma_ring",
    "wgmma_shared",
    "wgmma_registers",
    "reduce_add",
    "staged_store",
    "cluster_multicast",
    "cluster_exchange",
]
REPEATS = 20  # of each case: what a race does to a value is luck
BEGIN = time.monotonic()
RUN_SECONDS = 6.0
COMPILE_SECONDS = 40.0


@dataclass
class Result:
    """Of one variant of a family ("" is the right one), under ConSan or not."""

    family: str
    variant: str
    consan: bool
    outcome: str = ""
    case: str = ""
    detail: str = ""
    seconds: float = 0.0


def run(result: Result, send: Any) -> None:
    """In a process of its own; sends the result as far as it is known before everything that may hang."""
    log, _ = tempfile.mkstemp()
    os.dup2(log, 2)  # the driver writes there what a device assertion says
    if result.consan:
        os.environ["TRITON_INSTRUMENTATION_MODE"] = "consan"
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"

    from triton import knobs

    from jaggedtensor.testing.families import WrongValue
    from jaggedtensor.testing.mutants import bad_variant, load_module, source_of

    knobs.refresh_knobs()
    path = str(HERE / "mechanisms" / f"{result.family}.py")
    with tempfile.TemporaryDirectory() as folder:
        family = load_module(path).FAMILY
        if result.variant:
            text = bad_variant(source_of(path), next(bad for bad in family.bad if bad.change == result.variant))
            changed = Path(folder) / f"{result.family}.py"
            changed.write_text(text)
            family = load_module(path, changed).FAMILY
        for case in family.cases:
            result.case = case.name
            result.outcome = "did not compile"
            try:
                case.launch(warmup_only=True)
                result.outcome = "hang"
                send.send(result)
                for _ in range(1 if result.consan else REPEATS):
                    case.launch()
                result.outcome = "right"
            except WrongValue as error:
                result.outcome, result.detail = "wrong value", str(error)
            except Exception as error:
                said = os.pread(log, 1 << 16, 0).decode(errors="replace")
                asserted = re.search(r"Assertion `?(.*?)`? failed", said)
                result.outcome = "assert" if asserted else "error"
                result.detail = asserted[1] if asserted else f"{type(error).__name__}: {error} {said[-300:]}"
            if result.outcome != "right":
                break
        send.send(result)
        send.send(None)
        os._exit(0)  # a context that is broken does not always end by itself


def run_all(results: list[Result], jobs: int, seconds: float) -> None:
    """Fills in the results, so many at a time, and stops with what there is so many seconds after the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton.experimental.gluon.language", "jaggedtensor.testing.mutants"])
    waiting = list(reversed(results))
    running: dict[Any, list[Any]] = {}
    while (waiting or running) and time.monotonic() - BEGIN < seconds:
        while waiting and len(running) < jobs:
            result = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(result, send))
            process.start()
            send.close()
            running[receive] = [result, process, time.monotonic() + COMPILE_SECONDS, time.monotonic()]
        for receive in wait(list(running), timeout=0.2):
            entry = running[receive]
            try:
                news = receive.recv()
            except EOFError:
                entry[0].outcome = entry[0].outcome or "error"
                entry[0].detail = entry[0].detail or "the process died"
                news = None
            if news is None:
                entry[2] = 0.0
            else:
                entry[0].__dict__.update(news.__dict__)
                entry[2] = time.monotonic() + (RUN_SECONDS * (2 if news.consan else 1) if news.outcome == "hang" else 5)
        for receive, (result, process, end, started) in list(running.items()):
            if end <= time.monotonic():
                process.kill()
                result.seconds = round(time.monotonic() - started, 1)
                del running[receive]
    for _, process, _, _ in running.values():
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--modes", nargs="+", default=["plain", "consan"])
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=85.0)
    given = parser.parse_args()

    from jaggedtensor.testing.mutants import load_module

    results = []
    for consan in (mode == "consan" for mode in given.modes):
        for family in given.families:
            bad = [bad.change for bad in load_module(str(HERE / "mechanisms" / f"{family}.py")).FAMILY.bad]
            results += [Result(family, variant, consan) for variant in ["", *bad]]
    run_all(results, given.jobs, given.seconds)
    given.output.write_text(json.dumps([asdict(result) for result in results], indent=1))
    for r in results:
        mode = "ConSan" if r.consan else "plain"
        print(f"{r.family} {mode} {r.outcome or 'not run'} {r.seconds} s | {r.variant[:50]} | {r.detail[:45]}")


if __name__ == "__main__":
    main()
