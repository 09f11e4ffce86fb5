"""Order and judgement of accesses: vector clocks over bytes, proxy fences, and poison.

Each role has a timeline, and each operation of an engine is on one. An access is ordered before another if the other's
clock has seen it; whatever is not ordered is a race, on every schedule, whether or not this one shows it. A second
clock says up to where each timeline's ordinary stores have been made visible to the asynchronous proxy (PTX ISA,
"Proxies" and "membar / fence.proxy.async"): it is copied at the fence and carried by barriers, as the first is.
"""

import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from jaggedtensor.kernels.emulator.errors import Finding, UnknownBuiltin
from jaggedtensor.kernels.emulator.memory import (
    GRANULE,
    Allocation,
    Footprint,
    GlobalBuffer,
    GlobalLog,
    Memory,
    Record,
    View,
)

_HERE = str(Path(__file__).parent)


def call_chain() -> tuple:
    """(code, line) of the kernel's frames, innermost first, without the emulator's own."""
    frame: Any = sys._getframe(1)
    chain = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            chain.append((code, frame.f_lineno))
        elif code.co_name == "run_worker":
            break
        frame = frame.f_back
    return tuple(chain)


def call_site() -> tuple:
    """Which place in the kernel this is: the instruction of each of its frames."""
    frame: Any = sys._getframe(1)
    places = []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            places.append((code, frame.f_lasti))
        elif code.co_name == "run_worker":
            break
        frame = frame.f_back
    return tuple(places)


def lines_of(chain: tuple) -> list[str]:
    return [f"{code.co_filename}:{line} in {code.co_name}" for code, line in chain]


def seen(clock: list, timeline: int, time: int) -> bool:
    """Whether `time` of a timeline is in the past of `clock`."""
    return timeline < len(clock) and clock[timeline] >= time


def join(clock: list, other: list) -> None:
    """`clock` has seen what `other` has."""
    short = len(other) - len(clock)
    if short > 0:
        clock.extend([0] * short)
    for i, time in enumerate(other):
        if time > clock[i]:
            clock[i] = time


class Actor:
    """Who touches memory: a role, or an operation of an engine."""

    label: str
    clock: list
    fenced: list
    timeline: int
    asynchronous = False
    machine: "Machine"

    def chain(self) -> tuple:
        raise NotImplementedError

    def time(self) -> int:
        return self.clock[self.timeline]

    def tick(self) -> None:
        self.clock[self.timeline] += 1


class Machine:
    """What checks need of the machine (roles.Cluster): where findings go, and whose is what."""

    number: int  # of the program, from 1
    owners: list  # roles, by timeline
    compiler_fences: bool  # whether those count that the compiler adds where a role reads what it stored itself
    synchronised: bool  # whether programs order each other through global words

    def find(self, kind: str, message: str, actor=None, chain=None, advice: str = "") -> Finding:
        """Notes it and goes on."""
        raise NotImplementedError

    def fatal(self, kind: str, message: str, actor=None, advice: str = "") -> NoReturn:
        """Notes it and ends the run."""
        raise NotImplementedError

    def writer_under_way(self, allocation: Allocation, footprint: Footprint) -> "Actor | None":
        raise NotImplementedError


def _conflict(actor: Actor, allocation: Allocation, record: Record, doing: str, did: str) -> None:
    other = lines_of(record.where)
    actor.machine.find(
        "race",
        f"{actor.label} {doing} {allocation.name} while {record.actor} {did} it: nothing orders the two",
        actor,
        advice=f"{record.actor} {did} it at {other[0] if other else '?'}"
        + (f" (from {other[-1]})" if len(other) > 1 else "")
        + "; a wait, or an arrival before it, is missing, too early, or on the wrong slot or phase",
    )


def _check_fence(actor: Actor, allocation: Allocation, record: Record, doing: str, did: str) -> None:
    """An engine's access of shared memory after an ordinary one that it conflicts with needs a fence between, on either
    side of what orders the two (PTX ISA, "Causality order": proxies). Triton's compiler adds those within a role."""
    if not (actor.asynchronous and record.generic) or allocation.memory.tensor:
        return  # tensor memory has no proxies
    if seen(actor.fenced, record.timeline, record.time):
        return
    machine = actor.machine
    if machine.compiler_fences and machine.owners[record.timeline] is machine.owners[actor.timeline]:
        return
    other = lines_of(record.where)
    actor.machine.find(
        "missing fence",
        f"{actor.label} {doing} {allocation.name} through the asynchronous proxy, but the ordinary {did} of "
        f"{record.actor} were not fenced",
        actor,
        advice=f"fence_async_shared() between the access at {other[0] if other else '?'} and what tells others of it",
    )


def _unwritten(actor: Actor, allocation: Allocation, footprint: Footprint) -> None:
    """Bytes that nobody has written, or that an engine has been told to write and has not."""
    writer = actor.machine.writer_under_way(allocation, footprint)
    if writer is not None:
        record = Record(0, 0, 0, writer.timeline, writer.time(), writer.label, writer.chain(), False)
        _conflict(actor, allocation, record, "reads", "writes")
    else:
        missing = (footprint.mask & ~allocation.valid).bit_count() * GRANULE
        actor.machine.find(
            "uninitialised",
            f"{actor.label} reads {allocation.name}, of which nobody has written {missing} bytes",
            actor,
            advice=f"who should fill {allocation.name}, and the slot or slice that is read",
        )
    allocation.valid |= footprint.mask  # once is enough


def _overlapping(records: list, footprint: Footprint):
    low, high, mask = footprint.low, footprint.high, footprint.mask
    return [r for r in records if r.low < high and low < r.high and r.mask & mask]


def _subtract(records: list, footprint: Footprint) -> None:
    """Forget what a later write, ordered after it, stands for."""
    keep = ~footprint.mask
    for record in _overlapping(records, footprint):
        record.mask &= keep
    records[:] = [r for r in records if r.mask]


def on_read(actor: Actor, allocation: Allocation, footprint: Footprint, form: Any = None) -> None:
    """A read: of bytes written, and by nobody who might still be writing."""
    clock, log = actor.clock, allocation.log.whole()
    for record in _overlapping(log.writes, footprint):
        if not seen(clock, record.timeline, record.time):
            _conflict(actor, allocation, record, "reads", "writes")
        elif form is not None and record.form is not None and form != record.form:
            raise UnknownBuiltin(
                f"where the bytes of {allocation.name} lie in another layout than they were written in: "
                f"{record.form}, then {form}",
                "memory.py",
            )
        else:
            _check_fence(actor, allocation, record, "reads", "stores")
    if not allocation.covers(footprint):
        _unwritten(actor, allocation, footprint)
    reads = log.reads
    timeline = actor.timeline
    for record in reads:
        if record.timeline == timeline and record.mask & ~footprint.mask == 0 and seen(clock, timeline, record.time):
            record.time = actor.time()
            record.mask = footprint.mask
            record.low, record.high = footprint.low, footprint.high
            record.where = actor.chain()
            return
    reads.append(_record(actor, footprint))


def on_write(actor: Actor, allocation: Allocation, footprint: Footprint, form: Any = None) -> None:
    """A write: after every access that is there, and of bytes that then are valid."""
    clock, log = actor.clock, allocation.log.whole()
    for record in _overlapping(log.writes, footprint):
        if not seen(clock, record.timeline, record.time):
            _conflict(actor, allocation, record, "writes", "writes")
        else:
            _check_fence(actor, allocation, record, "writes", "stores")
    for record in _overlapping(log.reads, footprint):
        if not seen(clock, record.timeline, record.time):
            _conflict(actor, allocation, record, "writes", "reads")
        else:
            _check_fence(actor, allocation, record, "writes", "loads")
    _subtract(log.writes, footprint)
    _subtract(log.reads, footprint)
    allocation.valid |= footprint.mask
    record = _record(actor, footprint)
    record.form = form
    log.writes.append(record)


def _record(actor: Actor, footprint: Footprint) -> Record:
    return Record(
        footprint.low,
        footprint.high,
        footprint.mask,
        actor.timeline,
        actor.time(),
        actor.label,
        actor.chain(),
        not actor.asynchronous,
    )


def twin(view: View, memory: Memory) -> Allocation:
    """The allocation that a view means in `memory`: its own, or the same bytes of another CTA."""
    own = view.allocation
    return own if own.memory is memory else memory.at(own)


def load(actor: Actor, view: View, memory: Memory):
    """Checked read: data in register types."""
    on_read(actor, twin(view, memory), view.footprint(), view.form)
    return view.read(memory)


def store(actor: Actor, view: View, memory: Memory, data) -> None:
    """Checked write."""
    on_write(actor, twin(view, memory), view.footprint(), view.form)
    view.write(memory, data)


def on_global(actor: Actor, buffer: GlobalBuffer, cells, write: bool, atomic: bool = False) -> None:
    """An access to global memory: after writes of the same program that it touches, and of nothing that another program
    writes. `cells` takes the elements that are meant from a flat tensor, as a view or by an index.

    Reads are not kept, so that a write after a read goes unseen.
    """
    log = buffer.log
    if log is None:
        if not write:
            return
        log = buffer.log = GlobalLog(buffer.extent)
    words = cells.of(log.words)
    if bool(words.any()):
        _after_writes(actor, buffer, log, words.unique(), atomic)
    if write:
        cells.put(log.words, log.word(actor.machine.number, actor.timeline, actor.time(), atomic))


def _after_writes(actor: Actor, buffer: GlobalBuffer, log: GlobalLog, words, atomic: bool) -> None:
    """Holds an access against the distinct last writes of its elements."""
    machine = actor.machine
    for program, timeline, time, was_atomic in zip(*(f.tolist() for f in log.fields(words)), strict=True):
        if program == 0 or (atomic and was_atomic):
            continue
        if program != machine.number:
            if not machine.synchronised:
                machine.find(
                    "race",
                    f"{actor.label} uses elements of {buffer.name} that another program writes",
                    actor,
                    advice="which tiles belong to which program, and whether one reaches into those of the next",
                )
                return
            continue
        other, me = machine.owners[timeline], machine.owners[actor.timeline]
        if not seen(actor.clock, timeline, time) and other.name != me.name:  # twins in a cluster write the same
            machine.find(
                "race",
                f"{actor.label} uses elements of {buffer.name} that {other.stats.role} writes: nothing orders the two",
                actor,
                advice="store_wait(0, read_only=False) and an arrival after it, or tiles of their own",
            )


class Strided:
    """Cells of a global tensor by strides."""

    def __init__(self, first: int, shape, steps):
        self.first, self.shape, self.steps = first, shape, steps

    def of(self, flat):
        return flat.as_strided(self.shape, self.steps, self.first)

    def put(self, flat, value) -> None:
        self.of(flat).fill_(value)


class Picked:
    """Cells of a global tensor by an index."""

    def __init__(self, offsets, selected=None):
        if isinstance(offsets, int):
            offsets = torch.tensor([offsets])
        self.index = (offsets if selected is None else offsets[selected]).reshape(-1)

    def of(self, flat):
        return flat[self.index]

    def put(self, flat, value) -> None:
        flat[self.index] = value
