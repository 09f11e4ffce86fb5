"""mbarriers: phases that complete, and what they order.

A phase completes when its pending arrivals and its outstanding bytes are both zero; the next begins at once with the
count that the barrier was initialised with (PTX ISA, "Phase of the mbarrier object", "mbarrier.arrive", "tx-count").
A wait for a parity passes when the phase of that parity is the last completed one: a fresh barrier counts as having
completed a phase of parity 1 ("mbarrier.test_wait / mbarrier.try_wait", `.parity`).
"""

from dataclasses import dataclass, field

from jaggedtensor.kernels.emulator.checks import Actor, join, lines_of, seen


@dataclass
class Waiter:
    """The last time that a role passed this barrier."""

    phase: int
    time: int
    label: str
    where: tuple


@dataclass
class Mbarrier:
    """One barrier of one CTA: its state, and the clocks that it carries from arrivals to waiters."""

    name: str
    count: int
    pending: int
    init_timeline: int
    init_time: int
    bytes: int = 0
    issued: int = 0  # bytes of copies issued in this phase
    completed: int = 0
    clock: list = field(default_factory=list)  # of all arrivals so far
    fenced: list = field(default_factory=list)
    released: tuple = ((), ())  # both clocks as of the last completed phase
    waiters: dict = field(default_factory=dict)  # by timeline
    blocked: int = 0  # roles that wait now
    arrivers: dict = field(default_factory=dict)  # label: (phase, chain) of the last arrival
    arrivals: list = field(default_factory=list)  # events of this phase, for the trace
    completed_by: tuple = ()  # events of the last phase

    def passes(self, parity: int) -> bool:
        return (self.completed & 1) != (parity & 1)

    def describe(self) -> str:
        text = f"{self.name} (phase {self.completed}: {self.pending} of {self.count} arrivals missing"
        if self.bytes:
            text += f", {self.bytes} bytes expected" if self.bytes > 0 else f", {-self.bytes} bytes too many"
        return text + ")"

    def whose(self) -> str:
        """Who has arrived here, and when last: for the reader of a deadlock."""
        if not self.arrivers:
            return "nobody has arrived so far"
        return "; ".join(
            f"{label} last arrived in phase {phase} at {lines_of(chain)[0] if chain else '?'}"
            for label, (phase, chain) in self.arrivers.items()
        )


def usable(actor: Actor, barrier: Mbarrier | None, name: str, doing: str) -> bool:
    """Whether the barrier is one, and its initialisation is ordered before this use."""
    machine = actor.machine
    if barrier is None:
        machine.find(
            "barrier misuse",
            f"{actor.label} {doing} {name}, which is not initialised",
            actor,
            advice="mbarrier.init before the roles start",
        )
        return False
    if not seen(actor.clock, barrier.init_timeline, barrier.init_time):
        machine.find(
            "race",
            f"{actor.label} {doing} {name}, and nothing orders that after its initialisation",
            actor,
            advice="initialise barriers before warp_specialize; in a cluster, a cluster barrier after it",
        )
    return True


def arrive(actor: Actor, barrier: Mbarrier | None, name: str, count: int, event=None, doing="arrives on") -> None:
    """`count` arrivals; what the actor has seen, waiters will have seen (release)."""
    if not usable(actor, barrier, name, doing) or barrier is None:
        return
    if count > barrier.pending:
        actor.machine.find(
            "over-arrival",
            f"{actor.label} arrives on {barrier.name} with {count}, but phase {barrier.completed} waits for "
            f"{barrier.pending} of {barrier.count}",
            actor,
            advice=f"the count of mbarrier.init, and who arrives: {barrier.whose()}",
        )
        return
    barrier.pending -= count
    _carry(actor, barrier, event)
    _complete(actor, barrier)


def expect(actor: Actor, barrier: Mbarrier | None, name: str, nbytes: int, event=None) -> None:
    """One arrival, and so many bytes more before the phase can complete (mbarrier.arrive.expect_tx)."""
    if barrier is not None:
        barrier.bytes += nbytes
    arrive(actor, barrier, name, 1, event, "expects bytes on")


def deliver(actor: Actor, barrier: Mbarrier | None, name: str, nbytes: int, phase: int | None, event=None) -> None:
    """Bytes of a copy have landed (complete_tx). `phase` is the one that was current when the copy was issued."""
    if not usable(actor, barrier, name, "delivers to") or barrier is None:
        return
    barrier.bytes -= nbytes
    if phase is not None and barrier.completed > phase:
        actor.machine.find(
            "wrong bytes",
            f"{actor.label} delivers {nbytes} bytes to {barrier.name}, whose phase {phase} has completed without them",
            actor,
            advice="mbarrier.expect: fewer bytes than the copies of a phase bring, or none",
        )
    elif barrier.bytes < 0 and barrier.pending == 0:
        actor.machine.find(
            "wrong bytes",
            f"{actor.label} delivers {nbytes} bytes to {barrier.name}: {-barrier.bytes} more than expected",
            actor,
            advice="mbarrier.expect: fewer bytes than the copies of a phase bring",
        )
    _carry(actor, barrier, event)
    _complete(actor, barrier)


def _carry(actor: Actor, barrier: Mbarrier, event) -> None:
    join(barrier.clock, actor.clock)
    join(barrier.fenced, actor.fenced)
    barrier.arrivers[actor.label] = (barrier.completed, actor.chain())
    if event is not None:
        barrier.arrivals.append(event)
    actor.tick()


def _complete(actor: Actor, barrier: Mbarrier) -> None:
    """Ends the phase if nothing is missing. A waiter that this one is not ordered after is lapped: it may sleep."""
    if barrier.pending or barrier.bytes:
        return
    for timeline, waiter in barrier.waiters.items():
        if waiter.phase == barrier.completed - 1 and not seen(barrier.clock, timeline, waiter.time):
            where = lines_of(waiter.where)
            actor.machine.find(
                "lap",
                f"phase {barrier.completed} of {barrier.name} completes although nothing orders that after "
                f"{waiter.label} has passed phase {waiter.phase}: a slow {waiter.label} would miss it",
                actor,
                advice=f"the wait at {where[0] if where else '?'}"
                + (f" (from {where[-1]})" if len(where) > 1 else "")
                + ", and what its release, if any, is waited for by whoever arrives here",
            )
    barrier.completed += 1
    barrier.pending = barrier.count
    barrier.issued = 0
    barrier.released = (list(barrier.clock), list(barrier.fenced))
    barrier.completed_by = tuple(barrier.arrivals)
    barrier.arrivals.clear()


def pass_through(actor: Actor, barrier: Mbarrier) -> int:
    """A wait that succeeds (acquire): the waiter has seen what arrivals of completed phases had. Returns the phase."""
    phase = barrier.completed - 1
    join(actor.clock, barrier.released[0])
    join(actor.fenced, barrier.released[1])
    barrier.waiters[actor.timeline] = Waiter(phase, actor.time(), actor.label, actor.chain())
    return phase
