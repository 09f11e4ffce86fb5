"""What a schedule is: tiles in an order, with owners, as int32 tensors that a kernel walks.

for t in range(worker_offsets[w], worker_offsets[w + 1]):
    sequence, head, q_begin, q_end, kv_begin, kv_end, merge, slot = tiles[t]
"""

from __future__ import annotations

import enum
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jaggedtensor.errors import describe, fail, is_readable
from jaggedtensor.problem import UNLIMITED

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout

# bool [B, q blocks, kv blocks], or a function of (sequence, q block, kv block) index tensors that gives one
Mask = Tensor | Callable[[Tensor, Tensor, Tensor], Tensor]

INT32_MAX = 2**31 - 1


class ScheduleKind(enum.Enum):
    """How tiles are ordered and who owns them."""

    CONTIGUOUS = "contiguous"  # in order, equal counts
    ROUND_ROBIN = "round robin"  # in order, dealt one by one: equal costs, unequal counts
    ZIGZAG = "zigzag"  # longest first, dealt in alternating direction: unequal costs
    LPT = "lpt"  # longest first, to the least loaded worker: the reference for zigzag, built on the host
    STREAM_K = "stream-k"  # equal contiguous shares of all blocks, cut inside a sequence where need be
    DYNAMIC = "dynamic"  # longest first, taken from a queue by whoever is free


class TileAxis(enum.Enum):
    """What stays with a worker while it walks a tile."""

    QUERY = "query"  # one q block stays, KV blocks pass: forward
    KEY = "key"  # a KV block stays, q blocks pass: backward, where dK and dV of a block have one owner


class Wave(enum.Enum):
    """Which KV blocks of each sequence a schedule is of, where others have schedules of their own: no two tiles of the
    first or of the last wave share q blocks, and there is a tile of the last for all that have keys."""

    ALL = "all"
    FIRST = "first"  # the first KV block, of sequences that have two or more
    MIDDLE = "middle"  # those between
    LAST = "last"  # the last, or only, one


class Tile(enum.IntEnum):
    """Columns of `TileSchedule.tiles`: a rectangle of blocks, each (q block, kv block) of which is computed."""

    SEQUENCE = 0  # -1 in rows past the count
    HEAD = 1  # key-value head; the query heads that share it are packed into the rows of the q block
    Q_BEGIN = 2
    Q_END = 3
    KV_BEGIN = 4
    KV_END = 5
    MERGE = 6  # row of `merges` that a partial result belongs to, -1 if the tile is whole
    SLOT = 7  # scratch row for that partial result, -1 if the tile is whole


class Merge(enum.IntEnum):
    """Columns of `TileSchedule.merges`: partial results `SLOT .. SLOT + PARTS`, in this order, make one result."""

    SEQUENCE = 0  # -1: of all sequences (the gradient of a broadcast query)
    HEAD = 1
    BEGIN = 2  # blocks that the result is of: of queries, or of keys where a KV block is cut
    END = 3
    SLOT = 4
    PARTS = 5  # 0 in surplus rows


SURPLUS_TILE = (-1, 0, 0, 0, 0, 0, -1, -1)  # no sequence and empty ranges: nothing to do, whichever a kernel looks at


class Identity:
    """This very object, held weakly: equal to another `Identity` of the same living object, and hashable.

    A tensor is the same only as long as it is not changed in place.
    """

    __slots__ = ("_hash", "_ref", "_version")

    def __init__(self, value: Any) -> None:
        self._ref = weakref.WeakMethod(value) if inspect.ismethod(value) else weakref.ref(value)
        counted = isinstance(value, Tensor) and not torch.compiler.is_compiling() and not value.is_inference()
        self._version = value._version if counted else None
        # A bound method is made anew at each access, and equals the one before.
        self._hash = hash(value) if inspect.ismethod(value) else id(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        mine, theirs = self._ref(), other._ref()
        same = mine is theirs or (inspect.ismethod(mine) and mine == theirs)
        return mine is not None and same and self._version == other._version

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_stale(self) -> bool:
        """Whether no identity made from now on can equal this one: the object is gone, or has changed."""
        value: Any = self._ref()
        return value is None or (self._version is not None and self._version != value._version)

    def __repr__(self) -> str:
        value = self._ref()
        return "<gone>" if value is None else f"<{describe(value)} at {id(value):#x}>"


@dataclass(frozen=True)
class ScheduleRequest:
    """All that a schedule depends on besides the layout of the keys; the key of the cache."""

    kind: ScheduleKind
    axis: TileAxis
    block_q: int  # packed rows in a q block: row i * group + g is query i of the head's g-th query head
    block_kv: int  # keys in a KV block
    heads: int  # key-value heads
    group: int  # query heads that share one
    workers: int  # CTAs
    q_len: int | Identity  # queries of each sequence, or the layout that tells
    left: int = UNLIMITED  # the window of AttentionProblem; causal is right = 0
    right: int = UNLIMITED
    mask: Identity | None = None
    tile_cost: int = 0  # what starting a tile costs, in KV blocks: weighed by STREAM_K and LPT
    mask_block: int = 0  # queries, and keys, of a block of the mask; 0: it has the blocks of the schedule
    cut_last_round: int = 0  # blocks that pass a part of a tile of the last round, at least; 0: tiles are whole
    wave: Wave = Wave.ALL  # of KV blocks that stay
    run: int = 1  # tiles of a head that are dealt before as many of the next; 1: the heads of a tile follow each other

    def __post_init__(self) -> None:
        for name, member in (("kind", ScheduleKind), ("axis", TileAxis), ("wave", Wave)):
            value = getattr(self, name)
            if not isinstance(value, member):
                fail(
                    name, f"a {member.__name__}", repr(value), f"one of {', '.join(map(str, member))}", error=TypeError
                )
        least = dict(
            block_q=1, block_kv=1, heads=1, group=1, workers=1, q_len=0, left=-1, right=-1, tile_cost=0, mask_block=0,
            cut_last_round=0, run=1,
        )  # fmt: skip
        for name, lowest in least.items():
            value = getattr(self, name)
            if name == "q_len" and isinstance(value, Identity):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                fail(name, "an int", value, error=TypeError)
            if not lowest <= value <= INT32_MAX:
                fail(name, f"in {lowest}..{INT32_MAX}", value)
        for name, nothing in (("cut_last_round", 0), ("run", 1)):
            if getattr(self, name) != nothing and self.kind is not ScheduleKind.ZIGZAG:
                fail(name, f"{nothing} for {self.kind}", getattr(self, name), f"ask for {ScheduleKind.ZIGZAG}")
        cuts = self.kind is ScheduleKind.STREAM_K or self.mask is not None or self.windowed
        if self.wave is not Wave.ALL and (cuts or self.axis is TileAxis.QUERY):
            fail("wave", f"{Wave.ALL} unless whole KV blocks stay and all q blocks pass each", self.wave)

    @property
    def teams(self) -> int:
        """Into how many teams heads and workers are divided, each of which has heads of its own. One where a run of a
        head's tiles occupies all workers."""
        alone = self.kind is ScheduleKind.LPT or self.run >= max(self.workers, 2)
        return 1 if alone else math.gcd(self.heads, self.workers)

    @property
    def windowed(self) -> bool:
        """Whether a window hides any tile."""
        return self.left != UNLIMITED or self.right != UNLIMITED


@dataclass(frozen=True, eq=False)
class TileSchedule:
    """Tiles in an order, with owners: made by `JaggedLayout.schedule`, walked by kernels.

    >>> layout = JaggedLayout(torch.tensor([0, 300, 300, 400]))
    >>> schedule = layout.schedule(ScheduleKind.ZIGZAG, q_len=128, heads=1, workers=2)
    >>> schedule.tiles[schedule.worker_offsets[0]].tolist()  # sequence 0, head 0, q block 0, KV blocks 0..2, whole
    [0, 0, 0, 1, 0, 3, -1, -1]

    Sizes are bounds that the host knows; how many rows are in use is on the device. Empty sequences, and queries or
    keys that the window hides from everything, have no tile: launchers fill outputs with 0 (lse with -inf) beforehand.

    Attributes:
        request: what it was built for.
        tiles: int32 `[capacity, 8]`, columns as in `Tile`, sorted by owner and then by the order of execution; rows are
            32 bytes. Rows past the count are `SURPLUS_TILE`.
        owner: int32 `[capacity]`: the worker of each tile, -1 past the count (and for DYNAMIC, where nobody knows yet).
        worker_offsets: int32 `[workers + 1]`: worker w has the rows `worker_offsets[w]:worker_offsets[w + 1]`. None for
            DYNAMIC: rows are handed out from the first to the last.
        count: int32 `[1]`: rows in use.
        merges: int32 `[merge capacity, 6]`, columns as in `Merge`: how partial results come together. Of STREAM_K with
            `TileAxis.QUERY` a row for each q block that is cut; with `TileAxis.KEY` a row for each head: a worker has
            one slot for all its tiles of a head (where dQ of a broadcast query accumulates). Of ZIGZAG a row for each
            tile of a last round that is cut. Empty otherwise.
        blocks: int32, or None without a mask. With one, `KV_BEGIN:KV_END` (for `TileAxis.KEY`: `Q_BEGIN:Q_END`) are
            places in this list of blocks, which has a hole where the mask is false.
        slots: number of scratch rows that partial results need, at most.
    """

    request: ScheduleRequest
    tiles: Tensor
    owner: Tensor
    worker_offsets: Tensor | None
    count: Tensor
    merges: Tensor
    blocks: Tensor | None
    slots: int
    _layout: weakref.ref[JaggedLayout] = field(repr=False)

    @property
    def kind(self) -> ScheduleKind:
        """Order and owners."""
        return self.request.kind

    @property
    def axis(self) -> TileAxis:
        """Which blocks stay with a worker."""
        return self.request.axis

    @property
    def workers(self) -> int:
        """CTAs that share the tiles."""
        return self.request.workers

    @property
    def capacity(self) -> int:
        """Rows of `tiles`: a bound on `count` that the host knows."""
        return self.tiles.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tiles are."""
        return self.tiles.device

    def operands(self) -> list[Tensor]:
        """What kernels walk: tiles, worker offsets if there are workers, and the list of blocks if there is a mask."""
        found = [self.tiles]
        if self.worker_offsets is not None:
            found.append(self.worker_offsets)
        if self.request.mask is not None:  # the list is None where nothing has any work
            found.append(self.tiles.new_empty(0) if self.blocks is None else self.blocks)
        return found

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All there are, in the order that `of` takes."""
        return self.tiles, self.owner, self.worker_offsets, self.count, self.merges, self.blocks

    @classmethod
    def of(cls, request: ScheduleRequest, layout: JaggedLayout, slots: int, tensors: Sequence[Any]) -> TileSchedule:
        """From the tensors that `build` gives."""
        tiles, owner, worker_offsets, count, merges, blocks = tensors
        return cls(request, tiles, owner, worker_offsets, count, merges, blocks, slots, weakref.ref(layout))

    def require(self, layout: JaggedLayout, **expected: Any) -> None:
        """Refuse a schedule that was built for something else: another layout, device, or field of the request.

        >>> schedule = keys.layout.schedule(ScheduleKind.ZIGZAG, q_len=128, heads=4, workers=132)
        >>> schedule.require(keys.layout, block_kv=128, heads=4)

        Raises:
            ValueError: with what was expected and what this schedule is for.
        """
        remedy = "ask the layout of the keys for one: layout.schedule(...)"
        if layout.device != self.device:
            fail("the schedule", f"on {layout.device}, as the layout", f"one on {self.device}", remedy)
        mine = self._layout()
        if mine is not layout and (mine is None or not mine.same_as(layout)):
            fail("the schedule", f"of {layout}", f"one of {'a layout that is gone' if mine is None else mine}", remedy)
        for name, value in expected.items():
            if isinstance(getattr(self.request, name), Identity) and not isinstance(value, (int, Identity)):
                value = Identity(value)
            if getattr(self.request, name) != value:
                fail(f"{name} of the schedule", f"{value}", f"{getattr(self.request, name)}", remedy)

    def __repr__(self) -> str:
        r = self.request
        held = int(self.count) if self.device.type == "cpu" and is_readable(self.count) else "?"
        blocks = f"{r.block_q} x {r.block_kv}"
        return (
            f"TileSchedule({r.kind.value} by {r.axis.value}, {held} of at most {self.capacity} tiles of {blocks}, "
            f"heads={r.heads}, workers={r.workers}, device='{self.device}')"
        )
