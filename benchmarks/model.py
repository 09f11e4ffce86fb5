"""How long our kernels take by a model of cost, which is not a measurement.

    python benchmarks/model.py [--only TEXT] [--markdown docs/kernels/model.md]

Each kernel runs small on the emulator; its events are replayed in time (jaggedtensor/testing/model) for the cycles of a
block and of a tile; those go through the workloads' own schedules on paper. On the H200 the model is held against what
benchmarks/results/nvidia-h200.json has measured. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from report import write_between_markers
from workloads import WORKLOADS

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.blackwell import plan as blackwell
from jaggedtensor.kernels.hopper import plan as hopper
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.schedules import ScheduleKind, TileSchedule
from jaggedtensor.schedules.simulate import CostModel, simulate
from jaggedtensor.testing.compile_cases import CASES
from jaggedtensor.testing.compiled import Pass, compiled
from jaggedtensor.testing.model import B200, H200, Chip, Replayed, replay
from jaggedtensor.testing.mutants import load_module

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200.json"
# Whose turn it is at an engine decides by a few cycles which rhythm a kernel falls into, so some nearby ones are asked.
NEARBY = (0.92, 0.96, 1.0, 1.04, 1.08)  # of the cycles of an instruction
SMALL = 40  # instructions of a loop that is not worth counting
BEGIN, END = "<!-- model: begin -->", "<!-- model: end -->"
B, J = QueryKind.BROADCAST, QueryKind.JAGGED
BF16 = torch.bfloat16


@cache
def family(name: str) -> ModuleType:
    """A module of tests/emulator, which holds the values that it emulates to float64."""
    return load_module(str(ROOT / "tests" / "emulator" / f"{name}.py"))


# Kernels: (tiles, blocks of each) on one multiprocessor to a report ---------------------------------------------------


def hopper_forward(tiles: int, blocks: int, *, q_len: int | None, dim: int, ctas: int = 1, n: int = 64) -> Any:
    """`tiles` for each of `ctas` that share the multiprocessor; a query of 256 rows makes two of a sequence."""
    test = family("test_hopper_forward")
    lengths = [n * blocks] * (tiles * ctas * 128 // max(128, q_len or 0))
    if q_len is None:
        case = test.case_of(lengths, J, q_lengths=[128] * len(lengths), dim=dim, processors=1)
    else:
        case = test.case_of(lengths, q_length=q_len, dim=dim, processors=1)
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        emulate = test.emulate
        patch.setattr(test, "emulate", lambda *args, **options: reports.append(emulate(*args, **options)) or reports[0])
        test.run(case, patch, "round_robin", 0)
    return reports[0]


def hopper_broadcast_backward(tiles: int, blocks: int, *, q_len: int, dim: int) -> Any:
    test = family("test_hopper_backward")
    case = test.Case((64 * blocks,) * tiles, q_len=q_len, dim=dim, value_dim=dim, processors=1, dtype=BF16)
    return test.run(case, "round_robin", 0)


def hopper_backward(tiles: int, blocks: int) -> Any:
    test = family("test_hopper_backward_general")
    return test.run(test.Case((128,) * tiles, (64 * blocks,) * tiles, processors=1, dtype=BF16), "round_robin", 0)


def blackwell_forward(tiles: int, blocks: int, *, rows: int, broadcast: bool, dim: int = 128, **chosen: int) -> Any:
    module = family("families/blackwell_forward")
    sizes: dict[str, Any] = dict(dim=dim, value_dim=dim, processors=1, dtype=BF16)
    if broadcast:
        case = module.Case((128 * blocks,) * tiles, q_len=rows, **sizes)
    else:
        case = module.Case((128 * blocks,) * tiles, q_lengths=(rows,) * tiles, kind=J, **sizes)
    return module.run(case, "round_robin", 0, **chosen)


def blackwell_broadcast_backward(tiles: int, blocks: int, *, dim: int = 128, **chosen: int) -> Any:
    module = family("families/blackwell_backward")
    case = module.Case((128 * blocks,) * tiles, dim=dim, value_dim=dim, processors=1, dtype=BF16)
    return module.run(case, "round_robin", 0, **chosen)


def blackwell_backward(tiles: int, blocks: int, **chosen: int) -> Any:
    module = family("families/blackwell_backward_general")
    case = module.Case((128,) * tiles, (128 * blocks,) * tiles, dim=128, value_dim=128, processors=1, dtype=BF16)
    return module.run(case, "round_robin", 0, **chosen)[0]


def blackwell_pair_backward(tiles: int, blocks: int, **chosen: int) -> Any:
    """Of a pair of multiprocessors."""
    module = family("families/blackwell_backward_2cta")
    case = module.case((256,) * tiles, (128 * blocks,) * tiles, processors=2, dtype=BF16)
    return module.run(case, "round_robin", 0, **chosen)


def blackwell_wide_backward(tiles: int, blocks: int, *, gradient: int) -> Any:
    """A pass of the one for wide heads: a block is 64 of what passes the 128 that stay."""
    module = family("families/blackwell_backward_wide")
    stays, passes = (128,) * tiles, (64 * blocks,) * tiles
    lengths = (passes, stays) if gradient == 0 else (stays, passes)  # of keys and queries
    return module.run(
        module.Case(*lengths, processors=1, dtype=BF16), "round_robin", 0, (tuple(module.Gradient)[gradient],)
    )[0]


def blackwell_backward_of_all(tiles: int, blocks: int) -> Any:
    """The kernel whose keys stay, for a query that all sequences share: a block is one of keys here too."""
    module = family("families/blackwell_backward_general")
    sizes: dict[str, Any] = dict(dim=128, value_dim=128, processors=1, dtype=BF16)
    return module.run(module.Case((128 * blocks,) * tiles, q_len=128, query=B, **sizes), "round_robin", 0)[0]


@cache
def emulated(emulate: Callable[[int, int], Any], tiles: int, blocks: int) -> Any:
    """A report, which variants that only take their time differently share."""
    return emulate(tiles, blocks)


def released_late(report: Any, role: str) -> Any:
    """The run with each arrival of a role moved to where it next waits for a barrier."""
    events, held = [], []
    for event in report.events:
        mine = event.role == role
        if mine and event.kind == "arrive":
            held.append(event)
            continue
        if mine and event.kind == "wait":
            events += held
            held = []
        events.append(event)
    changed = copy.copy(report)
    changed.events = events + held
    return changed


@cache
def loops_of(case: str, arch: str, which: str) -> dict[str, int]:
    """Instructions of a trip of each role's bulk loop, as compiled."""
    kernel, *_ = compiled(CASES[case], arch, Pass(which))
    return {name: role.slots[0] for name, role in kernel.roles.items()}


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel at one size.

    Attributes:
        misses: the share of loaded bytes that comes from HBM.
        workers: CTAs of a multiprocessor.
        bound: cycles of a block that no kernel goes below, and what times it is asked for (issues 7 and 8).
        compiled: a case of jaggedtensor.testing.compile_cases, architecture and pass: the instructions of its roles'
            loops, as compiled, take the place of those that the emulator counts.
        trip: blocks that a trip of these loops covers.
        scale: for roles, by what their instructions are to be multiplied besides.
        staged: False: who stores by TMA waits at once.
        late: a role that releases what it has read only before it waits for the next.
    """

    name: str
    chip: Chip
    emulate: Callable[[int, int], Any]
    misses: float = 1.0
    workers: int = 1
    bound: float = 0.0
    asked: float = 0.0
    compiled: tuple[str, str, str] | None = None
    trip: int = 1
    scale: dict[str, float] = field(default_factory=dict)
    staged: bool = True
    late: str = ""

    def cost(self) -> Cost:
        scale = dict(self.scale)
        counted = self.block({})
        compiled: dict[str, tuple[float, float]] = {}
        if self.compiled is not None:
            for role, slots in loops_of(*self.compiled).items():
                if (time := counted.roles.get(f"{role} 0")) is None or "load" in role:
                    continue
                mine = time.instructions * self.trip
                if mine > SMALL:
                    compiled[role] = mine, slots
                    scale[role] = slots / mine * scale.get(role, 1.0)
        blocks, tiles = [], []
        for share in NEARBY:
            near = replace(self, chip=replace(self.chip, per_instruction=self.chip.per_instruction * share))
            few, many, block = near.replayed(2, 2, scale), near.replayed(6, 2, scale), near.block(scale)
            blocks.append(block)
            tiles.append(max((many.cycles - few.cycles) / 4 - 2 * block.cycles, 0.0))
        times = [block.cycles for block in blocks]
        spread = (max(times) - min(times)) / 2
        return Cost(self, blocks[len(NEARBY) // 2], fmean(times), spread, fmean(tiles), compiled)

    def block(self, scale: dict[str, float]) -> Replayed:
        return self.replayed(2, 12, scale).less(self.replayed(2, 2, scale), 20)

    def replayed(self, tiles: int, blocks: int, scale: dict[str, float]) -> Replayed:
        report = emulated(self.emulate, tiles, blocks)
        if self.late:
            report = released_late(report, self.late)
        return replay(report, self.chip, misses=self.misses, scale=scale, staged=self.staged)

    def but(self, name: str, change: dict[str, Any] | None = None, **fields: Any) -> Kernel:
        """A variant, with `change` in what it is emulated with."""
        emulate = partial(self.emulate, **change) if change else self.emulate
        return replace(self, name=name, emulate=emulate, bound=0.0, **fields)


@dataclass(frozen=True)
class Cost:
    """What the model says of a kernel, in cycles of a multiprocessor."""

    kernel: Kernel
    block: Replayed  # of a block (of each of the CTAs that share the multiprocessor)
    cycles: float  # of a block: the mean of several
    spread: float  # half of what these differ by
    tile: float  # what a tile takes beside its blocks
    compiled: dict[str, tuple[float, float]]  # instructions of a loop's trip by role: as counted, as compiled

    def share(self, engine: str) -> float:
        return self.block.engines.get(engine, 0.0) / self.block.cycles

    def critical(self) -> tuple[str, str]:
        """The role that waits least among those that compute or multiply, and the waits of the one that multiplies or,
        on Hopper, of itself."""
        roles = {name: role for name, role in self.block.roles.items() if role.end > 0 and role.instructions > 100}
        busiest = min(roles, key=lambda name: sum(roles[name].waits.values()))
        issuing = next((name for name in roles if name.startswith("mma")), busiest)
        most = sorted(roles[issuing].waits.items(), key=lambda item: -item[1])[:2]
        waits = [f"{cause} {cycles:.0f}" for cause, cycles in most if cycles >= 50]
        idle = sum(roles[busiest].waits.values())
        busy = f"{busiest.split()[0].removesuffix('_role')} {1 - idle / self.block.cycles:.0%}"
        return busy, f"{issuing.split()[0].removesuffix('_role')}: {', '.join(waits) or 'nothing'}"


# A block is one of keys (of queries in the general backward) for all rows of a CTA. Bounds in cycles: of the H200 from
# what its HBM and products alone were measured to do; of the B200 as in docs/kernels/blackwell-*.md.
HOPPER = (
    Kernel(
        "fwd, 128 rows for all",
        H200,
        partial(hopper_forward, q_len=128, dim=128),
        compiled=("broadcast 128", "sm_90", "forward"),
    ),
    Kernel(
        "fwd, 256 rows for all",
        H200,
        partial(hopper_forward, q_len=256, dim=128, n=128),
        misses=0.5,
        compiled=("broadcast 128, 256 rows, much", "sm_90", "forward"),
    ),
    Kernel("fwd, 32 rows for all", H200, partial(hopper_forward, q_len=32, dim=128, ctas=2), workers=2),
    Kernel("fwd, 128 rows for all, D 64", H200, partial(hopper_forward, q_len=128, dim=64, ctas=2), workers=2),
    Kernel(
        "fwd, jagged",
        H200,
        partial(hopper_forward, q_len=None, dim=128, n=128),
        misses=0.1,
        compiled=("jagged 128, much", "sm_90", "forward"),
    ),
    Kernel(
        "bwd, 128 rows for all",
        H200,
        partial(hopper_broadcast_backward, q_len=128, dim=128),
        compiled=("broadcast 128", "sm_90", "backward"),
    ),
    Kernel("bwd, 32 rows for all", H200, partial(hopper_broadcast_backward, q_len=32, dim=128)),
    Kernel("bwd, 128 rows for all, D 64", H200, partial(hopper_broadcast_backward, q_len=128, dim=64)),
    Kernel("bwd, jagged", H200, hopper_backward, misses=0.1, compiled=("jagged 128", "sm_90", "backward")),
)
MEASURED = {  # what was measured of each, by workload; with True, it had a part in fitting
    "fwd, 128 rows for all": {"pma128-uniform": True, "pma128-lognormal": False, "pma128-tail": True},
    "fwd, 256 rows for all": {"pma256-uniform": False},
    "fwd, 32 rows for all": {"pma32-uniform": True},
    "fwd, 128 rows for all, D 64": {"pma128-d64": True},
    "fwd, jagged": {"self-uniform": True, "self-lognormal": True, "dense-4k": False},
    "bwd, 128 rows for all": {"pma128-uniform": True, "pma128-lognormal": True, "pma128-tail": False},
    "bwd, 32 rows for all": {"pma32-uniform": True},
    "bwd, 128 rows for all, D 64": {"pma128-d64": True},
    "bwd, jagged": {"self-uniform": True, "self-lognormal": False, "dense-4k": False},
}

HBM = 128 * 128 * 2 * 2 / B200.hbm  # of K and V of a block
STREAMS = Kernel(
    "fwd, two streams",
    B200,
    partial(blackwell_forward, rows=128, broadcast=True),
    bound=HBM,
    asked=1.15,
    trip=2,
    compiled=("broadcast 128", "sm_100", "forward"),
)
TILES = Kernel(
    "fwd, two tiles",
    B200,
    partial(blackwell_forward, rows=256, broadcast=False),
    misses=0.1,
    bound=2048,
    asked=1.25,
    compiled=("jagged 128", "sm_100", "forward"),
)
ANCHORED = replace(
    TILES,
    name="fwd, two tiles, anchored",
    emulate=partial(blackwell_forward, rows=256, broadcast=False, anchored=1),
    compiled=("jagged 128, anchored", "sm_100", "forward"),
)
STAYS = Kernel(
    "bwd, the query stays",
    B200,
    blackwell_broadcast_backward,
    bound=2 * HBM,
    asked=1.2,
    compiled=("broadcast 128", "sm_100", "backward"),
)
GENERAL = Kernel(
    "bwd, a CTA",
    B200,
    blackwell_backward,
    misses=0.1,
    bound=3328,
    asked=1.25,
    compiled=("jagged 128, the same bits", "sm_100", "backward"),
)
PAIR = Kernel(
    "bwd, a pair of CTAs",
    B200,
    blackwell_pair_backward,
    misses=0.1,
    bound=2688,
    asked=1.25,
    compiled=("jagged 128", "sm_100", "backward"),
)
# Of shared memory: operands of S and dP 96 KB each, of the sum 32 KB, loads 64 KB; dV has no dP.
WIDE = tuple(
    Kernel(f"bwd, D 256: {name}", B200, partial(blackwell_wide_backward, gradient=i), misses=0.1, bound=bound)
    for i, (name, bound) in enumerate({"dQ": 2304, "dK": 2304, "dV": 1536}.items())
)
BLACKWELL = (STREAMS, TILES, ANCHORED, STAYS, GENERAL, PAIR, *WIDE)

SLOW = replace(B200, tmem_load=276.0, tmem_store=276.0)
SLOW_STORES = replace(B200, tmem_store=100.0)
MASKED = {"softmax_role": 681 / 513}  # compiled: a loop with a causal mask, and one without (docs/kernels)
VARIANTS: dict[Kernel, tuple[Kernel, ...]] = {
    STREAMS: (
        Kernel(
            "padded to 256 rows",
            B200,
            partial(blackwell_forward, rows=256, broadcast=True),
            compiled=("broadcast 128, 256 rows", "sm_100", "forward"),
        ),
        STREAMS.but("a ring of 3 slots", {"kv_stages": 3}),
        STREAMS.but("P in one piece", {"pieces": 1}),
        STREAMS.but("P in 8 pieces", {"pieces": 8}),
        STREAMS.but("a mask in every block", scale=MASKED),
        STREAMS.but("stores that block", staged=False),
        STREAMS.but("stores to tensor memory take 100", chip=SLOW_STORES),
        STREAMS.but("the same, P in one piece", {"pieces": 1}, chip=SLOW_STORES),
        STREAMS.but("tensor memory takes 276 more each time", chip=SLOW),
    ),
    TILES: (
        TILES.but("P published once", {"early": 0}),
        TILES.but("P in two pieces, published once", {"early": 0, "pieces": 2}),
        TILES.but("P in 8 pieces", {"pieces": 8}),
        TILES.but("no polynomials", {"polynomials": 0}),
        TILES.but("a quarter of the exponentials by polynomials", {"polynomials": 2}),
        TILES.but("half of the exponentials by polynomials", {"polynomials": 4}),
        TILES.but("a mask in every block", scale=MASKED),
        TILES.but("loads without latency", chip=replace(B200, tma_latency=0.0, hbm_latency=0.0)),
        TILES.but("an instruction takes a cycle, not 1.5", chip=replace(B200, per_instruction=1.0)),
        TILES.but("stores to tensor memory take 100", chip=SLOW_STORES),
        TILES.but("tensor memory takes 276 more each time", chip=SLOW),
    ),
    ANCHORED: (
        ANCHORED.but("S and P in pieces of 32 columns", {"pieces": 4}),
        ANCHORED.but("S and P in pieces of 8 columns", {"pieces": 16}),
        ANCHORED.but("a mask in every block", scale={"anchored_role": 368 / 186}),  # compiled, as above
        ANCHORED.but("loads without latency", chip=replace(B200, tma_latency=0.0, hbm_latency=0.0)),
        ANCHORED.but("an instruction takes a cycle, not 1.5", chip=replace(B200, per_instruction=1.0)),
        ANCHORED.but("stores to tensor memory take 100", chip=SLOW_STORES),
        ANCHORED.but("tensor memory takes 276 more each time", chip=SLOW),
        ANCHORED.but("the same, pieces of 32 columns", {"pieces": 4}, chip=SLOW),
    ),
    STAYS: (
        Kernel("dQ added to memory for each tile (a CTA, keys stay)", B200, blackwell_backward_of_all),
        STAYS.but("dV and dK released when they are on their way out", late="drain_role"),
        STAYS.but("stores that block", staged=False),
        STAYS.but("a mask in every block", scale={"compute_role": 1.35}),
        STAYS.but("tensor memory takes 276 more each time", chip=SLOW),
    ),
    GENERAL: (
        GENERAL.but("dQ released when it is on its way out", late="drain_role"),
        GENERAL.but("stores that block", staged=False),
        GENERAL.but("a mask in every block", scale={"compute_role": 1.35}),
        GENERAL.but("dQ drained at no cost", scale={"drain_role": 0.01}, chip=replace(B200, tmem_load=0.0, tmem=1e9)),
        GENERAL.but("tensor memory takes 276 more each time", chip=SLOW),
    ),
    PAIR: (
        PAIR.but("dQ released when it is on its way out", late="reduce_role"),
        PAIR.but("stores that block", staged=False),
        PAIR.but("a mask in every block", scale={"compute_role": 1.35}),
        PAIR.but("dS reaches the neighbour at once", chip=replace(B200, remote_latency=0.0)),
        PAIR.but("tensor memory takes 276 more each time", chip=SLOW),
    ),
}

# Workloads ------------------------------------------------------------------------------------------------------------


class Planned:
    """In place of a layout: notes the schedule that a plan asks it for."""

    def __init__(self, layout: JaggedLayout):
        self.layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layout, name)

    def schedule(self, kind: ScheduleKind, **options: Any) -> TileSchedule:
        self.options = options
        self.made = self.layout.schedule(kind, **options)
        return self.made


@cache
def planned(name: str, which: str, chip: Chip) -> Planned:
    """The schedule that our kernels take for a workload on a chip. `which`: "fwd", "bwd" or "pair"."""
    workload = WORKLOADS[name]
    keys: Any = Planned(JaggedLayout.from_lengths(workload.draw()))
    jagged = workload.q_len is None
    query = keys.layout if jagged else None
    device = Device("cuda", (9, 0) if chip.ghz == H200.ghz else (10, 0), chip.processors, 227 << 10)
    sizes = (workload.heads, workload.heads, workload.dim, workload.dim)
    problem = AttentionProblem(J if jagged else B, workload.q_len, *sizes, BF16, device)
    rows = int(workload.draw().sum())
    q_rows = rows if workload.q_len is None else workload.q_len
    plan: Any = hopper if device.arch == (9, 0) else blackwell
    if which == "fwd":
        plan.plan_forward(problem, keys, query, rows, q_rows)
    elif which == "pair":
        plan.plan_pair_backward(problem, keys, query, rows, q_rows)
    elif not jagged:
        plan.plan_broadcast_backward(problem, keys, rows)
    elif plan is hopper:  # one schedule: waves take as long together
        plan.plan_general_backward(problem, keys, query, rows, q_rows, in_waves=False)
    else:
        plan.plan_general_backward(problem, keys, query, rows, q_rows)
    planned_: Planned = keys
    return planned_


def milliseconds(schedule: TileSchedule, cost: Cost) -> float:
    """Of a workload by the model."""
    time = simulate(schedule, CostModel(block=cost.cycles, tile=cost.tile)).makespan
    return time / cost.kernel.chip.ghz / 1e6 + cost.kernel.chip.launch_us / 1e3


# Tables ---------------------------------------------------------------------------------------------------------------

Table = tuple[str, list[list[str]]]  # a title, and lines, of which the first is the head


def calibration(costs: dict[str, Cost]) -> Table:
    rows = json.loads(RESULTS.read_text())
    measured, commit = {(row["workload"], row["pass"]): row["ms"] for row in rows}, rows[0]["commit"]
    lines = [["workload", "pass", "modelled ms", "measured ms", "error", "block", "tile", "fitted"]]
    for kernel in HOPPER:
        if (cost := costs.get(kernel.name)) is None:
            continue
        which = kernel.name[:3]
        for name, fitted in MEASURED[kernel.name].items():
            ms, real = milliseconds(planned(name, which, H200).made, cost), measured[name, which]
            cycles = f"{cost.cycles:.0f}", f"{cost.tile:.0f}"
            lines.append(
                [name, which, f"{ms:.3f}", f"{real:.3f}", f"{ms / real - 1:+.0%}", *cycles, "yes" if fitted else "no"]
            )
    return f"Modelled against measured, H200 (measured of commit {commit})", lines


def bounds(costs: dict[str, Cost]) -> Table:
    lines = [
        [
            "B200",
            "block",
            "bound",
            "ratio",
            "asked",
            "tile",
            "products",
            "shared memory",
            "HBM",
            "busiest role",
            "waits",
        ]
    ]
    for kernel in BLACKWELL:
        if (cost := costs.get(kernel.name)) is None:
            continue
        shares = [f"{cost.share(engine):.0%}" for engine in ("tensor", "shared", "hbm")]
        ratio = f"{cost.cycles / kernel.bound:.2f}"
        numbers = [
            f"{cost.cycles:.0f} ± {cost.spread:.0f}",
            f"{kernel.bound:.0f}",
            ratio,
            f"{kernel.asked or '-'}",
            f"{cost.tile:.0f}",
        ]
        lines.append([kernel.name, *numbers, *shares, *cost.critical()])
    return "Modelled cycles of a block against its bound, B200", lines


def variants(costs: dict[str, Cost]) -> Table:
    lines = [["B200", "variant", "block", "times", "tile"]]
    for kernel, others in VARIANTS.items():
        if kernel.name not in costs:
            continue
        base = costs[kernel.name]
        lines.append([kernel.name, "as it is", f"{base.cycles:.0f} ± {base.spread:.0f}", "1.00", f"{base.tile:.0f}"])
        for other in others:
            if (cost := costs.get(f"{kernel.name}: {other.name}")) is not None:
                cycles = f"{cost.cycles:.0f} ± {cost.spread:.0f}"
                lines.append(["", other.name, cycles, f"{cost.cycles / base.cycles:.2f}", f"{cost.tile:.0f}"])
    return "Modelled cycles of a block, one thing changed at a time, B200", lines


def instructions(costs: dict[str, Cost]) -> Table:
    lines = [["GPU", "kernel", "role", "counted", "compiled"]]
    for kernel in (*HOPPER, *BLACKWELL):
        for role, (mine, slots) in (costs[kernel.name].compiled if kernel.name in costs else {}).items():
            lines.append([kernel.chip.name, kernel.name, role.removesuffix("_role"), f"{mine:.0f}", f"{slots:.0f}"])
    return "Instructions of each warp in a trip of a role's loop, counted from the events and as compiled", lines


SHOWN = {
    ("fwd", STREAMS): ("pma128-uniform", "pma128-lognormal", "pma128-tail"),
    ("fwd", TILES): ("pma256-uniform", "self-uniform", "self-lognormal", "dense-4k"),
    ("fwd", ANCHORED): ("pma256-uniform", "self-uniform", "self-lognormal", "dense-4k"),
    ("bwd", STAYS): ("pma128-uniform", "pma128-lognormal", "pma128-tail"),
    ("bwd", GENERAL): ("self-uniform", "self-lognormal", "dense-4k"),
    ("pair", PAIR): ("self-uniform", "self-lognormal", "dense-4k"),
}


def workloads(costs: dict[str, Cost]) -> Table:
    """Times of whole workloads, and of other ways to deal their tiles."""
    kinds = (ScheduleKind.CONTIGUOUS, ScheduleKind.ROUND_ROBIN, ScheduleKind.ZIGZAG, ScheduleKind.DYNAMIC)
    lines = [["B200", "workload", "ms", *(kind.value for kind in kinds)]]
    for (which, kernel), names in SHOWN.items():
        if (cost := costs.get(kernel.name)) is None:
            continue
        for name in names:
            plan = planned(name, which, B200)
            cells = [f"{milliseconds(plan.made, cost):.3f}"]
            for kind in kinds:
                if which == "bwd" and kernel is STAYS:
                    cells.append("-")  # equal shares of all blocks
                    continue
                cells.append(f"{milliseconds(plan.layout.schedule(kind, **plan.options), cost):.3f}")
            lines.append([kernel.name, name, *cells])
    return "Modelled milliseconds, B200, and with tiles dealt in other ways", lines


def shown(table: Table, markdown: bool) -> str:
    title, lines = table
    if markdown:
        rule = ["---"] * len(lines[0])
        return f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return f"\n{title}\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--markdown", type=Path, help="write the tables between the marks of this page")
    arguments = parser.parse_args()
    wanted = [(k.name, k) for k in (*HOPPER, *BLACKWELL) if arguments.only in k.name]
    wanted += [(f"{k.name}: {v.name}", v) for k, vs in VARIANTS.items() if arguments.only in k.name for v in vs]
    costs = {}
    for i, (name, kernel) in enumerate(wanted):
        done = "#" * (30 * i // len(wanted))
        print(f"\r[{done:30}] {i + 1} of {len(wanted)}: {name:70.70}", end="", file=sys.stderr, flush=True)
        costs[name] = kernel.cost()
    print(file=sys.stderr)
    tables = [calibration(costs), bounds(costs), variants(costs), workloads(costs), instructions(costs)]
    tables = [table for table in tables if len(table[1]) > 1]
    print("\n".join(shown(table, markdown=False) for table in tables))
    if arguments.markdown is not None:
        text = "\n\n".join(shown(table, markdown=True) for table in tables)
        write_between_markers(arguments.markdown, text, BEGIN, END)


if __name__ == "__main__":
    main()
