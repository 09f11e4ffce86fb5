"""Events of an emulated launch, replayed in time: roles compute, wait and ask engines, which serve in order of asking.

Each multiprocessor has its own engines (schedulers' pipes, tensor cores, shared memory, TMA, its share of L2 and HBM).
What an engine does takes it a while, which later requests wait for, and is seen some latency after. A role's arithmetic
goes through the pipes that all its multiprocessor's roles share, a few instructions at a time.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaggedtensor.testing.model.constants import (
    INSTRUCTIONS,
    MOVED,
    PIPE,
    TCGEN05_INSTRUCTIONS,
    WGMMA_INSTRUCTIONS,
    Chip,
)

QUANTUM = 16  # instructions after which another role may go first

Key = tuple[Any, ...]  # (program, CTA, role)


@dataclass
class RoleTime:
    """A role's cycles: from start to end, and of them waiting, by what for and for whom."""

    end: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # instructions of each warp, by pipe
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def instructions(self) -> float:
        """Of each warp, whatever their pipe."""
        return sum(self.parts.values())

    def less(self, other: RoleTime, by: float) -> RoleTime:
        """What this one takes more, for each of `by` units of work."""

        def difference(mine: dict[str, float], its: dict[str, float]) -> dict[str, float]:
            return {name: (x - its.get(name, 0.0)) / by for name, x in mine.items()}

        return RoleTime(
            (self.end - other.end) / by, difference(self.parts, other.parts), difference(self.waits, other.waits)
        )


@dataclass
class Replayed:
    """What the model says of a launch, in cycles of one multiprocessor."""

    cycles: float
    roles: dict[str, RoleTime]
    engines: dict[str, float]  # cycles that each was busy, of multiprocessor 0
    done: dict[int, float]  # when each event was over, by its number

    def less(self, other: Replayed, by: float) -> Replayed:
        """What this launch takes more than a shorter one, for each of `by` units of work."""
        roles = {name: role.less(other.roles[name], by) for name, role in self.roles.items()}
        engines = {name: (busy - other.engines[name]) / by for name, busy in self.engines.items()}
        return Replayed((self.cycles - other.cycles) / by, roles, engines, {})


class Engine:
    """Serves in order of asking."""

    __slots__ = ("aside", "busy", "free")

    def __init__(self) -> None:
        self.free = self.busy = 0.0
        self.aside = 0.0  # cycles of copies, that go in between other requests

    def serve(self, at: float, cycles: float) -> float:
        """When it is done with what it is asked for at a time."""
        self.aside = max(0.0, self.aside - max(0.0, at - self.free))  # while it had nothing else to do
        shared = min(self.aside, cycles)
        self.aside -= shared
        self.free = max(self.free, at) + cycles + shared
        self.busy += cycles
        return self.free

    def copy(self, cycles: float) -> None:
        """Serve a copy in between."""
        self.aside += cycles
        self.busy += cycles

    def begin(self, at: float, cycles: float) -> float:
        """When it begins: of what others share too, a single request is done sooner than its share of the rate says."""
        return self.serve(at, cycles) - cycles


@dataclass(frozen=True)
class Product:
    """An event's product: equal steps, each of which keeps tensor cores and shared memory of some processors busy."""

    event: Any
    steps: int
    cycles: float  # of a step
    nbytes: float  # of shared memory, for a step
    start: float  # cycles before the first
    on: tuple[int, ...]


class Processor:
    """A multiprocessor's engines, by name, and what its tensor cores are asked for."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = defaultdict(Engine)
        self.queue: list[Product | Any] = []  # products and events of commits

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]


class _Replay:
    def __init__(self, report: Any, chip: Chip, misses: float, scale: dict[str, float], staged: bool):
        self.chip, self.misses, self.scale, self.staged = chip, misses, scale, staged
        self.by_number = {event.number: event for event in report.events}
        self.processors: dict[int, Processor] = defaultdict(Processor)
        multiplying = {event.cta for event in report.events if event.kind == "mma"}
        self.ctas = 1 + max((event.cta for event in report.events), default=0)
        self.pair = self.ctas > 1 and multiplying == {0}
        self.done: dict[Any, float] = {}
        self.read: dict[int, float] = {}  # stores: when TMA has read what it stores
        self.blocked: dict[Any, list[int]] = defaultdict(list)
        self.heap: list[tuple[float, int, int]] = []
        self.asked = 0
        self.warps = {(stats.role, stats.cta): stats.warps for stats in report.roles}
        lists: dict[Key, list[Any]] = defaultdict(list)
        for event in report.events:
            lists[event.program, event.cta, event.role].append(event)
        self.times = {key: RoleTime() for key in lists}
        self.roles = [self.play(key, events) for key, events in lists.items()]
        self.roles += [self.multiply(self.processors[cta]) for cta in sorted({key[1] for key in lists})]
        self.needs: list[tuple[Any, ...]] = [()] * len(self.roles)

    def run(self) -> None:
        for i in range(len(self.roles)):
            self.push(0.0, i)
        now = 0.0
        while self.heap:
            at, _, i = heapq.heappop(self.heap)
            now = max(now, at)
            missing = next((n for n in self.needs[i] if n not in self.done), None)
            if missing is not None:
                self.blocked[missing].append(i)
                continue
            self.needs[i] = ()
            self.now = now
            asked = next(self.roles[i], None)
            if isinstance(asked, tuple):
                self.needs[i] = asked
                self.push(now, i)
            elif asked is not None:
                self.push(asked, i)
        missing = [n for n in self.blocked if isinstance(n, int)]
        if missing:
            raise ValueError(f"events {missing[:5]} are waited for and never come: all events of a run are needed")

    def push(self, at: float, i: int) -> None:
        self.asked += 1
        heapq.heappush(self.heap, (at, self.asked, i))

    def finish(self, number: Any, at: float) -> None:
        self.done[number] = at
        for i in self.blocked.pop(number, ()):
            self.push(self.now, i)

    def play(self, key: Key, events: list[Any]) -> Iterator[float | tuple[Any, ...]]:
        """A role: yields the time until which it is busy, or the events that it waits for."""
        _, cta, name = key
        me, processor, chip = self.times[key], self.processors[cta], self.chip
        warps = self.warps.get((name, cta), 4)  # what is before the roles goes beside them
        slots = warps / 4  # of each scheduler, for an instruction of each of its warps
        scale = self.scale.get(name.split("#")[0], 1.0)
        now = 0.0

        def compute(parts: dict[str, float], now: float) -> Iterator[float]:
            count = sum(parts.values())
            for kind, n in parts.items():
                me.parts[kind] += n
            pieces = max(1, round(count / QUANTUM))
            for _ in range(pieces):
                end = now + count / pieces * chip.per_instruction
                end = max(end, processor["issue"].serve(now, count / pieces * slots))
                for kind, n in parts.items():
                    if kind in PIPE:
                        end = max(end, processor[kind].serve(now, n / pieces * slots * PIPE[kind]))
                now = end
                yield now

        for event in events:
            for parts, needs, pause in phases(event, scale, chip.extreme):
                if needs:
                    yield needs
                    come = max(self.done[n] for n in needs)
                    if come > now:
                        me.waits["global memory"] += come - now
                        now = come
                        yield now
                for busy in compute(parts, now):
                    now = busy
                    yield now
                if pause:
                    now += chip.reduction
                    yield now
            needs = event.after
            if event.kind in ("wait", "mma wait", "store wait", "cluster barrier"):
                if needs:
                    yield needs
                now = self.wait(event, needs, now, me)
            elif event.kind in ("wgmma", "mma", "commit"):
                self.ask(event, cta)
                if event.kind == "wgmma" and in_registers(event):
                    # They hold their warps up until the last step has begun.
                    yield (("last", event.number),)
                    now = max(now, self.done["last", event.number])
            else:
                now = self.act(event, now, cta)
            yield now
            me.end = now

    def wait(self, event: Any, needs: tuple[int, ...], now: float, me: RoleTime) -> float:
        times = self.read if event.kind == "store wait" and event.name != "written" else self.done
        last = max(needs, key=lambda n: times[n], default=None)
        if last is not None and times[last] > now:
            cause = self.by_number[last]
            label = re.sub(r"\[\d+\]", "", event.name) or event.kind
            me.waits[f"{label} ({cause.kind} of {cause.role.split('#')[0]})"] += times[last] - now
            now = times[last]
        now += self.chip.wait if event.kind == "wait" else 0.0
        self.finish(event.number, now)
        return now

    def ask(self, event: Any, cta: int) -> None:
        """Queue a product or a commit at the tensor cores."""
        queue = self.processors[cta].queue
        queue.append(event if event.kind == "commit" else self.product(event, cta))
        self.finish(("asked", id(self.processors[cta]), len(queue)), self.now)

    def multiply(self, processor: Processor) -> Iterator[float | tuple[Any, ...]]:
        """The tensor cores of a multiprocessor, in order of asking."""
        now, served, chip = 0.0, 0, self.chip
        while True:
            yield (("asked", id(processor), served + 1),)
            work = processor.queue[served]
            served += 1
            now = max(now, self.now)
            if not isinstance(work, Product):
                self.finish(work.number, now + chip.product_latency + chip.arrive)
                continue
            engines = [self.processors[rank] for rank in work.on]
            now = max(e["tensor"].serve(now, work.start) for e in engines)
            for step in range(work.steps):
                if step == work.steps - 1:
                    self.finish(("last", work.event.number), now)
                begin = now
                for e in engines:
                    now = max(now, e["tensor"].serve(begin, work.cycles))
                    now = max(now, e["shared"].serve(begin, work.nbytes / chip.shared))
                yield now
            self.finish(work.event.number, now + chip.product_latency)

    def act(self, event: Any, now: float, cta: int) -> float:
        """What an event asks of engines; the time until which its role is busy."""
        chip, on = self.chip, self.processors[cta]
        kind, size = event.kind, event.nbytes
        over = now
        if kind in ("arrive", "expect"):
            over = now + chip.arrive
        elif kind == "fence":
            over = now = now + chip.fence
        elif kind == "tma load":
            latency = chip.tma_latency + chip.hbm_latency * self.misses
            begin = max(on["l2"].begin(now, size / chip.l2), on["hbm"].begin(now, size * self.misses / chip.hbm))
            over = max(on["tma"].serve(now, size / chip.tma), begin + size / chip.tma) + latency
            on["shared"].copy(size / chip.shared)
        elif kind in ("tma store", "tma reduce"):
            on["shared"].copy(size / chip.shared)
            read = max(on["tma"].serve(now, size / chip.tma), on["l2"].begin(now, size / chip.l2))
            self.read[event.number] = read + chip.store_latency
            if kind == "tma store":
                on["hbm"].serve(now, size / chip.hbm)
            over = self.read[event.number] + chip.tma_latency
            if not self.staged:
                now = self.read[event.number]
        elif kind in ("load", "store"):
            over = now = on["shared"].serve(now, size / chip.shared) + chip.shared_latency
        elif kind == "tmem load":
            over = now = on["tmem"].serve(now, size / chip.tmem) + size / chip.tmem + chip.tmem_load
        elif kind == "tmem store":
            over = now = on["tmem"].serve(now, size / chip.tmem) + chip.tmem_store
        elif kind in ("global load", "global store", "cp.async"):
            over = max(on["hbm"].serve(now, size / chip.hbm), now) + chip.load_latency
        elif kind == "st.async":
            over = on["shared"].serve(now, size / chip.shared) + chip.remote_latency
        elif kind == "try_cancel":
            over = now + chip.cancel_latency
        self.finish(event.number, over)
        return now

    def product(self, event: Any, cta: int) -> Product:
        m, n, k = event.shape
        steps = k // 16
        if event.kind == "wgmma":
            warpgroups = m // 64
            traffic = 32 * n + (0 if in_registers(event) else 2048)
            cycles = warpgroups * n / 2 / self.chip.wgmma
            return Product(event, steps, cycles, warpgroups * traffic, self.chip.product_start, (cta,))
        if self.pair:
            # Of 128 rows each CTA has 64, whose halves of the columns are on lanes of their own (PTX ISA, "layout B").
            columns = n if m > 128 else n // 2
            cycles, on = interpolated(self.chip.tensor["pair"], columns), [cta, cta + 1]
        else:
            in_tensor = event.nbytes <= n * k * 2
            cycles, on = interpolated(self.chip.tensor["tensor" if in_tensor else "shared"], n), [cta]
        return Product(event, steps, cycles, event.nbytes / steps, 0.0, tuple(on))


def in_registers(event: Any) -> bool:
    """Whether a wgmma's left operand is: its bytes are those in shared memory."""
    _, n, k = event.shape
    return bool(event.nbytes <= n * k * 2)


def interpolated(table: dict[int, float], n: int) -> float:
    """Cycles for n columns, of a table with some."""
    if n in table:
        return table[n]
    known = sorted(table)
    low = max((x for x in known if x <= n), default=known[0])
    high = min((x for x in known if x > n), default=known[-1])
    if low == high or n < low:
        return table[low] * n / low if n > low else table[low]
    return table[low] + (table[high] - table[low]) * (n - low) / (high - low)


def phases(event: Any, scale: float, extreme: float) -> Iterator[tuple[dict[str, float], tuple[int, ...], bool]]:
    """A role's arithmetic before an event, and the event's own instructions: (instructions by pipe, events that must
    have come before them, whether they end in a maximum that what follows must wait for)."""
    parts: dict[str, float] = defaultdict(float)
    needs: tuple[int, ...] = ()
    for kind, count in event.work:
        if kind == "after":
            if parts:
                yield dict(parts), needs, False
                parts.clear()
                needs = ()
            needs += (count,)
        else:
            if kind != "extreme":
                parts[kind] += count * scale
            else:
                parts["integer"] += count * extreme * scale
                yield dict(parts), needs, True
                parts.clear()
                needs = ()
    own = INSTRUCTIONS.get(event.kind, 0.0)
    if event.kind == "wgmma":
        own = WGMMA_INSTRUCTIONS * (event.shape[0] // 64) * (event.shape[2] // 16)
    elif event.kind == "mma":
        own = TCGEN05_INSTRUCTIONS * (event.shape[2] // 16)
    elif event.kind in ("load", "store", "global load", "global store"):
        own = event.nbytes / MOVED
    if parts or needs or own:
        parts["other"] += own * scale
        yield dict(parts), needs, False


def replay(
    report: Any, chip: Chip, *, misses: float = 1.0, scale: dict[str, float] | None = None, staged: bool = True
) -> Replayed:
    """How long a launch on one multiprocessor (or a pair, a CTA each) takes, by the model.

    Args:
        report: of `emulate` with its events. Several programs are taken as sharing the multiprocessor.
        misses: the share of what TMA loads that comes from HBM, not the L2.
        scale: for roles by name, by what their counted instructions are to be multiplied.
        staged: False: a role that stores by TMA waits at once until the source has been read.
    """
    run = _Replay(report, chip, misses, scale or {}, staged)
    run.run()
    roles = {}
    for (program, cta, name), time in run.times.items():
        roles[f"{name} {cta}" if run.ctas > 1 else f"{name} {program[0]}"] = time
    cycles = max((time.end for time in run.times.values()), default=0.0)
    engines = {name: engine.busy for name, engine in run.processors[0].engines.items()}
    return Replayed(cycles, roles, engines, run.done)
