"""Times in short bursts with pauses, all contenders in turn, so that none runs on a hotter chip than another."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
# Does an action of the contender of that name; None if it failed.
Attempt = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    bursts: int = 7
    burst_ms: float = 8.0  # a burst calls as often as fits, but twice at least
    pause_s: float = 0.02  # before a burst
    sustained_s: float = 1.0
    limit_ms: float = 1500.0  # for all bursts of a contender, so that a slow one takes no longer


FULL = Effort()
QUICK = Effort(bursts=3, burst_ms=4.0, sustained_s=0.3, limit_ms=500.0)


def time_calls(calls: Iterator[Call], count: int, device: torch.device) -> float:
    """Milliseconds for one of `count` calls in a row."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            next(calls)()
        return (time.perf_counter() - began) * 1e3 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond in which the host gets ahead, so that launches cost nothing
    start.record()
    for _ in range(count):
        next(calls)()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def interleaved(
    contenders: Mapping[str, Sequence[Call]], effort: Effort, device: torch.device, attempt: Attempt
) -> dict[str, float]:
    """The median milliseconds of a call of each contender that did not fail.

    Args:
        contenders: for each, the same call on one or more sets of inputs, which take turns.
    """
    turns = {name: itertools.cycle(calls) for name, calls in contenders.items()}

    def burst(name: str, count: int) -> float | None:
        return attempt(name, lambda: time_calls(turns[name], count, device))

    plans: dict[str, tuple[int, int]] = {}  # calls in a burst, bursts
    for name, calls in contenders.items():
        if burst(name, len(calls)) is None:  # warms up
            continue
        estimate = burst(name, 1)
        if estimate is not None:
            count = min(10, max(2, round(effort.burst_ms / max(estimate, 1e-3))))
            if estimate * count > effort.limit_ms:
                count = 1
            plans[name] = count, max(1, min(effort.bursts, int(effort.limit_ms / max(estimate * count, 1e-3))))

    samples: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(effort.bursts):
        names = list(plans)
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            count, bursts = plans[name]
            if turn < bursts:
                time.sleep(effort.pause_s)
                sample = burst(name, count)
                if sample is None:
                    del plans[name], samples[name]
                else:
                    samples[name].append(sample)
    return {name: statistics.median(times) for name, times in samples.items()}


def sustained(calls: Sequence[Call], estimate_ms: float, effort: Effort, device: torch.device) -> float:
    """Milliseconds for one call when they follow each other without a pause."""
    count = max(1, round(effort.sustained_s * 1e3 / max(estimate_ms, 1e-3)))
    return time_calls(itertools.cycle(calls), min(count, 20_000), device)


def host_microseconds(call: Call, device: torch.device, *, repeats: int = 300, together: int = 10) -> float:
    """The median time that the host spends in a call, which returns before the device is done."""
    samples = []
    for i in range(repeats + together):
        if i % together == 0 and device.type == "cuda":
            torch.cuda.synchronize(device)  # else the host would soon wait for a place in the queue
        began = time.perf_counter()
        result = call()
        took = time.perf_counter() - began
        del result
        if i >= together:
            samples.append(took * 1e6)
    return statistics.median(samples)
