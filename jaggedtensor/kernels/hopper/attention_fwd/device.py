"""Forward: one CTA for each multiprocessor walks its tiles of the schedule. Its roles, for two consumers:

    load       Q(t)  K0 K1 V0 K2 V1 ..           Q(t+1)  K0 K1 V0 ..          one warp; TMA, as far ahead as slots allow
    consumer 0      S0 softmax | S1 PV0 softmax | S2 PV1 softmax | .. PVn, O  64 packed rows of the tile; wgmma
    consumer 1      S0 softmax | S1 PV0 softmax | S2 PV1 softmax | .. PVn, O  the next 64

S(j+1) is issued before P(j) V(j), and the softmax of S(j+1) runs while that product does. P stays in registers. Blocks
of keys are walked from the last to the first: the one that the sequence's end cuts is peeled off in front, and the loop
has no mask (but for windows, whose edges get loops of their own). A block mask is a list of the blocks to walk.

K and V come through descriptors that end where the sequence ends, so rows of a neighbour are zeros. Q stays where it is
as long as tiles have the same one, as a broadcast query of one head.
"""

from jaggedtensor.kernels.shared import masks
from jaggedtensor.kernels.shared.dsl import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaggedtensor.kernels.shared.epilogue import Results, store_by_pointers, store_statistics
from jaggedtensor.kernels.shared.pipeline import Channel, Counter, make_channel
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.softmax import Rows, Scale, first_block, next_block
from jaggedtensor.kernels.shared.walk import Schedule, my_range, start_walk

visible = gluon.jit(masks.visible.fn)
blocks_seen_by_all = gluon.jit(masks.blocks_seen_by_all.fn)

ROWS: gl.constexpr = gl.constexpr(64)  # of a consumer


@aggregate
class Channels:
    q: Channel  # [64, D] for each consumer
    k: Channel  # [N, D]
    v: Channel  # [N, Dv]
    out: gl.shared_memory_descriptor | gl.constexpr  # [consumers, 64, Dv]: staging for O; None if it is staged in Q


@aggregate
class Ring:
    """A consumer's places."""

    k: Counter
    v: Counter


@gluon.jit
def query_of(tile, C: gl.constexpr):
    """A number for the Q that a tile needs, if several tiles may share it."""
    return tile.head * C.q_blocks + tile.q_block


@gluon.jit
def load_role(schedule, descriptors, channels, C: gl.constexpr):
    PARTS: gl.constexpr = C.consumers
    q_desc, k_desc, v_desc = descriptors
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    q_at, k_at, v_at = channels.q.start(), channels.k.start(), channels.v.start()
    held = -1
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        if not C.resident or query_of(tile, C) != held:
            q_start = 0 if C.broadcast else span.q_start
            _, after = channels.q.acquire_empty(q_at)
            for part in gl.static_range(PARTS):
                first = (tile.q_block * C.consumers + part) * (ROWS // C.group)
                place = ragged_place(q_start, span.q_count, first, tile.head * C.heads)
                channels.q.slot(q_at, part).load(q_desc, place)
            q_at = after
            held = query_of(tile, C)
        for n in range(tile.kv_end - tile.kv_begin):
            row = schedule.block(tile.kv_end - 1 - n) * C.block_n
            slot, k_at = channels.k.acquire_empty(k_at)
            slot.load(k_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
            slot, v_at = channels.v.acquire_empty(v_at)
            slot.load(v_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
        walk = walk.next(t)


@aggregate
class Edge:
    """What decides which keys the rows of a tile see."""

    schedule: Schedule
    i: gl.tensor  # [64]: query within the sequence
    k_count: gl.tensor
    shift: gl.tensor  # Lk - Lq
    left: gl.tensor
    right: gl.tensor

    @gluon.jit
    def masked(self, score, block, C: gl.constexpr):
        j = block * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, score.type.layout))
        seen = (j < self.k_count)[None, :]
        if C.windowed:
            seen = seen & visible(self.i[:, None], j[None, :], self.shift, (self.left, self.right), C)
        return gl.where(seen, score, float("-inf"))


@aggregate
class Work:
    """What a consumer carries from block to block."""

    rows: Rows
    p: gl.tensor  # [64, N] probabilities of the block before, the left operand of its product
    acc: gl.tensor  # [64, Dv]
    ring: Ring


@gluon.jit
def scores(q, k):
    """Issue Q K^T."""
    N: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    nothing = gl.zeros([ROWS, N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, dtype: gl.constexpr, acc):
    """Probabilities as the left operand of the product that goes to `acc`: no data moves."""
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(p.to(dtype), layout, assert_trivial=True)


@gluon.jit
def by_row(x, acc):
    """[64] for the rows of `acc`: no data moves."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1)


@gluon.jit
def step(work, q, channels, scale, edge, place, C: gl.constexpr, MASK: gl.constexpr):
    """One more block of keys, at a place of the tile's range: its scores, and the product of the block before."""
    k_slot, k_at = channels.k.acquire_full(work.ring.k)
    score = scores(q, k_slot.buffer)
    v_slot, v_at = channels.v.acquire_full(work.ring.v)
    acc = warpgroup_mma(work.p, v_slot.buffer, work.acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score,))
    k_slot.release()
    if MASK:
        score = edge.masked(score, edge.schedule.block(place), C)
    p, fade, rows = next_block(work.rows, score, scale, C.windowed)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_slot.release()
    acc = acc * by_row(fade, acc)
    return Work(rows, as_operand(p, work.p.dtype, acc), acc, Ring(k_at, v_at))


@gluon.jit
def attend(q, schedule, channels, ring, tile, span, first, scale, window, C: gl.constexpr):
    """All keys of a tile for the 64 packed rows from `first` on: acc [64, Dv], rows, and the ring."""
    N: gl.constexpr = C.block_n
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_dv, 16])
    i = (first + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))) // C.group
    edge = Edge(schedule, i, span.k_count, span.k_count - span.q_count, window[0], window[1])
    top = tile.kv_end - 1

    k_slot, k_at = channels.k.acquire_full(ring.k)
    score = warpgroup_mma_wait(0, deps=(scores(q, k_slot.buffer),))
    k_slot.release()
    p, rows = first_block(edge.masked(score, schedule.block(top), C), scale, C.windowed)
    acc = gl.zeros([ROWS, C.block_dv], gl.float32, acc_layout)
    work = Work(rows, as_operand(p, q.dtype, acc), acc, Ring(k_at, ring.v))

    low, high = tile.kv_begin, top  # blocks low .. high - 1 need no mask
    if C.windowed and C.masked:  # a list of blocks has no range that all rows see
        low, high = tile.kv_begin, tile.kv_begin
    elif C.windowed:
        q_first, q_last = (first // C.group, gl.minimum((first + ROWS - 1) // C.group, span.q_count - 1))
        low, high = blocks_seen_by_all(
            q_first, q_last, span.k_count, edge.shift, (window[0], window[1]), tile.kv_begin, top, C
        )
    if C.windowed:
        for n in range(top - high):
            work = step(work, q, channels, scale, edge, top - 1 - n, C, True)
    for n in range(high - low):
        work = step(work, q, channels, scale, edge, high - 1 - n, C, False)
    if C.left:
        for n in range(low - tile.kv_begin):
            work = step(work, q, channels, scale, edge, low - 1 - n, C, True)

    v_slot, v_at = channels.v.acquire_full(work.ring.v)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(work.p, v_slot.buffer, work.acc, is_async=True),))
    v_slot.release()
    return acc, work.rows, Ring(work.ring.k, v_at)


@gluon.jit
def pass_by(channels, ring, tile):
    """Release the blocks of a tile in which this consumer has no row."""
    k_at, v_at = ring.k, ring.v
    for _ in range(tile.kv_end - tile.kv_begin):
        slot, k_at = channels.k.acquire_full(k_at)
        slot.release()
        slot, v_at = channels.v.acquire_full(v_at)
        slot.release()
    return Ring(k_at, v_at)


@gluon.jit
def finish(acc, rows, staging, results, tile, span, first, scale, C: gl.constexpr):
    """O, by TMA through the staging buffer, and lse."""
    norm = gl.convert_layout(gl.sum(rows.norm, 1), rows.peak.type.layout)
    some = norm > 0
    norm = gl.where(some, norm, 1.0)
    out = acc * by_row(1.0 / norm, acc)
    if C.tma_store:
        staging.store(out.to(staging.dtype))
        fence_async_shared()
        place = ragged_place(span.q_start, span.q_count, first // C.group, tile.head * C.heads)
        tma.async_store(results.desc, place, staging)
    else:
        store_by_pointers(results, out, tile, span, first, C)
    natural = (rows.peak * scale.exact + gl.log2(norm)) * 0.6931471805599453
    store_statistics(results, gl.where(some, natural, float("-inf")), tile, span, first, C)


@gluon.jit
def consume_role(part: gl.constexpr, schedule, channels, results, scale, window, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    q_at = channels.q.start()
    ring = Ring(channels.k.start(), channels.v.start())
    q_slot = channels.q.slot(q_at, part)
    held = -1
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        if not C.resident or query_of(tile, C) != held:
            if held >= 0:
                if C.stage_in_q:
                    tma.store_wait(0)  # O of the tile before has left it
                q_slot.release()
            q_slot = channels.q.slot(q_at, part)
            _, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        first = tile.q_block * C.block_m + part * ROWS
        if first < span.q_count * C.group:
            acc, rows, ring = attend(q_slot.buffer, schedule, channels, ring, tile, span, first, scale, window, C)
            if C.stage_in_q or not C.tma_store:
                staging = q_slot.buffer
            else:
                staging = channels.out.index(part)
                tma.store_wait(0)  # the tile before has left it
            finish(acc, rows, staging, results, tile, span, first, scale, C)
        else:
            ring = pass_by(channels, ring, tile)
        walk = walk.next(t)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["lse_batch", "lse_row", "lse_head", "q_len", "left", "right"])
def forward_kernel(
    q,  # ragged descriptors, see operands.ragged
    k,
    v,
    out,
    out_pointer,
    lse,  # fp32 [B, Hq, Lq] or [rows, Hq]
    lse_batch,
    lse_row,
    lse_head,  # its strides
    tiles,  # of the schedule
    worker_offsets,
    listed,  # blocks, None without a block mask
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # |scale| * log2(e)
    coarse,  # the power of two nearest to it
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_d], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_d], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_dv], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_dv], dtype)
    channels = Channels(
        make_channel(dtype, [ROWS, C.block_d], q_layout, C.q_stages, C.consumers, 1, C.consumers),
        make_channel(dtype, [C.block_n, C.block_d], k_layout, C.kv_stages, C.consumers),
        make_channel(dtype, [C.block_n, C.block_dv], v_layout, C.kv_stages, C.consumers),
        gl.allocate_shared_memory(dtype, [C.consumers, ROWS, C.block_dv], out_layout)
        if C.tma_store and not C.stage_in_q
        else None,
    )
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed)
    results = Results(out, out_pointer, lse, lse_batch, lse_row, lse_head)
    scale = Scale(scale_log2, coarse)
    window = (left, right)
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, channels, results, scale, window, C)),
                (load_role, (schedule, (q, k, v), channels, C)),
            ],
            [1],
            [24],
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, channels, results, scale, window, C)),
                (consume_role, (1, schedule, channels, results, scale, window, C)),
                (load_role, (schedule, (q, k, v), channels, C)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, channels, results, scale, window, C)),
                (consume_role, (1, schedule, channels, results, scale, window, C)),
                (consume_role, (2, schedule, channels, results, scale, window, C)),
                (load_role, (schedule, (q, k, v), channels, C)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
