"""Roles and the scheduler: who runs next.

A role is a greenlet that hands over before every operation that another could notice. Engines' operations are steps of
their own. An order picks among roles that can run and operations that can land; whatever it picks, the hardware could.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import greenlet

from jaggedtensor.kernels.emulator.barriers import Mbarrier
from jaggedtensor.kernels.emulator.checks import Actor, Machine, call_chain, call_site, join, lines_of, seen
from jaggedtensor.kernels.emulator.errors import KINDS, Finding
from jaggedtensor.kernels.emulator.memory import Memory
from jaggedtensor.kernels.emulator.report import Event, Report, RoleStats

ORDERS = ("round_robin", "random", "eager", "late", "ahead", "starve")
MOST_FINDINGS = 20


class Stop(greenlet.GreenletExit):
    """Unwinds a role after a finding that it cannot go on from."""


@dataclass(eq=False)
class Cta:
    """One CTA of the cluster."""

    rank: int
    shared: Memory
    tensor: Memory
    barriers: dict[int, Mbarrier] = field(default_factory=dict)  # by address
    ended: bool = False


class Lane:
    """A timeline of operations, one after the other; `queue` holds those not done, where the engine keeps order."""

    __slots__ = ("last", "queue", "time", "timeline")

    def __init__(self, timeline: int, ordered: bool):
        self.timeline = timeline
        self.time = 0
        self.queue: list | None = [] if ordered else None
        self.last: Operation | None = None


class Role(Actor):
    """A warp group's job: a greenlet, its clocks, and what it has under way."""

    def __init__(self, cluster: "Cluster", cta: Cta, name: str, num_warps: int, body: Callable[[], Any]):
        self.cluster = self.machine = cluster
        self.cta = cta
        self.name = self.label = name
        self.num_warps = num_warps
        self.timeline = cluster.new_timeline(self)
        self.clock = [0] * (self.timeline + 1)
        self.clock[self.timeline] = 1
        self.fenced = []
        self.greenlet = greenlet.greenlet(body, parent=cluster.main)
        self.greenlet.role = self
        self.blocked_on: Callable[[], bool] | None = None
        self.why: Any = None  # text for a deadlock, or (barrier, parity)
        self.where: tuple = ()  # while blocked
        self.done = False
        self.lanes: list[Lane] = []  # of engines that keep no order
        self.queues: dict[str, Lane] = {}  # of engines that do
        self.unseen: list[Operation] = []  # issued, and perhaps not waited for
        self.stores: list = []  # TMA stores, oldest first
        self.products: list = []  # wgmma groups, oldest first
        self.copies: list = []  # cp.async of the group that is not yet committed
        self.copy_groups: list = []
        self.unrolled: list[int] = []  # where it is in loops that the compiler unrolls
        self.work: list = []  # arithmetic since the last event: [kind, instructions of each warp]
        self.has_initialised = False  # barriers of a cluster, and the others have not been told
        self.stats = RoleStats(name, cta.rank, warps=num_warps)
        cluster.roles.append(self)

    def chain(self) -> tuple:
        return self.where or call_chain()

    def pause(self) -> None:
        """Before an operation that others could notice: let them go first, if the order says so."""
        self.cluster.step()

    def wait_until(self, ready: Callable[[], bool], why: Any) -> None:
        """Blocks until `ready`."""
        self.pause()
        if not ready():
            self.where = call_chain()
            self.blocked_on, self.why = ready, why
            self.cluster.switch()
            self.blocked_on = self.why = None
            self.where = ()

    def site(self) -> tuple:
        """Which place in the kernel this is, for what the compiler makes once for each."""
        return (self.name, tuple(self.unrolled), *call_site())

    def lane(self) -> Lane:
        """For an operation that is ordered with no other: a lane whose last operation this role has seen the end of."""
        for lane in self.lanes:
            if seen(self.clock, lane.timeline, lane.time):
                return lane
        self.lanes.append(Lane(self.cluster.new_timeline(self), False))
        return self.lanes[-1]

    def queue(self, name: str) -> Lane:
        """The lane of an engine that works in order of issue."""
        if name not in self.queues:
            self.queues[name] = Lane(self.cluster.new_timeline(self), True)
        return self.queues[name]


def current() -> Role:
    """The role that runs now."""
    return greenlet.getcurrent().role


def meet_twins(role: Role, ordered: bool = True) -> None:
    """A barrier of the cluster: this role and its twins in the other CTAs. Its clocks count only if `ordered`."""
    cluster = role.cluster
    if len(cluster.ctas) == 1:
        return
    gate = cluster.gates.setdefault(role.name, {"come": 0, "generation": 0, "clock": [], "fenced": []})
    generation = gate["generation"]
    role.pause()
    join(gate["clock"], role.clock)
    join(gate["fenced"], role.fenced)
    role.tick()
    gate["come"] += 1
    cluster.event(role, "cluster barrier", 0, (), (), role.chain())
    if gate["come"] == len(cluster.ctas):
        gate["come"] = 0
        gate["generation"] += 1
        gate["released"] = (list(gate["clock"]), list(gate["fenced"]))
    role.wait_until(lambda: gate["generation"] > generation, "the other CTAs at a cluster barrier")
    if ordered:
        join(role.clock, gate["released"][0])
        join(role.fenced, gate["released"][1])


def settle_inits(role: Role) -> None:
    """Before the first use of barriers in a cluster, the compiler puts fence.mbarrier_init and a cluster barrier."""
    if role.has_initialised:
        role.has_initialised = False
        meet_twins(role)


class Operation(Actor):
    """Work of an engine: it lands in one or more steps, when the scheduler says so.

    Operations of one queue land in order, the others in any. `done` counts the steps that have landed.
    """

    asynchronous = True
    steps = 1
    event: Event

    def __init__(self, role: Role, kind: str, queue: str | None = None, nbytes: int = 0, shape: tuple = ()):
        self.machine = self.cluster = role.cluster
        self.role = role
        self.cta = role.cta
        self.kind = kind
        self.label = f"{kind} of {role.name}"
        self.where = call_chain()
        self.clock = list(role.clock)
        self.fenced = list(role.fenced)
        self.done = 0
        self.targets_of: list = []  # (memory, view) that it will write
        lane = role.queue(queue) if queue else role.lane()
        self.lane = lane
        self.timeline = lane.timeline
        lane.time += 1
        after: tuple = ()
        if lane.queue is not None and lane.last is not None:
            join(self.clock, lane.last.clock)
            after = (lane.last.event.number,)
        join(self.clock, [0] * lane.timeline + [lane.time])
        lane.last = self
        if lane.queue is not None:
            lane.queue.append(self)
        self.event = self.cluster.event(role, kind, nbytes, shape, after, self.where)
        role.tick()
        role.unseen.append(self)
        if len(role.unseen) > 64:
            role.unseen = [op for op in role.unseen if not op.seen_by(role.clock)]
        self.cluster.pending.append(self)

    def seen_by(self, clock: list) -> bool:
        """Whether `clock` knows that this is over."""
        return seen(clock, self.timeline, self.clock[self.timeline])

    def chain(self) -> tuple:
        return self.where

    def tick(self) -> None:
        """An operation's clock stands still: it is over when it has told anybody."""

    def ready(self) -> bool:
        return self.lane.queue is None or self.lane.queue[0] is self

    def land(self) -> None:
        """One step."""
        self.effect(self.done)
        self.done += 1
        if self.done == self.steps:
            self.cluster.pending.remove(self)
            if self.lane.queue is not None:
                self.lane.queue.pop(0)
            self.event.end = self.cluster.now()

    def effect(self, step: int) -> None:
        raise NotImplementedError


class Cluster(Machine):
    """One cluster that runs: its CTAs, roles and engines."""

    def __init__(self, launch: Any, program: tuple, ctas: list[Cta], report: Report):
        self.launch = launch
        self.program = program
        self.ctas = ctas
        self.report = report
        self.roles: list[Role] = []
        self.pending: list[Operation] = []
        self.owners: list[Role] = []
        self.number = launch.started
        self.main = greenlet.getcurrent()
        self.order = launch.order
        self.random: random.Random = launch.random
        self.turn = 0
        self.steps = 0
        self.failure: BaseException | None = None
        self.gates: dict = {}  # cluster barriers and global words: who has come, and what they had seen
        self.two_ctas = False  # whether its tensor-core instructions work on pairs of CTAs
        self._plan()

    # Order ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """What this run favours: drawn once per cluster."""
        self.engine_share = self.random.choice((0.1, 0.3, 0.6, 0.9))
        self.newest_first = self.random.random() < 0.5
        self.weights: dict[Role, float] = {}
        self.ranks: dict[Role, float] = {}
        self.starved = self.random.random()

    def rank(self, role: Role) -> float:
        if role not in self.ranks:
            self.ranks[role] = self.random.random()
        return self.ranks[role]

    def weight(self, role: Role) -> float:
        if role not in self.weights:
            self.weights[role] = self.random.choice((1.0, 1.0, 0.2, 0.02))
        return self.weights[role]

    def runnable(self) -> list[Role]:
        return [r for r in self.roles if not r.done and (r.blocked_on is None or r.blocked_on())]

    def choose(self) -> Role | Operation | None:
        """Who goes next, or None where nobody can."""
        roles = self.runnable()
        landing = [op for op in self.pending if op.ready()] if self.pending else self.pending
        if not roles:
            return self._operation(landing) if landing else None
        if not landing:
            return self._role(roles)
        order = self.order
        if order == "random":
            return self._operation(landing) if self.random.random() < self.engine_share else self._role(roles)
        if order == "late":
            return self._role(roles)
        if order == "ahead":
            share = self.engine_share if self.newest_first else 0.0
            return self._operation(landing) if self.random.random() < share else self._role(roles)
        return self._operation(landing)  # round_robin, eager, starve: engines are prompt

    def _operation(self, landing: list) -> Operation:
        if self.order in ("round_robin", "eager"):
            return landing[0]
        if self.order == "late":
            return landing[-1] if self.newest_first else self.random.choice(landing)
        return self.random.choice(landing)

    def _role(self, roles: list[Role]) -> Role:
        order = self.order
        if order in ("random", "late"):
            if len(roles) == 1:
                return roles[0]
            weights = [self.weight(r) for r in roles]
            place = self.random.random() * sum(weights)
            for role, weight in zip(roles, weights, strict=True):
                place -= weight
                if place < 0:
                    return role
            return roles[-1]
        if order == "ahead":
            return max(roles, key=self.rank)
        if order == "starve":
            victim = self.roles[int(self.starved * len(self.roles))]
            others = [r for r in roles if r is not victim]
            return self.random.choice(others) if others else victim
        if order == "eager":  # a role runs until it blocks
            return roles[0]
        self.turn += 1
        return roles[self.turn % len(roles)]

    # Running ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A role offers to hand over."""
        self.steps += 1
        self.switch()

    def switch(self) -> None:
        self.main.switch()

    def run(self) -> Generator[None, None, None]:
        """A step at a time, until every role is done, or none can go on."""
        limit = self.launch.max_steps
        try:
            while True:
                chosen = self.choose()
                if chosen is None:
                    if any(not r.done for r in self.roles):
                        self._deadlock()
                    return
                if isinstance(chosen, Operation):
                    self.steps += 1
                    chosen.land()
                else:
                    chosen.greenlet.switch()
                    if self.failure is not None:
                        raise self.failure
                if self.steps > limit:
                    self.find("too long", f"more than {limit} steps", advice="a loop that never ends, or max_steps")
                    raise Stop
                yield
        except Stop:
            pass
        finally:
            for role in self.roles:
                if not role.greenlet.dead and role.greenlet:
                    role.greenlet.throw(Stop)

    def _deadlock(self) -> None:
        lines, advice, stuck_bytes = [], [], []
        for role in self.roles:
            if role.done:
                continue
            why = role.why
            where = lines_of(role.where)
            at = f" at {where[0]}" if where else ""
            if isinstance(why, tuple):
                barrier, parity = why
                lines.append(
                    f"{role.label} (CTA {role.cta.rank}) waits for parity {parity} of {barrier.describe()}{at}"
                )
                advice.append(f"{barrier.name}: {barrier.whose()}")
                if barrier.pending == 0 and barrier.bytes and barrier.issued:
                    stuck_bytes.append(barrier)
            else:
                lines.append(f"{role.label} (CTA {role.cta.rank}) waits for {why}{at}")
        blocked = next((r for r in self.roles if not r.done), None)
        text = "no role can go on:\n    " + "\n    ".join(lines)
        for barrier in stuck_bytes:
            self.find(
                "wrong bytes",
                f"{barrier.describe()}: all arrivals are there, and no copy is under way",
                blocked,
                advice="mbarrier.expect: more bytes than the copies of a phase bring",
            )
        self.find("deadlock", text, blocked, advice="\n        ".join(dict.fromkeys(advice)))

    # Findings and events ----------------------------------------------------------------------------------------

    def find(self, kind: str, message: str, actor=None, chain=None, advice: str = "") -> Finding:
        """Notes what is wrong, once for each place; after many, stops."""
        where = lines_of(chain if chain is not None else actor.chain() if actor is not None else ())
        cta = actor.cta.rank if actor is not None else 0
        finding = Finding(kind, message, actor.label if actor is not None else "", cta, self.program, where, advice)
        if self.report.add(finding) and len(self.report.findings) >= MOST_FINDINGS:
            self.failure = Stop()
            raise self.failure
        return finding

    def fatal(self, kind: str, message: str, actor=None, advice: str = "") -> NoReturn:
        """Notes it and unwinds: there is no sensible way on."""
        finding = self.find(kind, message, actor, advice=advice)
        error = KINDS[kind](finding)
        self.failure = Stop()
        self.failure.__cause__ = error
        raise Stop

    def writer_under_way(self, allocation, footprint) -> Operation | None:
        """An operation that is issued, has not landed, and will write these bytes."""
        for operation in self.pending:
            for memory, view in operation.targets_of:
                here = memory is allocation.memory and view.allocation.start == allocation.start
                if here and view.footprint().meets(footprint):
                    return operation
        return None

    def synchronise(self, role: Role, buffer, offset: int, sem: str | None) -> None:
        """An atomic on a global word: it orders the roles that use it, unless relaxed."""
        if sem == "relaxed":
            return
        self.launch.synchronised = True
        word = self.gates.setdefault(("word", id(buffer), offset), {"clock": [], "fenced": []})
        join(role.clock, word["clock"])
        join(role.fenced, word["fenced"])
        join(word["clock"], role.clock)
        join(word["fenced"], role.fenced)
        role.tick()

    @property
    def compiler_fences(self) -> bool:  # type: ignore[override]
        return self.launch.compiler_fences

    @property
    def synchronised(self) -> bool:  # type: ignore[override]
        return self.launch.synchronised

    def new_timeline(self, owner: Role) -> int:
        self.owners.append(owner)
        return len(self.owners) - 1

    def now(self) -> int:
        self.report.clock += 1
        return self.report.clock

    def event(self, role: Role, kind: str, nbytes: int, shape: tuple, after: tuple, where: tuple) -> Event:
        event = self.report.trace(self.program, role.stats, kind, nbytes, shape, after, where, self.now())
        if role.work:
            event.work = tuple((kind, count) for kind, count in role.work)
            role.work.clear()
        return event
