"""Backward on Blackwell in a pass for each gradient, for heads of up to 256 dimensions.

    dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K        dS = P (dP - delta)

A block of 128 stays on a CTA, and blocks of 64 pass it: keys pass query rows for dQ, query rows pass keys for dK and
for dV. Whatever stays is the lanes of tensor memory, so that P or dS of a block is the left operand of the gradient
where it was made, and the gradient is a sum in tensor memory. Nothing is added in global memory.

                 stays      passes     S           dP           adds up
    dQ           Q, dO      K, V       Q K^T       dO V^T       dS K
    dK           K, V       Q, dO      K Q^T       V dO^T       dS^T Q
    dV           K          Q, dO      K Q^T                    P^T dO

For block n of a tile:

    load         what stays, at a tile's start;  n+2                    one warp
    statistics   lse, delta                                             one warp
    mma          S(n+1)   sum(n)    dP(n+1)   S(n+2)   sum(n+1) ...     one warp
    compute               P(n+1)              dS(n+1)                   four warps: what stays by threads
    drain                                             the sum of a tile four warps: 64 columns at a time, out by TMA

Tensor memory, 512 columns of 128 lanes for D = 256. P or dS, in low precision, lies over the left half of its S, where
only the thread that reads it writes:

    |  S, 64  |  S, 64  |  dP, 64  |  the gradient, D or Dv  |

The barriers, and what orders the use of memory. Products of the one role that issues them run in order, and a commit
tells of all before it:

    scored      S of a block is complete; a pair of buffers takes turns
    graded      dP of a block is complete
    weighted    compute has read both and written P or dS: the block may be summed. The next dP comes after that sum,
                and S of the block after the next, into the same buffer
    complete    the sum of a tile is complete. What S was made of and stays is not needed any more, so the sum leaves
                through its memory: drain sets that free, and the next tile begins with filling it. So drain has read
                tensor memory too by then

The sum comes before dP: it sets free what S of the block after the next is loaded to, while dP is multiplied. TMA
reads zeros past the end of a sequence and stores nothing there, so that no score needs a mask at a ragged end: such
a key has P <= 1 and a finite dS, which meets K = 0 in dQ, and a query row that is not there has an lse of +inf, and so
P = 0. Windows set scores to -inf, in blocks that they cut.

dQ of a broadcast query is a sum over all sequences. A CTA stays on one head and one block of its rows, adds up all
tiles of its share of these, and stores the sum once, in fp32. Shares are summed in the order of CTAs.
"""

from jaggedtensor.kernels.blackwell.arithmetic import halves as halves_of
from jaggedtensor.kernels.blackwell.backward import (
    PIECE,
    PLAIN,
    KeyWalk,
    Limits,
    Statistics,
    limits_of,
    read_key_tile,
)
from jaggedtensor.kernels.shared.arithmetic import at_most, rounded
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
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)
from jaggedtensor.kernels.shared.pipeline import Channel, make_channel, new_barriers
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule, place_of, read_span

STAYING: gl.constexpr = gl.constexpr(128)  # rows or keys that stay
STREAMED: gl.constexpr = gl.constexpr(64)  # that pass, at a time
LEAVING: gl.constexpr = gl.constexpr(64)  # columns of the gradient, at a time


@aggregate
class Channels:
    staying: Channel  # [128, D]: Q or K, that stays
    staying_grad: Channel | gl.constexpr  # [128, Dv]: dO or V, None where there is no dP
    stream: Channel  # [64, D]: K or Q, that passes
    stream_grad: Channel  # [64, Dv]: V or dO
    statistics: Channel  # 2 x fp32: -lse in log2 units and delta, of the 128 query rows that stay or the 64 that pass


@aggregate
class Scores:
    """S of two blocks, and dP of one, [128, 64] fp32 each."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor | gl.constexpr
    low: tensor_memory_descriptor  # S seen as [2, 128, 128] in low precision: P or dS are its left half
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    graded: gl.shared_memory_descriptor


@aggregate
class Sum:
    """The gradient, [128, columns] fp32."""

    total: tensor_memory_descriptor
    complete: gl.shared_memory_descriptor


# -- what a CTA does ---------------------------------------------------------------------------------------------------


@aggregate
class Work:
    """A tile: a block that stays, and those that pass it."""

    schedule: Schedule
    head: gl.tensor  # of what stays: of keys, or a packed one of queries
    staying: gl.tensor  # number of the block that stays
    first: gl.tensor  # place of the first one that passes
    number: gl.tensor  # of them, for each part of a group
    count: gl.tensor  # of them

    @gluon.jit
    def block(self, n, C: gl.constexpr):
        """Number and head of the n-th block that passes."""
        if C.query_stays:
            return self.schedule.block(self.first + n), self.head // C.parts
        elif C.parts == 1:
            return self.schedule.block(self.first + n), self.head
        else:
            part = n // self.number
            return self.schedule.block(self.first + n - part * self.number), self.head * C.parts + part


@gluon.jit
def work_of(walk, C: gl.constexpr):
    tile = walk.tile
    if C.query_stays:
        number = tile.kv_end - tile.kv_begin
        if C.q_blocks > 1:
            number = gl.where(tile.q_begin == gl.program_id(0) % C.q_blocks, number, 0)
        return Work(walk.schedule, tile.head, tile.q_begin, tile.kv_begin, number, number)
    else:
        number = tile.q_end - tile.q_begin
        return Work(walk.schedule, tile.head, tile.kv_begin, tile.q_begin, number, number * C.parts)


@gluon.jit
def start_walk(schedule, C: gl.constexpr):
    """This CTA's first tile, and how many it has. CTAs for different blocks of a broadcast query have the same ones."""
    worker = gl.program_id(0) // C.q_blocks
    begin, end = gl.load(schedule.worker_offsets + worker), gl.load(schedule.worker_offsets + worker + 1)
    last = gl.maximum(end - 1, 0)
    tile = read_key_tile(schedule, place_of(begin, last, -1))
    ahead = read_key_tile(schedule, place_of(begin + 1, last, -1))
    return KeyWalk(schedule, tile, read_span(schedule, tile.sequence), ahead, last, gl.to_tensor(-1)), begin, end


# -- loading -----------------------------------------------------------------------------------------------------------


@gluon.jit
def query_places(span, row, head, C: gl.constexpr):
    """Of packed rows from `row` on of a packed head: in Q, and in what has rows for each sequence, as dO."""
    place = ragged_place(span.q_start, span.q_count, row // C.group, head * C.group)
    q_place = place
    if C.broadcast:
        q_place = ragged_place(span.q_start * 0, span.q_count, row // C.group, head * C.group)
    return q_place, place


@gluon.jit
def load_role(schedule, descriptors, channels, C: gl.constexpr):
    staying_desc, staying_grad_desc, stream_desc, stream_grad_desc = descriptors
    walk, begin, end = start_walk(schedule, C)
    staying_at, at, grad_at = channels.staying.start(), channels.stream.start(), channels.stream_grad.start()
    other_at = channels.staying.start()
    summed = 0  # blocks of the sum so far
    for t in range(begin, end):
        work, span = work_of(walk, C), walk.span
        for n in range(work.count):
            number, head = work.block(n, C)
            if C.query_stays:
                staying_place, staying_grad_place = query_places(span, work.staying * STAYING, work.head, C)
                place = ragged_place(span.k_start, span.k_count, number * STREAMED, head)
                grad_place = place
            else:
                staying_place = ragged_place(span.k_start, span.k_count, work.staying * STAYING, work.head)
                staying_grad_place = staying_place
                place, grad_place = query_places(span, number * STREAMED, head, C)
            slot, at = channels.stream.acquire_empty(at)
            slot.load(stream_desc, place)
            if summed == 0:
                staying, staying_at = channels.staying.acquire_empty(staying_at)
                staying.load(staying_desc, staying_place)
            if C.differs and n == 0:
                other, other_at = channels.staying_grad.acquire_empty(other_at)
                other.load(staying_grad_desc, staying_grad_place)
            grad_slot, grad_at = channels.stream_grad.acquire_empty(grad_at)
            grad_slot.load(stream_grad_desc, grad_place)
            summed += 1
        if not C.shares:
            summed = 0
        walk = walk.next(t)


@gluon.jit
def statistics_role(schedule, statistics, channel, C: gl.constexpr):
    """A slot of the channel has the two of a block of query rows, a part each."""
    layout: gl.constexpr = gl.BlockedLayout([C.statistics // 32], [32], [1], [0])
    rows = gl.arange(0, C.statistics, layout)
    walk, begin, end = start_walk(schedule, C)
    at = channel.start()
    for t in range(begin, end):
        work = work_of(walk, C)
        if C.query_stays:
            slots = gl.minimum(work.count, 1)
        else:
            slots = work.count
        for n in range(slots):
            if C.query_stays:
                number, head = work.staying, work.head
            else:
                number, head = work.block(n, C)
            shift, delta = statistics.load(walk.tile.sequence, head, walk.span, number * C.statistics + rows, C)
            slot, after = channel.acquire_empty(at)
            slot.buffer.store(shift)
            slot.publish()
            channel.slot(at, 1).buffer.store(delta)
            slot.publish()
            at = after
        walk = walk.next(t)


# -- products ----------------------------------------------------------------------------------------------------------


@gluon.jit
def issue_sum(turn, late_at, grad_at, channels, scores, total, more, C: gl.constexpr):
    """Adds P or dS of a block, times what passed. The place in the ring of dO after it, if that is what passed."""
    if C.differs:
        slot = channels.stream.slot(late_at)
    else:
        slot, grad_at = channels.stream_grad.acquire_full(grad_at)
    mbarrier.wait(scores.weighted.index(turn & 1), (turn >> 1) & 1)
    factor = scores.low.index(turn & 1).slice(0, STREAMED)
    tcgen05_mma(factor, slot.buffer, total.total, use_acc=more, mbarriers=[slot.empty])
    return grad_at


@gluon.jit
def mma_role(schedule, channels, scores, total, C: gl.constexpr):
    walk, begin, end = start_walk(schedule, C)
    at, grad_at = channels.stream.start(), channels.stream_grad.start()
    staying_at, other_at = channels.staying.start(), channels.staying.start()
    turn = 0  # blocks so far
    summed = 0  # of the sum at hand
    staying = channels.staying.slot(staying_at)
    for t in range(begin, end):
        count = work_of(walk, C).count
        late_at = at  # of the block before
        for n in range(count):
            if summed + n == 0:
                staying, staying_at = channels.staying.acquire_full(staying_at)
            slot, after = channels.stream.acquire_full(at)
            scored = scores.scored.index(turn & 1)
            barriers = [scored] if C.differs else [scored, slot.empty]
            s = scores.s.index(turn & 1)
            tcgen05_mma(staying.buffer, slot.buffer.permute((1, 0)), s, use_acc=False, mbarriers=barriers)
            if n > 0:
                grad_at = issue_sum(turn - 1, late_at, grad_at, channels, scores, total, summed + n > 1, C)
            if C.differs:
                if n == 0:
                    _, other_at = channels.staying_grad.acquire_full(other_at)
                staying_grad = channels.staying_grad.slot(other_at)
                grad_slot, grad_at = channels.stream_grad.acquire_full(grad_at)
                barriers = [scores.graded, grad_slot.empty]
                passing = grad_slot.buffer.permute((1, 0))
                tcgen05_mma(staying_grad.buffer, passing, scores.dp, use_acc=False, mbarriers=barriers)
                tcgen05_commit(staying_grad.empty, pred=n + 1 == count)
            late_at, at = at, after
            turn += 1
        if count > 0:
            summed += count
            grad_at = issue_sum(turn - 1, late_at, grad_at, channels, scores, total, summed > 1, C)
        if not C.shares:
            tcgen05_commit(total.complete)
            summed = 0
        walk = walk.next(t)
    if C.shares:
        tcgen05_commit(total.complete, pred=summed > 0)


# -- computing ---------------------------------------------------------------------------------------------------------


@gluon.jit
def row_limits(block, span, window, layout: gl.constexpr, C: gl.constexpr):
    """Which keys each row of a block of query rows sees, and which all of them do: contract 3 of the design."""
    begin = block * STAYING
    last = gl.minimum(begin + STAYING, span.q_count * C.group) - 1
    row = begin + gl.arange(0, STAYING, layout)
    shift = span.k_count - span.q_count
    return Limits(
        first_key(row, shift, window, C),
        end_key(row, shift, window, C),
        first_key(last, shift, window, C),
        end_key(begin, shift, window, C),
    )


@gluon.jit
def first_key(row, shift, window, C: gl.constexpr):
    if C.left:
        return gl.maximum(row // C.group + shift - window[0], 0)
    else:
        return row * 0


@gluon.jit
def end_key(row, shift, window, C: gl.constexpr):
    if C.right:
        return gl.maximum(row // C.group + shift + window[1] + 1, 0)
    else:
        return row * 0 + 0x7FFFFFFF


@gluon.jit
def part_of(x, piece: gl.constexpr, layout: gl.constexpr, C: gl.constexpr):
    """A statistic for a piece [128, 32] of a block: of each row, in registers, or of each column, in shared memory."""
    if C.query_stays:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)
    else:
        return gl.expand_dims(x.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def weights_of(piece: gl.constexpr, s, shift, scale_log2, C: gl.constexpr):
    """P of a piece of S."""
    return gl.exp2(at_most(fma2(s, scale_log2, part_of(shift, piece, s.type.layout, C)), 0.0))


@gluon.jit
def write_piece(piece: gl.constexpr, p, turn, scores, delta, C: gl.constexpr):
    """P, or dS, of a piece."""
    layout: gl.constexpr = p.type.layout
    target = scores.low.index(turn & 1).slice(piece * PIECE, PIECE)
    if C.differs:
        dp = gl.convert_layout(scores.dp.slice(piece * PIECE, PIECE).load(), layout, assert_trivial=True)
        factor = rounded(mul2(p, sub2(dp, part_of(delta, piece, layout, C))), target.dtype)
    else:
        factor = p.to(target.dtype)
    target.store(gl.convert_layout(factor, target.get_reg_layout(), assert_trivial=True))


@gluon.jit
def write_factor(turn, scores, statistics, limits, column, scale_log2, C: gl.constexpr):
    """P or dS of a block of columns from `column` on, published."""
    shift, delta = statistics
    mbarrier.wait(scores.scored.index(turn & 1), (turn >> 1) & 1)
    s = scores.s.index(turn & 1).load()
    if limits is not None:
        s = limits.applied(s, column)
    left, right = halves_of(s)
    left, right = weights_of(0, left, shift, scale_log2, C), weights_of(1, right, shift, scale_log2, C)
    if C.differs:
        mbarrier.wait(scores.graded, turn & 1)
    write_piece(0, left, turn, scores, delta, C)
    write_piece(1, right, turn, scores, delta, C)
    mbarrier.arrive(scores.weighted.index(turn & 1), count=1)


@gluon.jit
def compute_role(schedule, channel, scores, numbers, C: gl.constexpr):
    LANES: gl.constexpr = gl.SliceLayout(1, scores.s.index(0).get_reg_layout())
    scale_log2, window = numbers
    walk, begin, end = start_walk(schedule, C)
    at = channel.start()
    turn = 0
    for t in range(begin, end):
        work = work_of(walk, C)
        if not (C.left or C.right):
            limits = None
        elif C.query_stays:
            limits = row_limits(work.staying, walk.span, window, LANES, C)
        else:
            limits = limits_of(work.staying, walk.span, window, LANES, C)
        if C.query_stays:
            if work.count > 0:
                slot, after = channel.acquire_full(at)
                statistics = slot.buffer.load(LANES), channel.slot(at, 1).buffer.load(LANES)
                slot.release()
                at = after
                for n in range(work.count):
                    number, _ = work.block(n, C)
                    write_factor(turn, scores, statistics, limits, number * STREAMED, scale_log2, C)
                    turn += 1
        else:
            for n in range(work.count):
                number, _ = work.block(n, C)
                slot, after = channel.acquire_full(at)
                statistics = slot.buffer, channel.slot(at, 1).buffer
                write_factor(turn, scores, statistics, limits, number * STREAMED, scale_log2, C)
                slot.release()
                at = after
                turn += 1
        walk = walk.next(t)


# -- draining ----------------------------------------------------------------------------------------------------------


@gluon.jit
def drain_role(schedule, out, total, channel, scale, C: gl.constexpr):
    """The gradient of each tile, through the memory of what stays; or the share of dQ."""
    COUNT: gl.constexpr = C.columns // LEAVING
    walk, begin, end = start_walk(schedule, C)
    at = channel.start()
    turn = 0
    for t in range(begin, end):
        work, span = work_of(walk, C), walk.span
        if C.shares:
            turn += work.count
        else:
            slot = channel.slot(at)
            at = at.next()
            mbarrier.wait(total.complete, turn & 1)
            for i in gl.static_range(COUNT):
                x = total.total.slice(i * LEAVING, LEAVING).load()
                slot.buffer.slice(i * LEAVING, LEAVING, dim=1).store((x * scale).to(slot.buffer.dtype))
            fence_async_shared()
            row = work.staying * STAYING
            if C.query_stays:
                _, place = query_places(span, row, work.head, C)
            else:
                place = ragged_place(span.k_start, span.k_count, row, work.head)
            tma.async_store(out, place, slot.buffer)
            tma.store_wait(0)
            slot.release()
            turn += 1
        walk = walk.next(t)
    if C.shares:
        store_share(out, total, turn > 0, scale, C)


@gluon.jit
def store_share(out, total, some, scale, C: gl.constexpr):
    """The CTA's share of dQ [128, D], 0 without any tile."""
    WIDTH: gl.constexpr = 32
    COUNT: gl.constexpr = C.columns // WIDTH
    layout: gl.constexpr = total.total.slice(0, WIDTH).get_reg_layout()
    row = gl.program_id(0) * STAYING + gl.arange(0, STAYING, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = out + row.to(gl.int64)[:, None] * C.columns + column[None, :]
    mbarrier.wait(total.complete, 0, pred=some)
    for i in gl.static_range(COUNT):
        share = gl.zeros([STAYING, WIDTH], gl.float32, layout)
        if some:
            share = total.total.slice(i * WIDTH, WIDTH).load(layout) * scale
        gl.store(place + i * WIDTH, share)


# -- the kernel --------------------------------------------------------------------------------------------------------


@gluon.jit
def make_scores(dtype: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([STAYING, STREAMED], col_stride=1)
    low_layout: gl.constexpr = TensorMemoryLayout([STAYING, 2 * STREAMED], col_stride=1)
    s = allocate_tensor_memory(gl.float32, [2, STAYING, STREAMED], layout)
    if C.differs:
        dp = allocate_tensor_memory(gl.float32, [STAYING, STREAMED], layout)
    else:
        dp = None
    low = reinterpret(s, dtype, [2, STAYING, 2 * STREAMED], low_layout)
    return Scores(s, dp, low, new_barriers(2, 1), new_barriers(2, 1), new_barriers(1, 1).index(0))


@gluon.jit(do_not_specialize=["q_len", "stat_batch", "stat_row", "stat_head", "left", "right"])
def gradient_kernel(
    staying,  # ragged descriptors, see shared.ragged: Q or K, in blocks of 128 rows
    staying_grad,  # dO or V
    stream,  # K or Q, in blocks of 64
    stream_grad,  # V or dO
    out,  # the gradient, in blocks as of what stays; or shares of dQ: a pointer to fp32 [CTAs, 128, D]
    lse,  # fp32 [B, Hq, Lq] or [rows, Hq]
    delta,
    stat_batch,
    stat_row,
    stat_head,  # strides of both
    tiles,  # of the schedule: by queries for dQ, else by keys
    worker_offsets,
    listed,  # blocks that a block mask lets through, None without one
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # scale * log2(e)
    scale,  # of the gradient
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = staying.dtype
    staying_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STAYING, C.block_d], dtype)
    staying_grad_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STAYING, C.block_dv], dtype)
    stream_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAMED, C.block_d], dtype)
    stream_grad_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAMED, C.block_dv], dtype)
    sum_layout: gl.constexpr = TensorMemoryLayout([STAYING, C.columns], col_stride=1)
    if C.differs:
        other = make_channel(dtype, [STAYING, C.block_dv], staying_grad_layout, 1)
    else:
        other = None
    channels = Channels(
        make_channel(dtype, [STAYING, C.block_d], staying_layout, 1),
        other,
        make_channel(dtype, [STREAMED, C.block_d], stream_layout, C.stages),
        make_channel(dtype, [STREAMED, C.block_dv], stream_grad_layout, C.grad_stages),
        make_channel(gl.float32, [C.statistics], PLAIN, C.statistics_stages, 1, 1, 2),
    )
    scores = make_scores(dtype, C)
    total = Sum(allocate_tensor_memory(gl.float32, [STAYING, C.columns], sum_layout), new_barriers(1, 1).index(0))
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed)
    statistics = Statistics(lse, delta, stat_batch, stat_row, stat_head)
    numbers = (scale_log2, (left, right))
    gl.warp_specialize(
        [
            (drain_role, (schedule, out, total, channels.staying, scale, C)),
            (compute_role, (schedule, channels.statistics, scores, numbers, C)),
            (mma_role, (schedule, channels, scores, total, C)),
            (load_role, (schedule, (staying, staying_grad, stream, stream_grad), channels, C)),
            (statistics_role, (schedule, statistics, channels.statistics, C)),
        ],
        [4, 1, 1, 1],
        [C.compute_registers, C.single_registers, C.single_registers, C.single_registers],
    )
