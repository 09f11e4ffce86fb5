"""What a call of attention comes to before it runs: `prepare` builds its schedules, `explain` tells about it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK, check_block_mask
from jaggedtensor.errors import check_tensor, fail
from jaggedtensor.kernels.dispatch import Choice, choose
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops.attention import _DTYPES, Window, _autocast, _backend, _check_ranks, _check_shapes, _window
from jaggedtensor.ops.fp8 import E4M3, choose_fp8, wide_dtype
from jaggedtensor.problem import UNLIMITED, AttentionProblem, Device, QueryKind, tf32_allowed
from jaggedtensor.schedules.simulate import Simulation, simulate
from jaggedtensor.schedules.types import ScheduleKind, Tile, TileAxis, TileSchedule, Wave
from jaggedtensor.tensor import JaggedTensor, picture_of_lengths


@dataclass(frozen=True)
class Machine:
    """A GPU as a roofline: what it moves and computes in a second at best."""

    name: str
    device: Device
    bandwidth: float  # bytes from memory
    flops: float  # floating point operations of bf16 products
    source: str


MACHINES = {
    "h200": Machine(
        "h200", Device("cuda", (9, 0), 132, 227 << 10), 4.3e12, 790e12, "measurements of a copy and a large product"
    ),
    "b200": Machine("b200", Device("cuda", (10, 0), 148, 227 << 10), 8.0e12, 2250e12, "NVIDIA's published peaks"),
}


def machine_of(name: str) -> Machine:
    """The machine of a name."""
    if name not in MACHINES:
        fail("device", f"one of {', '.join(map(repr, MACHINES))}", repr(name))
    return MACHINES[name]


def _machine_here(device: torch.device) -> Machine | None:
    """The one whose name the GPU bears."""
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((machine for key, machine in MACHINES.items() if key in name), None)


# -- prepare -----------------------------------------------------------------------------------------------------------


def prepare(
    keys: JaggedTensor,
    q_len: int | JaggedTensor | JaggedLayout,
    num_heads: int,
    *,
    broadcast: bool,
    causal: bool,
    window: Window,
    dtype: torch.dtype | None,
    value_dim: int | None,
    train: bool,
    backend: str | None,
    device: str | None,
    block_mask: Tensor | None,
) -> None:
    """See `JaggedTensor.prepare`."""
    left, right = _window(causal, window)
    query, q_rows = (q_len, q_len.known_num_tokens) if isinstance(q_len, JaggedLayout) else (None, 0)
    if isinstance(q_len, JaggedTensor):
        query, q_rows = q_len.layout, q_len.values().shape[0]
    problem = _problem(
        keys, q_len if query is None else query, num_heads, broadcast, left, right, dtype, value_dim, device, block_mask
    )
    implementation = choose(problem, _backend(backend)).implementation
    if keys.layout.is_static or (query is not None and query.is_static):
        return  # built by attend, each time anew
    if q_rows is None:
        fail("q_len", "a jagged query, as the host does not know the number of tokens of its layout", query)
    implementation.schedules(problem, keys.layout, query, keys.values().shape[0], q_rows, train, block_mask)


def _problem(
    keys: JaggedTensor,
    q_len: object,
    num_heads: int,
    broadcast: bool,
    left: int,
    right: int,
    dtype: torch.dtype | None,
    value_dim: int | None,
    device: str | None,
    block_mask: Tensor | None,
) -> AttentionProblem:
    shape = keys.values().shape
    if keys.values().dim() not in (2, 3):
        fail("keys", "of shape [tokens, Hkv, D] or [tokens, D]", keys.values())
    kv_heads = shape[1] if len(shape) == 3 else 1
    if not isinstance(num_heads, int) or num_heads < 1 or not kv_heads or num_heads % kv_heads:
        fail("num_heads", f"a positive multiple of the {kv_heads} heads of the keys", num_heads)
    if isinstance(q_len, JaggedLayout):
        kind, length = QueryKind.JAGGED, None
    elif isinstance(q_len, int) and not isinstance(q_len, bool):
        kind, length = (QueryKind.BROADCAST if broadcast else QueryKind.PER_SEQUENCE), q_len
    else:
        fail("q_len", "an int, a jagged query or its layout", q_len, error=TypeError)
    if block_mask is not None:
        check_tensor(block_mask, "block_mask")
        longest = q_len.longest_on_host if isinstance(q_len, JaggedLayout) else length
        check_block_mask(block_mask, keys.batch_size, keys.device, longest, keys.layout.longest_on_host)
    place = Device.of(keys.device) if device is None else machine_of(device).device
    return AttentionProblem(
        query=kind,
        q_len=length,
        q_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=shape[-1],
        value_dim=shape[-1] if value_dim is None else value_dim,
        dtype=keys.dtype if dtype is None else dtype,
        device=place,
        left=left,
        right=right,
        tf32=place.type == "cuda" and tf32_allowed(),
        masked=block_mask is not None,
    )


# -- explain -----------------------------------------------------------------------------------------------------------

_WHY = {
    ScheduleKind.CONTIGUOUS: "in order, equal counts",
    ScheduleKind.ROUND_ROBIN: "tiles cost alike, sequences have {few} to {many} of them: dealt one by one",
    ScheduleKind.ZIGZAG: "tiles cost {low} to {high} blocks: longest first, dealt back and forth",
    ScheduleKind.LPT: "tiles cost {low} to {high} blocks: longest first, to the least loaded",
    ScheduleKind.STREAM_K: "sequences have {few} to {many} KV blocks: everyone gets as many, cut mid-sequence",
    ScheduleKind.DYNAMIC: "tiles cost {low} to {high} blocks: longest first, whoever is free takes the next",
}


@dataclass(frozen=True)
class Scheduled:
    """A schedule that an implementation asked for."""

    direction: str  # "forward" or "backward"
    schedule: TileSchedule
    why: str


@dataclass(frozen=True)
class Plan:
    """What attention of a query to a batch comes to: printed, it tells; `plot` draws it. See `JaggedTensor.explain`.

    All tensors are on the CPU.
    """

    problem: AttentionProblem
    machine: Machine | None  # the roofline, None for a GPU that is not known
    workers: int
    lengths: Tensor  # [B], keys
    q_lengths: Tensor  # [B]
    same_values: bool  # the values are the keys
    choice: Choice | None
    refusal: str  # why there is no choice
    schedules: tuple[Scheduled, ...]
    balance: dict[ScheduleKind, Simulation]  # of the forward pass, loads in blocks
    blocks: tuple[int, int]  # of queries and of keys
    layout: JaggedLayout  # of the keys, on the CPU
    block_mask: Tensor | None = None  # bool `[B or 1, blocks of queries, blocks of keys]`

    # -- sizes

    @property
    def tokens(self) -> int:
        """Tokens of the keys."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def padded_tokens(self) -> int:
        """Rows that a padded batch would have."""
        return len(self.lengths) * self.longest

    @property
    def tiles(self) -> int:
        """Blocks (of queries by keys) to compute, of all heads."""
        return int(next(iter(self.balance.values())).loads.sum())

    @property
    def padded_tiles(self) -> int:
        """Blocks that a padded batch has."""
        longest_q = int(self.q_lengths.max()) if len(self.q_lengths) else 0
        q_blocks = -(-longest_q * self.problem.group // self.blocks[0])
        return len(self.lengths) * q_blocks * -(-self.longest // self.blocks[1]) * self.problem.kv_heads

    @property
    def pairs(self) -> int:
        """(query, key) pairs that see each other, of a query head."""
        left, right = self.problem.left, self.problem.right
        if self.block_mask is not None:
            return int(pairs_through(self.block_mask, self.q_lengths, self.lengths, left, right).sum())
        return int(visible_pairs(self.q_lengths, self.lengths, left, right).sum())

    @property
    def flops(self) -> tuple[int, int]:
        """Forward: two products, S = Q K^T and O = P V. Backward: S again, dP, dV, dQ and dK."""
        p = self.problem
        return (
            2 * self.pairs * p.q_heads * (p.head_dim + p.value_dim),
            2 * self.pairs * p.q_heads * (3 * p.head_dim + 2 * p.value_dim),
        )

    @property
    def least_bytes(self) -> tuple[int, int]:
        """Each operand from memory once, each result to memory once. Forward: q, k, v, out, lse. Backward: these, the
        gradient of out, and of q, k and v."""
        p, size = self.problem, self.problem.dtype.itemsize
        q_rows = int(self.q_lengths.sum())
        query = size * p.q_heads * p.head_dim * (p.q_len or 0 if p.query is QueryKind.BROADCAST else q_rows)
        out = max(size, 2) * q_rows * p.q_heads * p.value_dim
        lse = q_rows * p.q_heads * (8 if p.dtype == torch.float64 else 4)
        keys = size * self.tokens * p.kv_heads * p.head_dim
        values = 0 if self.same_values else size * self.tokens * p.kv_heads * p.value_dim
        return query + keys + values + out + lse, 2 * (query + keys + values + out) + lse

    def floor(self, backward: bool = False) -> tuple[float, str] | None:
        """Seconds that the machine takes at best, and what bounds it: "memory" or "compute"."""
        if self.machine is None:
            return None
        moving = self.least_bytes[backward] / self.machine.bandwidth
        computing = self.flops[backward] / (self.machine.flops * (2 if self.problem.dtype == E4M3 else 1))
        return max((moving, "memory"), (computing, "compute"))

    # -- telling

    def __repr__(self) -> str:
        where = "" if self.machine is None else f" for {self.machine.name}"
        batch = f"{len(self.lengths):,} sequences, {self.tokens:,} tokens, longest {self.longest:,}"
        parts = {
            "lengths": [f"{picture_of_lengths(self.lengths.sort().values)} from shortest to longest", self._spread()],
            "padding": [f"would make {self.padded_tokens:,} rows{self._ratio(self.padded_tokens, self.tokens)}"],
            "attention": [self._call()],
            "kernels": self._kernels(),
            "blocks": [self._blocks()],
            "schedules": [
                f"{one.direction:<10}{one.schedule.kind.value} by {one.schedule.axis.value}: {one.why}"
                for one in self.schedules
            ],
            "balance": self._balance(),
            "work": self._work(),
        }
        lines = [f"Plan{where}: {batch}"]
        for name, texts in parts.items():
            lines += [f"  {name if i == 0 else '':<11}{text}" for i, text in enumerate(texts)]
        return "\n".join(lines)

    def _blocks(self) -> str:
        share = f" ({100 * self.tiles / self.padded_tiles:.0f} %)" if self.padded_tiles else ""
        size = f"{self.blocks[0]} queries x {self.blocks[1]} keys"
        return f"{self.tiles:,} of {size}, of the {self.padded_tiles:,} of a padded batch{share}"

    def _balance(self) -> list[str]:
        used: dict[ScheduleKind, str] = {}
        for one in self.schedules:
            if one.direction == "forward":
                used[one.schedule.kind] = " (forward)"
        title = f"blocks for each of {self.workers} workers"
        lines = [f"{title:<32}{'min':>8}{'mean':>10}{'max':>8}{'max / mean':>13}"]
        for kind, run in self.balance.items():
            load = f"{float(run.loads.min()):8,.0f}{run.mean:10,.1f}{run.makespan:8,.0f}{run.imbalance:13.3f}"
            lines.append(f"{'  ' + kind.value + used.get(kind, ''):<32}{load}")
        return lines

    def _work(self) -> list[str]:
        lines = []
        for backward, name in ((False, "forward"), (True, "backward")):
            work = f"{_short(self.flops[backward], 'FLOP')}, at least {_short(self.least_bytes[backward], 'B')}"
            bound = self.floor(backward)
            at_best = "" if bound is None else f": bound by {bound[1]}, {_short(bound[0], 's')} at best"
            lines.append(f"{name:<10}{work}{at_best}")
        m = self.machine
        if m is not None:
            speeds = f"{_short(m.bandwidth, 'B/s')} and {_short(m.flops, 'FLOP/s')}"
            lines.append(f"{'':<10}on one {m.name.upper()}: {speeds} from {m.source}")
        return lines

    def _spread(self) -> str:
        if not len(self.lengths):
            return "no sequences"
        ordered = self.lengths.sort().values.tolist()
        mean, median = self.tokens / len(ordered), ordered[len(ordered) // 2]
        empty = int((self.lengths == 0).sum())
        empties = f", {empty:,} empty" if empty else ""
        return f"min {ordered[0]:,}, median {median:,}, mean {mean:,.0f}, max {ordered[-1]:,}{empties}"

    @staticmethod
    def _ratio(padded: int, tokens: int) -> str:
        return f", {padded / tokens:.2f} times the tokens" if tokens else ""

    def _call(self) -> str:
        p = self.problem
        if p.q_len is None:
            queries = f"{int(self.q_lengths.sum()):,} queries in sequences of their own"
        else:
            shared = "one tensor for all" if p.query is QueryKind.BROADCAST else "other ones for each sequence"
            queries = f"{p.q_len} queries, {shared}"
        heads = f"{p.q_heads} heads" if p.group == 1 else f"{p.q_heads} heads on {p.kv_heads} of keys"
        dims = f"D {p.head_dim}" + (f", Dv {p.value_dim}" if p.value_dim != p.head_dim else "")
        sides = [f"{name} {side}" for name, side in (("left", p.left), ("right", p.right)) if side != UNLIMITED]
        window = f", window {', '.join(sides)}" if sides else ""
        masked = ", block mask" * p.masked
        return f"{queries}; {heads}, {dims}, {str(p.dtype).removeprefix('torch.')}{window}{masked}"

    def _kernels(self) -> list[str]:
        if self.choice is None:
            return [f"none: {self.refusal}"]
        over = "; ".join(f"{name} {' and '.join(why)}" for name, why in self.choice.passed_over.items())
        kernels = [self.choice.implementation.name + (f" (passed over: {over})" if over else "")]
        backward = self.choice.implementation.backward_told(self.problem)
        if self.problem.dtype == E4M3:
            backward = "none: in 8 bits there is no gradient"
        return [*kernels, f"backward  {backward}"] if backward else kernels

    # -- drawing

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the batch padded and packed, the load of each worker, and the lengths, into a PNG, PDF or SVG file.

        Needs matplotlib: `pip install jaggedtensor[plot]`.
        """
        from jaggedtensor.schedules.plot import draw_plan

        draw_plan(self).savefig(path)


def explain(
    keys: JaggedTensor,
    query: Tensor | JaggedTensor,
    values: JaggedTensor | None,
    *,
    causal: bool,
    window: Window,
    backend: str | None,
    device: str | None,
    block_mask: Tensor | None,
) -> Plan:
    """See `JaggedTensor.explain`."""
    values = keys if values is None else values
    q = query.values() if isinstance(query, JaggedTensor) else query
    k, v = keys.values(), values.values()
    one_head = k.dim() == 2
    _check_ranks(query, q, k, v, one_head)
    if one_head:
        q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2)
    q, k, v = _autocast(q, k, v)
    _check_shapes(q, k, v, (*_DTYPES, E4M3))  # the last for `attend_fp8`
    left, right = _window(causal, window)
    q_layout = query.layout if isinstance(query, JaggedTensor) else None
    if q_layout is not None and q_layout.batch_size != keys.batch_size:
        fail("the batch size of query", f"{keys.batch_size}, as of key", f"{q_layout.batch_size}")
    q_len = q.shape[-3] if q_layout is None else q_layout
    broadcast = q_layout is None and q.dim() == 3
    problem = _problem(keys, q_len, q.shape[-2], broadcast, left, right, k.dtype, v.shape[-1], device, block_mask)
    machine = _machine_here(k.device) if device is None else machine_of(device)
    return plan_of(
        problem,
        keys.layout.host_offsets().diff(),
        None if q_layout is None else q_layout.host_offsets().diff(),
        machine=MACHINES["h200"] if machine is None and k.device.type == "cpu" else machine,
        backend=_backend(backend),
        same_values=values is keys,
        block_mask=None if block_mask is None else block_mask.cpu(),
    )


class _Asked(JaggedLayout):
    """A layout that notes the schedules it is asked for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made: list[TileSchedule] = []

    def schedule(self, *args: Any, **options: Any) -> TileSchedule:
        made = super().schedule(*args, **options)
        self.made.append(made)
        return made


def plan_of(
    problem: AttentionProblem,
    lengths: Tensor,
    q_lengths: Tensor | None = None,
    *,
    machine: Machine | None = None,
    backend: str | None = None,
    same_values: bool = False,
    block_mask: Tensor | None = None,
) -> Plan:
    """A plan from lengths on the CPU, `[B]`; `q_lengths` for a jagged query."""
    layout = _Asked.from_lengths(lengths.to(torch.int64))
    query = None if q_lengths is None else JaggedLayout.from_lengths(q_lengths.to(torch.int64))
    choice, refusal, schedules = None, "", []
    try:
        if problem.dtype == E4M3:
            choice, whole = choose_fp8(problem, backend)
            problem = problem if whole else replace(problem, dtype=wide_dtype(problem.device.type))
        else:
            choice = choose(problem, backend)
    except NotImplementedError as error:
        refusal = str(error)
    if choice is not None:
        q_rows = 0 if query is None else query.num_tokens
        asked = (problem, layout, query, layout.num_tokens, q_rows)
        choice.implementation.schedules(*asked, False, block_mask)
        forward = len(layout.made)
        train = problem.dtype != E4M3
        choice.implementation.schedules(*asked, train, block_mask)  # forward again, and backward
        for number, schedule in enumerate(layout.made):
            if number not in range(forward, 2 * forward):
                direction = "forward" if number < forward else "backward"
                schedules.append(Scheduled(direction, schedule, _why(schedule, layout)))
    first = next((one.schedule.request for one in schedules if one.schedule.axis is TileAxis.QUERY), None)
    blocks = (128, 128) if first is None else (first.block_q, first.block_kv)
    workers = (
        problem.device.processors if problem.device.type == "cuda" or machine is None else machine.device.processors
    )
    if q_lengths is None:
        assert problem.q_len is not None
        q_lengths = torch.full_like(lengths, problem.q_len)
    balance = {}
    for kind in ScheduleKind:
        made = layout.schedule(
            kind,
            q_len=query if query is not None else problem.q_len,
            heads=problem.kv_heads,
            group=problem.group,
            workers=workers,
            block_q=blocks[0],
            block_kv=blocks[1],
            left=problem.left,
            right=problem.right,
            mask=block_mask,
            mask_block=0 if block_mask is None else MASK_BLOCK,
        )
        balance[kind] = simulate(made)
    return Plan(
        problem,
        machine,
        workers,
        lengths,
        q_lengths,
        same_values,
        choice,
        refusal,
        tuple(schedules),
        balance,
        blocks,
        layout,
        block_mask,
    )


def _why(schedule: TileSchedule, layout: JaggedLayout) -> str:
    """The reason for a kind, with figures from the lengths."""
    tiles = schedule.tiles[: int(schedule.count)].to(torch.int64)
    cost = (tiles[:, Tile.Q_END] - tiles[:, Tile.Q_BEGIN]) * (tiles[:, Tile.KV_END] - tiles[:, Tile.KV_BEGIN])
    blocks = -(-layout.lengths() // schedule.request.block_kv)
    ends = [int(f(x)) if len(x) else 0 for x in (cost, blocks) for f in (torch.amin, torch.amax)]
    low, high, few, many = ends
    cut = len(schedule.merges) if schedule.kind is ScheduleKind.ZIGZAG else 0
    more = f"; the last {cut} in {schedule.slots} parts" if cut else ""
    wave = "" if schedule.request.wave is Wave.ALL else f"the {schedule.request.wave.value} wave, "
    return wave + _WHY[schedule.kind].format(low=low, high=high, few=few, many=many) + more


def _short(value: float, unit: str) -> str:
    """Three digits and a prefix: 438 GFLOP, 2.26 GB, 555 µs."""
    prefixes = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k", 1.0: "", 1e-3: "m", 1e-6: "µ"}
    scale = next((scale for scale in prefixes if value >= scale), 1.0 if value == 0 else 1e-6)
    scaled = value / scale
    digits = 0 if scaled >= 99.95 or value == 0 else 1 if scaled >= 9.995 else 2
    return f"{scaled:,.{digits}f} {prefixes[scale]}{unit}"


def pairs_through(mask: Tensor, q_lengths: Tensor, k_lengths: Tensor, left: int, right: int) -> Tensor:
    """`[B]` int64: (query, key) pairs of each sequence that a block mask and the window let see each other."""
    q, k = q_lengths.to(torch.int64)[:, None, None], k_lengths.to(torch.int64)[:, None, None]
    rows, columns = (MASK_BLOCK * torch.arange(size) for size in mask.shape[1:])
    rows = rows[:, None]
    heights, widths = ((x - begin).clamp(0, MASK_BLOCK) for x, begin in ((q, rows), (k, columns)))  # of the blocks
    return (visible_pairs(heights, widths, left, right, k - q + rows - columns) * mask).sum((1, 2))


def visible_pairs(q_lengths: Tensor, k_lengths: Tensor, left: int, right: int, shift: Tensor | None = None) -> Tensor:
    """`[B]` int64: (query, key) pairs of each sequence that the window lets see each other. Query i stands on key
    `i + shift`, if that isn't `i + Lk - Lq`."""
    q, k = q_lengths.to(torch.int64), k_lengths.to(torch.int64)
    shift = k - q if shift is None else shift

    def up_to(bound: Tensor) -> Tensor:
        """Pairs with j - i <= bound: the sum over i of `clamp(i + bound + 1, 0, k)`."""

        def rising(n: Tensor) -> Tensor:
            n = n.clamp(min=0)
            steep = torch.minimum(n, k)
            return steep * (steep + 1) // 2 + (n - steep) * k

        return rising(q + bound) - rising(bound)

    most = q * k if right == UNLIMITED else up_to(shift + right)
    return most if left == UNLIMITED else most - up_to(shift - left - 1)
