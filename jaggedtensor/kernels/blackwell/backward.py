"""What the Blackwell backward kernels have in common: tiles that stay on their keys.

S^T = K Q^T and dP^T = V dO^T: keys are lanes of tensor memory and query rows its columns, so that P^T and dS^T are left
operands of dV and dK where they were made. Two compute roles have half of the query rows each, a key for each thread.
"""

from jaggedtensor.kernels.shared.arithmetic import LOG2_E
from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon
from jaggedtensor.kernels.shared.pipeline import Channel
from jaggedtensor.kernels.shared.walk import Schedule, Span, my_range, place_of, read_span

ROWS: gl.constexpr = gl.constexpr(128)  # packed query rows of a block
HALF: gl.constexpr = gl.constexpr(64)  # of them for each compute role
PIECE: gl.constexpr = gl.constexpr(32)  # query rows of P or dS that are made and stored at a time
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# -- tiles that stay on their keys -------------------------------------------------------------------------------------


@aggregate
class KeyTile:
    """A row of a schedule by keys: each of its blocks of keys meets each of its blocks of query rows."""

    sequence: gl.tensor
    head: gl.tensor  # of keys
    q_begin: gl.tensor  # blocks of packed query rows, or places in the list of them
    q_end: gl.tensor
    kv_begin: gl.tensor  # blocks of keys
    kv_end: gl.tensor


@gluon.jit
def read_key_tile(schedule, place):
    row = schedule.tiles + place * 8
    sequence = gl.maximum(gl.load(row), 0)  # -1 in the surplus rows of a schedule without any tile
    q_begin, q_end = gl.load(row + 2), gl.load(row + 3)
    return KeyTile(sequence, gl.load(row + 1), q_begin, q_end, gl.load(row + 4), gl.load(row + 5))


@aggregate
class KeyWalk:
    """The tile at hand, and the next one's row, so that no role waits for either."""

    schedule: Schedule
    tile: KeyTile
    span: Span
    ahead: KeyTile
    last: gl.tensor  # the CTA's last place in the schedule
    mirror: gl.tensor  # first + last place if it walks from the last to the first, else -1

    @gluon.jit
    def next(self, t):
        """The walk at the tile after tile `t`."""
        span = read_span(self.schedule, self.ahead.sequence)
        ahead = read_key_tile(self.schedule, place_of(t + 2, self.last, self.mirror))
        return KeyWalk(self.schedule, self.ahead, span, ahead, self.last, self.mirror)

    @gluon.jit
    def rows(self, n, C: gl.constexpr):
        """The n-th block of query rows. CTAs that share a sequence begin at different ones, to add to dQ apart."""
        tile, place = self.tile, self.tile.q_begin + n
        if C.staggered:
            count = tile.q_end - tile.q_begin
            place += tile.kv_begin % count
            place = gl.where(place >= tile.q_end, place - count, place)
        return self.schedule.block(place)


@gluon.jit
def start_key_walk(schedule, C: gl.constexpr):
    """This CTA's first tile, and how many it has. Where turns are taken it walks from the last to the first."""
    begin, end = my_range(schedule)
    last = gl.maximum(end - 1, 0)
    mirror = gl.where(C.ordered, begin + end - 1, -1)
    tile = read_key_tile(schedule, place_of(begin, last, mirror))
    ahead = read_key_tile(schedule, place_of(begin + 1, last, mirror))
    return KeyWalk(schedule, tile, read_span(schedule, tile.sequence), ahead, last, mirror), begin, end


@aggregate
class Limits:
    """Which packed query rows see the keys of a tile: from `first` to before `end`, for each key; and those that see
    every key of the tile."""

    first: gl.tensor  # [N]
    end: gl.tensor  # [N]
    all_first: gl.tensor
    all_end: gl.tensor

    @gluon.jit
    def applied(self, s, row):
        """S^T [N, 64] of query rows from `row` on, -inf where a row does not see a key."""
        if (row < self.all_first) | (row + s.shape[1] > self.all_end):
            layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
            column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
            first = gl.expand_dims(gl.convert_layout(self.first - row, layout, assert_trivial=True), 1)
            end = gl.expand_dims(gl.convert_layout(self.end - row, layout, assert_trivial=True), 1)
            s = gl.where((column >= first) & (column < end), s, float("-inf"))
        return s


@gluon.jit
def first_row(j, span, window, C: gl.constexpr):
    """The first packed row that sees keys j, contract 3 of the design: i >= j - (Lk - Lq) - right."""
    if C.right:
        i = j - span.k_count + span.q_count - window[1]
        return gl.minimum(gl.maximum(i, 0), span.q_count) * C.group
    else:
        return j * 0


@gluon.jit
def end_row(j, span, window, C: gl.constexpr):
    """The row after the last one: i <= j - (Lk - Lq) + left. Rows past the last query are nothing: all see all."""
    if C.left:
        i = j - span.k_count + span.q_count + window[0] + 1
        return gl.where(i >= span.q_count, 0x7FFFFFFF, gl.maximum(i, 0) * C.group)
    else:
        return j * 0 + 0x7FFFFFFF


@gluon.jit
def limits_of(block, span, window, layout: gl.constexpr, C: gl.constexpr):
    """Of a block of keys."""
    begin = block * C.block_n
    last = gl.minimum(begin + C.block_n, span.k_count) - 1
    j = begin + gl.arange(0, C.block_n, layout)
    return Limits(
        first_row(j, span, window, C),
        end_row(j, span, window, C),
        first_row(last, span, window, C),
        end_row(begin, span, window, C),
    )


# -- statistics of query rows ------------------------------------------------------------------------------------------


@aggregate
class Statistics:
    """Where lse and delta are: fp32, with the same strides."""

    lse: gl.tensor
    delta: gl.tensor
    batch: gl.tensor
    row: gl.tensor
    head: gl.tensor

    @gluon.jit
    def load(self, sequence, head, span, row, C: gl.constexpr):
        """-lse in log2 units and delta of packed rows: -inf and 0 for a row that sees nothing or is not there, whose P
        is then 0."""
        i, q_head = row // C.group, head * C.group + row % C.group
        if C.jagged:
            base = span.q_start.to(gl.int64) * self.row
        else:
            base = sequence.to(gl.int64) * self.batch
        at = base + i.to(gl.int64) * self.row + q_head * self.head
        inside = i < span.q_count
        lse = gl.load(self.lse + at, mask=inside, other=float("-inf"))
        delta = gl.load(self.delta + at, mask=inside, other=0.0)
        blind = lse == float("-inf")
        return gl.where(blind, float("-inf"), lse * -LOG2_E), gl.where(blind, 0.0, delta)


@gluon.jit
def statistics_role(schedule, statistics, channel: Channel, C: gl.constexpr):
    """A slot of the channel has the two of a block of query rows, a part each."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    walk, begin, end = start_key_walk(schedule, C)
    at = channel.start()
    for t in range(begin, end):
        tile = walk.tile
        for _ in range(tile.kv_begin, tile.kv_end):
            for n in range(tile.q_end - tile.q_begin):
                row = walk.rows(n, C) * ROWS + gl.arange(0, ROWS, layout)
                shift, delta = statistics.load(tile.sequence, tile.head, walk.span, row, C)
                slot, after = channel.acquire_empty(at)
                slot.buffer.store(shift)
                slot.publish()
                channel.slot(at, 1).buffer.store(delta)
                slot.publish()
                at = after
        walk = walk.next(t)
