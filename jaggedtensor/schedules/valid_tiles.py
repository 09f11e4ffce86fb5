"""Which tiles of a jagged batch have work, as a list of units with their costs, for one head.

A unit is a block that stays with a worker (`TileAxis.QUERY`: a q block, `TileAxis.KEY`: a KV block) with the range of
blocks that pass it. Everything is made by torch operations of shapes that the host knows, so it runs without the host
waiting, inside CUDA graphs too, and gives the same integers on every device. A GPU pays for the number of operations,
not for their size, hence arithmetic like `x * flag` and in-place fills: `torch.where` would first copy a number over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jaggedtensor.errors import check_same_device, check_tensor, fail, is_readable
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.problem import UNLIMITED
from jaggedtensor.schedules.types import INT32_MAX, Mask, ScheduleKind, ScheduleRequest, Tile, TileAxis, Wave

_LAST_ROW = INT32_MAX // len(Tile)  # so that `row * 8 + column` fits an int32
_RANGES = (Tile.Q_BEGIN, Tile.Q_END, Tile.KV_BEGIN, Tile.KV_END)
_TIGHTER = "use larger blocks, or declare max_length and the number of tokens more tightly"


@dataclass(frozen=True)
class Bounds:
    """What the host knows of a layout without asking a GPU: `tokens` in all, none of the sequences over `longest`, and
    whether all are as long as each other."""

    tokens: int
    longest: int
    equal: bool = False

    @classmethod
    def of(cls, layout: JaggedLayout, rows: int | None, name: str) -> Bounds:
        """What the host knows of a layout: its own numbers, or the rows that the caller gives."""
        if layout.known_num_tokens is not None:
            tokens = layout.known_num_tokens
        elif layout.capacity is not None:
            tokens = layout.capacity
        elif rows is not None:
            tokens = rows
        else:
            fail(
                name,
                "the rows of the values, for a layout whose number of tokens the host does not know",
                None,
                "or validate the layout, or make it with JaggedLayout.with_capacity",
            )
        longest = layout.max_length if layout.lengths_on_host else layout.known_max_length
        equal = False
        if not torch.compiler.is_compiling() and layout.longest_on_host is not None:
            equal = layout.longest_on_host * layout.batch_size == layout.known_num_tokens
        return cls(tokens, tokens if longest is None else min(longest, tokens), equal)


@dataclass(frozen=True)
class _Side:
    """Queries or keys, as the stationary or the passing side."""

    lengths: Tensor | int  # [B] int64, or one for all
    bounds: Bounds
    per_token: int  # packed rows of a token
    block: int

    @property
    def most_blocks(self) -> int:
        """Blocks of a sequence, at most."""
        return self.blocks_in(self.bounds.longest)

    @property
    def surely_most_blocks(self) -> int:
        """The same, even if a sequence is longer than its layout declares."""
        return self.blocks_in(self.lengths if isinstance(self.lengths, int) else self.bounds.tokens)

    def blocks_in(self, tokens):
        return (tokens * self.per_token + (self.block - 1)) // self.block

    def blocks_together(self, batch: int) -> int:
        """Blocks of all sequences, at most. `ceil(x / n) <= (x + n - 1) / n`, summed over those not empty."""
        rows, filled = self.bounds.tokens * self.per_token, min(batch, self.bounds.tokens)
        return min((rows + (self.block - 1) * filled) // self.block, batch * self.most_blocks)

    def blocks_of(self, wave: Wave, batch: int) -> int:
        """The same of one wave; exact where all sequences are as long as each other."""
        rows = self.bounds.tokens * self.per_token
        if wave is Wave.FIRST:
            return min(batch, rows // (self.block + 1)) if self.most_blocks > 1 else 0
        if wave is Wave.MIDDLE:  # ceil(x / n) - 2 < x / n
            return min(rows // self.block, batch * max(self.most_blocks - 2, 0))
        return min(batch, rows) if wave is Wave.LAST else self.blocks_together(batch)


@dataclass(frozen=True)
class Units:
    """A list of units with work, for one head, and after them at least one without.

    From `count` on they are surplus. STREAM_K may cut a unit between any two of its KV blocks.
    """

    rows: Tensor  # int32 [capacity + 1, 8], tiles without a head
    cost: Tensor  # int64 [capacity + 1], blocks that pass
    most: int  # that a unit may cost
    weight: Tensor | None  # int64 [capacity + 1], what each of its KV blocks costs; None: 1
    count: Tensor  # int64, no dimension
    blocks: Tensor | None = None  # int32, the list that a mask makes
    each: int = 0  # blocks that pass each unit, where the host knows that all of `capacity` are alike

    @property
    def capacity(self) -> int:
        """A bound on the number of units that the host knows."""
        return self.cost.shape[0] - 1

    def spread(self, item: Tensor, heads: int, run: int) -> tuple[Tensor, Tensor]:
        """The unit of each item of so many heads, and the head: `run` units of a head, then the same of the next."""
        if run == 1 or heads == 1:
            return item // heads, item % heads
        first = item // (run * heads) * run
        rest = item - first * heads
        length = (self.count - first).clamp_(1, run)  # of a head's run, the last of which may be shorter
        unit = (first + rest % length).masked_fill_(item >= self.count * heads, self.capacity)
        return unit, (rest // length).clamp_(max=heads - 1)


def valid_units(
    request: ScheduleRequest,
    layout: JaggedLayout,
    query: JaggedLayout | None,
    mask: Mask | None,
    rows: int | None,
    q_rows: int | None,
) -> Units | None:
    """The units of a request, in order; None if the host knows that there are none."""
    batch = layout.batch_size
    key = _Side(_lengths(layout), Bounds.of(layout, rows, "rows"), 1, request.block_kv)
    if query is not None:
        side = _Side(_lengths(query), Bounds.of(query, q_rows, "q_rows"), request.group, request.block_q)
    else:
        assert isinstance(request.q_len, int)
        bounds = Bounds(request.q_len * batch, request.q_len, True)
        side = _Side(request.q_len, bounds, request.group, request.block_q)
    for name, one in (("keys", key), ("queries", side)):
        if one.bounds.longest * one.per_token > INT32_MAX:
            fail(f"packed rows of the {name} of a sequence", f"at most {INT32_MAX}", one.bounds.longest * one.per_token)
    if not (batch and key.bounds.tokens and side.bounds.tokens):
        return None

    if request.axis is TileAxis.QUERY:
        stays, passes, back, ahead = side, key, request.left, request.right
    else:
        stays, passes, back, ahead = key, side, request.right, request.left
    capacity = stays.blocks_of(request.wave, batch)
    if isinstance(stays.lengths, int):  # where few keys are spread over many sequences, most of these are empty
        capacity = min(capacity, min(batch, key.bounds.tokens) * stays.most_blocks)
    check_rows(capacity * request.heads)
    if mask is None and _passes_alike(request, side):
        return _units_of_whole_sequences(stays, passes, ahead, batch)
    units = _units(request, stays, passes, back, ahead, capacity, batch)
    if mask is not None:
        return _with_holes(units, request, mask, stays, passes, batch)
    alike = key.bounds.equal and side.bounds.equal and not request.windowed
    return replace(units, each=passes.most_blocks) if alike else units


def check_rows(rows: int) -> None:
    """Refuse schedules whose places do not fit an int32."""
    if rows > _LAST_ROW:
        fail("rows of the schedule", f"at most {_LAST_ROW}, so that places in it fit an int32", rows, _TIGHTER)


def _require(condition: Tensor, name: str, most: int, what: str, remedy: str) -> None:
    """A condition on values of the device: ValueError on a CPU, a device assert (no waiting) elsewhere.

    `most` is not named where it may be symbolic: writing it out would compile anew for each batch.
    """
    if condition.device.type == "cpu" and is_readable(condition):
        if not condition:
            fail(name, f"at most {most}, {what}", "more", remedy)
    elif not condition.is_meta:
        torch._assert_async(condition, f"{name} must be at most {what}; {remedy}")


def _lengths(layout: JaggedLayout) -> Tensor:
    """`[B]` int64; whatever unchecked offsets hold, none is negative, so that sums of them never decrease."""
    return layout.lengths().to(torch.int64).clamp(min=0)


def _of(x: Tensor | int, sequence: Tensor) -> Tensor | int:
    """Each unit's value of what sequences have, or all have alike."""
    return x if isinstance(x, int) else x[sequence]


def _passes_alike(request: ScheduleRequest, queries: _Side) -> bool:
    """Whether STREAM_K over KV blocks may take all those of a sequence as one unit: the same q blocks pass each."""
    by_key = request.kind is ScheduleKind.STREAM_K and request.axis is TileAxis.KEY
    return by_key and (queries.most_blocks <= 1 or not request.windowed)


def _first_block(stays: _Side, passes: _Side, ahead: int) -> Tensor | int:
    """`[B]`: the first block of which something passes: token s sees up to `s + passing length - length + ahead`."""
    if ahead == UNLIMITED:
        return 0
    longer = stays.lengths - passes.lengths - ahead
    assert isinstance(longer, Tensor)  # keys have lengths of their own
    return longer.clamp(min=0) * stays.per_token // stays.block


def _units_of_whole_sequences(stays: _Side, passes: _Side, ahead: int, batch: int) -> Units:
    """One unit for each sequence: all its KV blocks that a query sees, each passed by all its q blocks."""
    first, end, passing = (
        _first_block(stays, passes, ahead),
        stays.blocks_in(stays.lengths),
        passes.blocks_in(passes.lengths),
    )
    cost = (end - first) * passing
    order, count = _nonempty_first(cost)
    sequence = order.clamp(max=batch - 1)
    surplus = order == batch
    rows = _rows(sequence, (0, _of(passing, sequence), _of(first, sequence), end[sequence]), surplus)
    each = _of(passing, sequence)
    weight = each if isinstance(each, Tensor) else None if each == 1 else torch.full_like(sequence, each)
    cost = cost[sequence].masked_fill_(surplus, 0)
    return Units(rows, cost, passes.surely_most_blocks * stays.surely_most_blocks, weight, count)


def _units(
    request: ScheduleRequest, stays: _Side, passes: _Side, back: int, ahead: int, capacity: int, batch: int
) -> Units:
    """One unit for each stationary block that sees something. A token s sees those from `s + d - back` to
    `s + d + ahead`, where d is what the passing side is longer: contract 3 of the design, which the exchange of
    queries and keys turns into itself with `back` and `ahead` exchanged."""
    axis, all_blocks = request.axis, stays.blocks_in(stays.lengths)
    end_block, filled = all_blocks, all_blocks - _first_block(stays, passes, ahead)
    if request.wave is Wave.FIRST:
        end_block = filled = all_blocks.gt(1).to(torch.int64)
    elif request.wave is Wave.MIDDLE:
        end_block, filled = all_blocks - 1, (all_blocks - 2).clamp(min=0)
    elif request.wave is Wave.LAST:
        filled = all_blocks.clamp(max=1)
    if isinstance(passes.lengths, Tensor):
        filled = (passes.lengths > 0) * filled
    ends = filled.cumsum(0)  # [B]
    count = ends[-1]
    _require(count <= capacity, "the number of tiles", capacity, "the capacity declared", _TIGHTER)
    unit = torch.arange(capacity + 1, device=ends.device)
    sequence = torch.searchsorted(ends, unit, right=True).clamp_(max=batch - 1)
    surplus = unit >= count.clamp(max=capacity)
    block = unit - (ends - end_block)[sequence]

    begin: Tensor | int = 0
    length = _of(passes.lengths, sequence)
    if back == ahead == UNLIMITED:
        end = passes.blocks_in(length)
    else:
        mine = _of(stays.lengths, sequence)
        longer = length - mine
        if back != UNLIMITED:
            head = block * stays.block // stays.per_token  # first token of the block
            begin = (head + longer - back).clamp(min=0) * passes.per_token // passes.block
        last = length - 1
        if ahead != UNLIMITED:
            block_end = (block + 1) * stays.block
            limit = mine * stays.per_token
            rows = block_end.clamp(max=limit) if isinstance(limit, int) else torch.minimum(block_end, limit)
            seen = (rows - 1) // stays.per_token + longer + ahead  # by the last token of the block
            last = seen.clamp(max=last) if isinstance(last, int) else torch.minimum(seen, last)
        end = passes.blocks_in(last + 1)
    cost = (~surplus) * (end - begin)
    ranges = (block, block + 1, begin, end) if axis is TileAxis.QUERY else (begin, end, block, block + 1)
    weight = None if axis is TileAxis.QUERY else cost
    rows = _rows(sequence, ranges, surplus)
    return Units(rows, cost, passes.surely_most_blocks, weight, count.clamp(max=capacity))


def _rows(sequence: Tensor, ranges: tuple[Tensor | int, ...], surplus: Tensor) -> Tensor:
    """Tiles `[n, 8]` int32 without a head, whole."""
    rows = torch.zeros(sequence.shape[0], len(Tile), dtype=torch.int32, device=sequence.device)
    columns = {Tile.SEQUENCE: sequence, **dict(zip(_RANGES, ranges, strict=True))}
    for column, value in columns.items():
        if isinstance(value, Tensor) or value:
            rows[:, column] = value
    rows.masked_fill_(surplus[:, None], 0)
    rows[:, Tile.SEQUENCE].masked_fill_(surplus, -1)
    rows[:, Tile.MERGE :] = -1
    return rows


def _nonempty_first(cost: Tensor) -> tuple[Tensor, Tensor]:
    """The units with work in their order, then n for all further of n + 1 places; and how many have some."""
    filled = (cost > 0).cumsum(0)
    place = torch.arange(1, cost.shape[0] + 2, device=cost.device)
    return torch.searchsorted(filled, place), filled[-1]


def _blocks_of_a_mask_block(request: ScheduleRequest) -> tuple[int, int]:
    """How many q blocks and KV blocks of the schedule make one of the mask. Packed rows never straddle two of its
    blocks: `mask_block * group` of them make one, which is a multiple of every power of two up to `mask_block`."""
    if not request.mask_block:
        return 1, 1
    rows = request.mask_block * request.group
    for name, block, size in (("block_q", request.block_q, rows), ("block_kv", request.block_kv, request.mask_block)):
        if size % block:
            fail(f"{name} of a schedule with mask_block={request.mask_block}", f"a divisor of {size}", block)
    return rows // request.block_q, request.mask_block // request.block_kv


def _with_holes(units: Units, request: ScheduleRequest, mask: Mask, stays: _Side, passes: _Side, batch: int) -> Units:
    """Only the blocks where the mask is true: ranges become places in a list of blocks."""
    by_query = request.axis is TileAxis.QUERY
    if isinstance(mask, Tensor):
        check_tensor(mask, "mask")
        if mask.dtype != torch.bool:
            fail("mask", "bool", mask, "compare it with 0", error=TypeError)
        check_same_device(mask, "mask", units.rows.device)
        sizes = (batch, 1) if request.mask_block else (batch,)
        if mask.dim() != 3 or mask.shape[0] not in sizes or 0 in mask.shape:
            fail("mask", f"of shape [{batch}, q blocks, kv blocks], none of them 0", mask)
        mask = mask.expand(batch, -1, -1)
        per_q, per_kv = _blocks_of_a_mask_block(request)
        sizes = (mask.shape[1] * per_q, mask.shape[2] * per_kv)
        height, width = sizes if by_query else sizes[::-1]
        if request.mask_block and not torch.compiler.is_compiling():  # what is past the longest sequence costs nothing
            height, width = min(height, stays.most_blocks), min(width, passes.most_blocks)
    else:
        height, width, per_q, per_kv = stays.most_blocks, passes.most_blocks, 1, 1
    bound = "as the mask has" if isinstance(mask, Tensor) else "as max_length allows"
    for side, size in ((stays, height), (passes, width)):
        name, most = f"{'queries' if (side is stays) == by_query else 'keys'} in a sequence", size
        if request.mask_block:
            most = size * side.block // side.per_token
        else:
            name = f"blocks of {name}"
        blocks = side.blocks_in(side.lengths)
        if isinstance(blocks, Tensor):
            _require((blocks <= size).all(), name, most, bound, "use a larger one")
        elif blocks > size:
            fail(name, f"at most {most}, {bound}", "more", "use a larger one")
    if (units.capacity + 1) * width > INT32_MAX:
        fail("blocks under the mask", f"at most {INT32_MAX}", (units.capacity + 1) * width, _TIGHTER)

    columns = units.rows.to(torch.int64)
    begin, end = (Tile.KV_BEGIN, Tile.KV_END) if by_query else (Tile.Q_BEGIN, Tile.Q_END)
    passing = torch.arange(width, device=units.rows.device)
    valid = (passing >= columns[:, begin][:, None]) & (passing < columns[:, end][:, None])
    sequence = columns[:, Tile.SEQUENCE].clamp(min=0)[:, None]
    block = columns[:, Tile.Q_BEGIN if by_query else Tile.KV_BEGIN].clamp(max=height - 1)[:, None]
    q_block, kv_block = (block, passing[None]) if by_query else (passing[None], block)
    if isinstance(mask, Tensor):
        keep = mask[sequence, q_block // per_q, kv_block // per_kv]
    else:
        keep = mask(sequence, q_block, kv_block)
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        fail("the result of mask", "a bool tensor", keep, "compare it with 0", error=TypeError)
    try:
        keep = keep.expand(valid.shape) & valid
    except RuntimeError:
        fail("the result of mask", f"of a shape that broadcasts to {list(valid.shape)}", keep)

    # Each kept block goes to its place in the list, all others to one place past the end.
    place = (keep.flatten().cumsum(0) - 1).masked_fill_(~keep.flatten(), keep.numel())
    blocks = torch.zeros(keep.numel() + 1, dtype=torch.int32, device=keep.device)
    blocks.scatter_(0, place, passing.to(torch.int32).expand(valid.shape).flatten())
    cost = keep.sum(1)
    ends = cost.cumsum(0)
    order, count = _nonempty_first(cost[:-1])
    surplus = order == units.capacity
    rows = units.rows[order]
    rows[:, begin], rows[:, end] = ((x[order]).masked_fill_(surplus, 0) for x in (ends - cost, ends))
    cost = cost[order].masked_fill_(surplus, 0)
    return Units(rows, cost, width, None if by_query else cost, count, blocks[:-1])
