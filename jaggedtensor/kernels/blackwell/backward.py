"""What the Blackwell backward kernels have in common: scores with keys as lanes, and tiles that stay on their keys.

S^T = K Q^T and dP^T = V dO^T: keys are lanes of tensor memory and query rows its columns, so that P^T and dS^T are left
operands of dV and dK where they were made. Two compute roles have half of the query rows each, a key for each thread.
"""

from jaggedtensor.kernels.blackwell.arithmetic import halves as halves_of
from jaggedtensor.kernels.shared.arithmetic import LOG2_E, at_most, rounded
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    reinterpret,
    sub2,
    tensor_memory_descriptor,
)
from jaggedtensor.kernels.shared.pipeline import Channel, new_barriers
from jaggedtensor.kernels.shared.walk import Schedule, Span, my_range, place_of, read_span

ROWS: gl.constexpr = gl.constexpr(128)  # packed query rows of a block
HALF: gl.constexpr = gl.constexpr(64)  # of them for each compute role
PIECE: gl.constexpr = gl.constexpr(32)  # query rows of P or dS that are made and stored at a time
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# -- scores ------------------------------------------------------------------------------------------------------------


@aggregate
class Scores:
    """S and dP of a block, transposed: [N, 128] fp32 each."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor
    ds: gl.shared_memory_descriptor  # [N, 128]
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    graded: gl.shared_memory_descriptor
    differed: gl.shared_memory_descriptor

    @gluon.jit
    def low(self, wide, part: gl.constexpr):
        """[N, 64] in low precision over the left of a compute role's half of S or dP: its P or dS."""
        layout: gl.constexpr = TensorMemoryLayout([wide.shape[0], 2 * ROWS], col_stride=1)
        whole = reinterpret(wide, self.ds.dtype, [wide.shape[0], 2 * ROWS], layout)
        return whole.slice(part * ROWS, HALF)


@gluon.jit
def make_scores(dtype: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([C.block_n, ROWS], col_stride=1)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, ROWS], dtype)
    return Scores(
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        gl.allocate_shared_memory(dtype, [C.block_n, ROWS], ds_layout),
        new_barriers(1, 1).index(0),
        new_barriers(1, 2).index(0),
        new_barriers(1, 1).index(0),
        new_barriers(1, 2).index(0),
    )


@gluon.jit
def write_weights_of(s, part: gl.constexpr, piece: gl.constexpr, scores, shifts, scale_log2):
    """P of a piece of S [N, 32]."""
    shift = shifts.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(at_most(fma2(s, scale_log2, gl.expand_dims(shift, 0)), 0.0))
    target = scores.low(scores.s, part).slice(piece * PIECE, PIECE)
    target.store(gl.convert_layout(p.to(target.dtype), target.get_reg_layout(), assert_trivial=True))
    return p


@gluon.jit
def write_weights(part: gl.constexpr, scores, shifts, scale_log2, limits=None, row=0):
    """P of a role's half of a block, published: two fp32 [N, 32]. `limits`: which rows see which keys, if not all do;
    `row`: the first of the block."""
    s = scores.s.slice(part * HALF, HALF).load()
    if limits is not None:
        s = limits.applied(s, row + part * HALF)
    left, right = halves_of(s)
    weights = (
        write_weights_of(left, part, 0, scores, shifts, scale_log2),
        write_weights_of(right, part, 1, scores, shifts, scale_log2),
    )
    mbarrier.arrive(scores.weighted, count=1)
    return weights


@gluon.jit
def write_differences_of(p, dp, part: gl.constexpr, piece: gl.constexpr, scores, deltas, TENSOR: gl.constexpr):
    """dS of a piece of P and dP, to shared memory and, if TENSOR, over dP."""
    delta = deltas.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, dp.type.layout))
    ds = rounded(mul2(p, sub2(dp, gl.expand_dims(delta, 0))), scores.ds.dtype)
    if TENSOR:
        target = scores.low(scores.dp, part).slice(piece * PIECE, PIECE)
        target.store(gl.convert_layout(ds, target.get_reg_layout(), assert_trivial=True))
    scores.ds.slice(part * HALF + piece * PIECE, PIECE, dim=1).store(ds)


@gluon.jit
def write_differences(part: gl.constexpr, scores, weights, deltas, TENSOR: gl.constexpr = True):
    """dS of a role's half of a block, published."""
    left, right = halves_of(scores.dp.slice(part * HALF, HALF).load())
    write_differences_of(weights[0], left, part, 0, scores, deltas, TENSOR)
    write_differences_of(weights[1], right, part, 1, scores, deltas, TENSOR)
    fence_async_shared()
    mbarrier.arrive(scores.differed, count=1)


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
