"""What a run has shown: findings, who did what, how much memory, and in which order."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaggedtensor.kernels.emulator.errors import KINDS, Finding


@dataclass(slots=True)
class Event:
    """One step of a role or an engine: the seam for a model of cost.

    `start` and `end` are places in the order of all events of a run, `after` the numbers of events that it came after
    for a reason (arrivals before a wait, the one before it in an engine's queue). Bytes are what it moves, `shape` is
    that of the tile (M, N, K of a product). Of a product, bytes are those in shared memory. `work` is the arithmetic
    of the role since its event before this: (kind, instructions of each warp), in order, see `values.note_work`;
    ("after", number) where a block is first needed that the event of that number loads.
    """

    number: int
    program: tuple
    role: str
    cta: int
    kind: str
    nbytes: int
    shape: tuple
    after: tuple
    where: tuple  # (code, line) of the kernel, innermost first
    start: int
    end: int
    name: str = ""  # of the barrier or buffer; "written" where stores are waited for for good
    work: tuple = ()

    @property
    def line(self) -> str:
        """file:line of the kernel."""
        return f"{self.where[0][0].co_filename}:{self.where[0][1]}" if self.where else "?"


@dataclass
class RoleStats:
    """What a role did in one program, or in all of them."""

    role: str
    cta: int
    steps: int = 0
    waits: int = 0
    blocked: int = 0  # waits that did not pass at once
    nbytes: int = 0
    kinds: Counter = field(default_factory=Counter)
    warps: int = 0


@dataclass
class Report:
    """The judgement of one launch under one order and seed."""

    kernel: str
    target: str
    order: str
    seed: int
    findings: list[Finding] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    roles: list[RoleStats] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)  # bytes of shared memory, columns of tensor memory
    shared_peak: int = 0
    tensor_peak: int = 0
    programs: int = 0
    clock: int = 0
    keep_events: bool = True
    _seen: set = field(default_factory=set)
    _numbers: int = 0

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def status(self) -> str:
        """ "ok", or the kind of the first finding: the keys of errors.KINDS."""
        return self.findings[0].kind if self.findings else "ok"

    def add(self, finding: Finding) -> bool:
        """False if the same is known."""
        key = (
            finding.kind,
            finding.role,
            tuple(finding.where[:1]),
            finding.advice[:80] if finding.kind == "race" else "",
        )
        if key in self._seen:
            return False
        self._seen.add(key)
        self.findings.append(finding)
        return True

    def trace(self, program, stats: RoleStats, kind, nbytes, shape, after, where, now) -> Event:
        self._numbers += 1
        event = Event(self._numbers, program, stats.role, stats.cta, kind, nbytes, shape, after, where, now, now)
        stats.steps += 1
        stats.nbytes += nbytes
        stats.kinds[kind] += 1
        if self.keep_events:
            self.events.append(event)
        return event

    def raise_if_bad(self) -> "Report":
        """Raises the first finding as its own exception (errors.py); returns the report if there is none."""
        if self.findings:
            raise KINDS[self.findings[0].kind](self.findings[0], self)
        return self

    def __str__(self) -> str:
        head = f"{self.kernel} on {self.target}, order {self.order}, seed {self.seed}: {self.status}"
        lines = [head, *(str(f) for f in self.findings)]
        if self.ok:
            lines.append(
                f"{self.programs} programs, {len(self.events)} events; shared memory {self.shared_peak} bytes"
                + (f", tensor memory {self.tensor_peak} columns" if self.tensor_peak else "")
            )
            lines += [
                f"    {s.role} (CTA {s.cta}): {s.steps} steps, {s.waits} waits ({s.blocked} blocked), {s.nbytes} bytes"
                for s in self.merged_roles()
            ]
        return "\n".join(lines)

    def merged_roles(self) -> list[RoleStats]:
        """Sums over programs, by role and CTA."""
        merged: dict[tuple, RoleStats] = {}
        for stats in self.roles:
            total = merged.setdefault((stats.role, stats.cta), RoleStats(stats.role, stats.cta))
            total.steps += stats.steps
            total.waits += stats.waits
            total.blocked += stats.blocked
            total.nbytes += stats.nbytes
            total.kinds += stats.kinds
        return list(merged.values())

    def plot(self, path: Any = None, events: int = 400, program: Any = None):
        """The first events of a program as bars, a row for each role and its engines. Needs matplotlib.

        The axis counts events, not time: this is the order of things, not their duration.
        """
        from matplotlib.figure import Figure

        program = program if program is not None else (self.events[0].program if self.events else ())
        mine = [e for e in self.events if e.program == program][:events]
        rows = list(dict.fromkeys((f"{e.role}/{e.cta}", e.end > e.start) for e in mine))
        rows.sort()
        kinds = list(dict.fromkeys(e.kind for e in mine))
        figure = Figure(figsize=(14, 1 + 0.4 * len(rows)))
        axes = figure.subplots()
        for number, kind in enumerate(kinds):
            chosen = [e for e in mine if e.kind == kind]
            places = [rows.index((f"{e.role}/{e.cta}", e.end > e.start)) for e in chosen]
            widths = [max(e.end - e.start, 0.8) for e in chosen]
            axes.barh(places, widths, left=[e.start for e in chosen], color=f"C{number % 10}", label=kind, alpha=0.7)
        axes.set_yticks(range(len(rows)), [name + (" engines" if engine else "") for name, engine in rows])
        axes.invert_yaxis()
        axes.set_xlabel("order of events")
        axes.set_title(f"{self.kernel}, program {program}")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=8, fontsize="small")
        if path is not None:
            figure.savefig(path, bbox_inches="tight")
        return figure

    def timeline(self, events: int = 80, program: Any = None) -> str:
        """The first events of a program, one a line, a column for each role; `-` while an engine works for it."""
        program = program if program is not None else (self.events[0].program if self.events else ())
        mine = [e for e in self.events if e.program == program][:events]
        columns = list(dict.fromkeys((e.role, e.cta) for e in mine))
        many = len({cta for _, cta in columns}) > 1
        heads = [f"{role}/{cta}" if many else role for role, cta in columns]
        width = max([16, *(len(h) + 1 for h in heads)])
        lines = ["".join(h.ljust(width) for h in heads)]
        for event in mine:
            cells = []
            for column in columns:
                if column == (event.role, event.cta):
                    text = f"{event.kind} {event.name}".strip()
                    cells.append(text[: width - 1].ljust(width))
                else:
                    busy = any(e.start < event.start < e.end for e in mine if (e.role, e.cta) == column)
                    cells.append(("-" if busy else "").ljust(width))
            lines.append("".join(cells).rstrip())
        return "\n".join(lines)
