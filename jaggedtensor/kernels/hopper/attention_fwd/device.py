"""Forward: one CTA for each multiprocessor walks its tiles of the schedule. Its roles, for two consumers:

    load       Q(t)  K0 V0 K1 V1 ..              Q(t+1)  K0 V0 ..             one warp; TMA, as far ahead as slots allow
    consumer 0      S0 softmax | S1 PV0 softmax | S2 PV1 softmax | .. PVn, O  M packed rows of the tile; wgmma
    consumer 1      S0 softmax | S1 PV0 softmax | S2 PV1 softmax | .. PVn, O  the next M
    fill            0 and -inf for rows that no tile has                      one warp, beside all this

S(j+1) is issued before P(j) V(j), and the softmax of S(j+1) runs while that product does. So it goes on from a tile to
the next, whose first scores are issued before the last product of the one before. P stays in registers. Blocks of keys
are walked from the last to the first: the one that the sequence's end cuts is peeled off in front, and the loop has no
mask (but for windows, whose edges get loops of their own). A block mask is a list of the blocks to walk.

K and V come through descriptors that end where the sequence ends, so rows of a neighbour are zeros. Q stays where it is
as long as tiles have the same one, as a broadcast query of one head.
"""

from jaggedtensor.kernels.hopper.attention_fwd.channels import Channels, Flags, Ring, goes_back
from jaggedtensor.kernels.hopper.attention_fwd.loads import leading_load_role, load_role
from jaggedtensor.kernels.shared import masks
from jaggedtensor.kernels.shared.anchor import any_flagged, by_warp, strayed
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
from jaggedtensor.kernels.shared.merge import Parts, merge_parts, store_part, store_part_lse
from jaggedtensor.kernels.shared.pipeline import Counter, Slot, make_channel, new_barriers
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.softmax import (
    Rows,
    Scale,
    anchored_block,
    anchoring_block,
    first_block,
    log2,
    next_block,
    settled,
    sums_by_thread,
    within,
)
from jaggedtensor.kernels.shared.walk import Schedule, Span, Tile, my_range, place_of, query_of, read_span, start_walk

visible = gluon.jit(masks.visible.fn)
blocks_seen_by_all = gluon.jit(masks.blocks_seen_by_all.fn)


@aggregate
class View:
    """The rows of a tile that a consumer has, and what decides which keys they see."""

    schedule: Schedule
    tile: Tile
    span: Span
    first: gl.tensor  # packed row of the sequence that is row 0 here
    left: gl.tensor
    right: gl.tensor

    @gluon.jit
    def masked(self, score, place, C: gl.constexpr):
        """-inf for what is past the last key or hidden by the window."""
        block = self.schedule.block(place)
        if C.windowed:
            j = block * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, score.type.layout))
            i = (self.first + gl.arange(0, C.rows, gl.SliceLayout(1, score.type.layout))) // C.group
            shift = self.span.k_count - self.span.q_count
            seen = visible(i[:, None], j[None, :], shift, (self.left, self.right), C)
            score = gl.where((j < self.span.k_count)[None, :] & seen, score, float("-inf"))
        else:
            score = within(score, self.span.k_count - block * C.block_n)
        return score

    @gluon.jit
    def ends_early(self, C: gl.constexpr):
        """Whether the last block has no more than half of its keys."""
        return self.span.k_count - (self.tile.kv_end - 1) * C.block_n <= C.block_n // 2

    @gluon.jit
    def unmasked(self, C: gl.constexpr):
        """The range of places below the last whose blocks all rows see whole."""
        low, high = self.tile.kv_begin, self.tile.kv_end - 1
        if C.windowed and C.masked:  # a list of blocks has no such range
            high = low
        elif C.windowed:
            last = gl.minimum((self.first + C.rows - 1) // C.group, self.span.q_count - 1)
            shift = self.span.k_count - self.span.q_count
            window = (self.left, self.right)
            low, high = blocks_seen_by_all(self.first // C.group, last, self.span.k_count, shift, window, low, high, C)
        return low, high


@gluon.jit
def view_of(schedule, tile, span, part, window, C: gl.constexpr):
    first = tile.q_block * C.block_m + part * C.rows
    return View(schedule, tile, span, first, window[0], window[1])


@gluon.jit
def has_rows(view, C: gl.constexpr):
    some = view.first < view.span.q_count * C.group
    if C.redoes:
        some = some & (view.tile.kv_begin < view.tile.kv_end)
    return some


@aggregate
class Query:
    """The Q that a consumer holds."""

    slot: Slot
    at: Counter  # of the next
    held: gl.tensor  # its number, -1 before the first
    owed: Slot  # of the tile before, which O leaves through
    owes: gl.tensor  # whether it has not been released yet

    @gluon.jit
    def repay(self, owes):
        if owes:
            tma.store_wait(0)  # O has left
            self.owed.release()


@gluon.jit
def query_for(query, view, channels, part: gl.constexpr, C: gl.constexpr, LATER: gl.constexpr = False):
    """The Q of a tile: the one at hand if it is the same, else the next of the channel. LATER: the one before is
    released when scores of this have been issued, see `cross`."""
    number = query_of(view.tile, C)
    if C.lends:
        query.repay(query.owes)  # a tile of one block has not done so
        slot = channels.q.slot(query.at, part)
        _, at = channels.q.acquire_full(query.at)
        query = Query(slot, at, number, query.slot, query.held >= 0)
    elif LATER and C.hands:
        slot = channels.q.slot(query.at, part)
        _, at = channels.q.acquire_full(query.at)
        query = Query(slot, at, number, query.slot, query.owes)
    elif not C.resident or number != query.held:
        if query.held >= 0:
            if C.stage_in_q:
                tma.store_wait(0)  # O of the tile before has left it
            query.slot.release()
        slot = channels.q.slot(query.at, part)
        _, at = channels.q.acquire_full(query.at)
        query = Query(slot, at, number, query.owed, query.owes)
    return query


@aggregate
class Work:
    """What a consumer carries from block to block."""

    rows: Rows
    p: gl.tensor  # [M, N] probabilities of the block before, the left operand of its product
    acc: gl.tensor  # [M, Dv]
    ring: Ring


@gluon.jit
def issue_scores(q, k):
    """Q K^T [M, N], in flight."""
    N: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    nothing = gl.zeros([q.shape[0], N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, dtype: gl.constexpr, acc):
    """Probabilities as the left operand of the product that goes to `acc`: no data moves."""
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(p.to(dtype), layout, assert_trivial=True)


@gluon.jit
def by_row(x, acc):
    """[M] for the rows of `acc`: no data moves."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True), 1)


@gluon.jit
def no_output(C: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_dv, 16])
    return gl.zeros([C.rows, C.block_dv], gl.float32, layout)


@gluon.jit
def no_work(part: gl.constexpr, channels, dtype: gl.constexpr, C: gl.constexpr):
    """What a consumer carries before its first tile."""
    N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    acc, p = no_output(C), gl.zeros([C.rows, N], gl.float32, layout)
    rows = Rows(gl.max(p, 1), sums_by_thread(p))
    ring = Ring(channels.k.start(), channels.v.start(), gl.to_tensor(0), part)
    return Work(rows, as_operand(p, dtype, acc), acc, ring)


@gluon.jit
def first_of(score, view, dtype: gl.constexpr, scale, C: gl.constexpr):
    """Probabilities of a tile's first block, and the rows."""
    score = view.masked(score, view.tile.kv_end - 1, C)
    if C.anchored:
        p, rows = anchoring_block(score, dtype, scale, C.windowed)
    else:
        p, rows = first_block(score, scale, C.windowed)
    return p, rows


@gluon.jit
def widened(p, rows, like, C: gl.constexpr):
    """P [M, N / 2] and the rows as those of a whole block, whose other half is 0: no data moves."""
    nothing = gl.zeros(p.shape, p.dtype, p.type.layout)
    p = gl.join(p, nothing).permute((0, 2, 1)).reshape([p.shape[0], C.block_n])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    peak = gl.convert_layout(rows.peak, like.peak.type.layout, assert_trivial=True)
    norm = gl.convert_layout(rows.norm, like.norm.type.layout, assert_trivial=True)
    return gl.convert_layout(p, layout, assert_trivial=True), Rows(peak, norm)


@gluon.jit
def open_tile(ring, query, view, channels, scale, C: gl.constexpr):
    """The first block of a tile, by itself."""
    k_slot, k_at = channels.k.acquire_full(ring.k)
    ring.take_turn(channels)
    score = issue_scores(query.slot.buffer, k_slot.buffer)
    turn = ring.give_turn(channels)
    score = warpgroup_mma_wait(0, deps=(score,))
    k_slot.release()
    p, rows = first_of(score, view, query.slot.buffer.dtype, scale, C)
    acc = no_output(C)
    return Work(rows, as_operand(p, query.slot.buffer.dtype, acc), acc, Ring(k_at, ring.v, turn, ring.part))


@gluon.jit
def step(work, query, view, place, channels, scale, C: gl.constexpr, MASK: gl.constexpr):
    """One more block of keys, at a place of the tile's range: its scores, and the product of the block before."""
    k_slot, k_at = channels.k.acquire_full(work.ring.k)
    work.ring.take_turn(channels)
    score = issue_scores(query.slot.buffer, k_slot.buffer)
    v_slot, v_at = channels.v.acquire_full(work.ring.v)
    acc = warpgroup_mma(work.p, v_slot.buffer, work.acc, is_async=True)
    turn = work.ring.give_turn(channels)
    score = warpgroup_mma_wait(1, deps=(score,))
    k_slot.release()
    if MASK:
        score = view.masked(score, place, C)
    if C.anchored:
        p, rows = anchored_block(work.rows, score, scale, C.windowed)
    else:
        p, fade, rows = next_block(work.rows, score, scale, C.windowed)
    if C.settles:
        rows = settled(rows)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_slot.release()
    if not C.anchored:
        acc = acc * by_row(fade, acc)
    return Work(rows, as_operand(p, work.p.dtype, acc), acc, Ring(k_at, v_at, turn, work.ring.part))


@gluon.jit
def steps(work, query, view, channels, scale, C: gl.constexpr):
    """All blocks of a tile but the first. Its work, and whether its query still owes the one before."""
    begin, top = view.tile.kv_begin, view.tile.kv_end - 1
    low, high = view.unmasked(C)
    if C.windowed:
        for n in range(top - high):
            work = step(work, query, view, top - 1 - n, channels, scale, C, True)
    owes = query.owes
    for n in range(high - low):
        work = step(work, query, view, high - 1 - n, channels, scale, C, False)
        if C.lends:
            query.repay(owes)
            owes = gl.to_tensor(False)
    if C.left:
        for n in range(low - begin):
            work = step(work, query, view, low - 1 - n, channels, scale, C, True)
    return work, owes


@gluon.jit
def cross(work, query, view, walk, t, channels, scale, C: gl.constexpr, HALF: gl.constexpr):
    """From one tile to the next, whose view and query these are: the last product of the one beside the first scores
    of the other. What the one comes to, the work on the other, and the walk, at the tile after it. HALF: the other ends
    early, see View."""
    k_slot, k_at = channels.k.acquire_full(work.ring.k)
    keys = k_slot.buffer.slice(0, C.block_n // 2) if HALF else k_slot.buffer
    v_slot, v_at = channels.v.acquire_full(work.ring.v)
    work.ring.take_turn(channels)
    score = issue_scores(query.slot.buffer, keys)
    acc = warpgroup_mma(work.p, v_slot.buffer, work.acc, is_async=True)
    turn = work.ring.give_turn(channels)
    if C.hands:  # while the tensor cores have enough to do
        walk = walk.next(t)
        query.owed.release()
    score = warpgroup_mma_wait(1, deps=(score,))
    k_slot.release()
    p, rows = first_of(score, view, work.p.dtype, scale, C)
    if HALF:
        p, rows = widened(p, rows, work.rows, C)
    if C.settles:
        rows = settled(rows)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    v_slot.release()
    ring = Ring(k_at, v_at, turn, work.ring.part)
    return acc, Work(rows, as_operand(p, work.p.dtype, acc), no_output(C), ring), walk


@gluon.jit
def close_tile(work, channels):
    """The last product of a tile, by itself."""
    v_slot, v_at = channels.v.acquire_full(work.ring.v)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(work.p, v_slot.buffer, work.acc, is_async=True),))
    v_slot.release()
    return acc, Ring(work.ring.k, v_at, work.ring.turn, work.ring.part)


@gluon.jit
def pass_by(ring, tile, channels):
    """Release the blocks of a tile in which this consumer has no row, and leave its turns to the other."""
    for _ in range(tile.kv_end - tile.kv_begin):
        slot, k_at = channels.k.acquire_full(ring.k)
        slot.release()
        slot, v_at = channels.v.acquire_full(ring.v)
        slot.release()
        ring.take_turn(channels)
        ring = Ring(k_at, v_at, ring.give_turn(channels), ring.part)
    return ring


@gluon.jit
def deliver(out, lse, staging, results, view, C: gl.constexpr):
    """O, by TMA through the staging buffer, and lse."""
    if C.tma_store:
        if not C.stage_in_q and not C.lends:
            tma.store_wait(0)  # the tile before has left it
        staging.store(out.to(staging.dtype))
        fence_async_shared()
        span = view.span
        place = ragged_place(span.q_start, span.q_count, view.first // C.group, view.tile.head * C.heads)
        tma.async_store(results.desc, place, staging)
    else:
        store_by_pointers(results, out, view.tile, view.span, view.first, C)
    store_statistics(results, lse, view.tile, view.span, view.first, C)


@gluon.jit
def nobody():
    """No warp [4] wants a tile to be done again."""
    return gl.zeros([4], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def finish(acc, rows, staging, results, parts, slot, view, scale, C: gl.constexpr):
    """What a tile comes to, or a part of one goes to its slot. Whether each warp [4] wants it to be done again."""
    norm = gl.convert_layout(gl.sum(rows.norm, 1), rows.peak.type.layout)
    peak, again = rows.peak, nobody()
    if C.anchored:
        again = by_warp(strayed(norm, staging.dtype, C.windowed), acc)
        if C.windowed:
            peak = gl.where(peak == float("-inf"), 0.0, peak)
    some = norm > 0
    norm = gl.where(some, norm, 1.0)
    out = acc * by_row(1.0 / norm, acc)
    natural = (peak * scale.exact + log2(norm)) * 0.6931471805599453
    natural = gl.where(some, natural, float("-inf"))
    if C.splits and slot >= 0:
        row = view.first - view.tile.q_block * C.block_m
        store_part(parts, slot, out, row, C)
        store_part_lse(parts, slot, natural, row, C)
    else:
        deliver(out, natural, staging, results, view, C)
    return again


@gluon.jit
def consume_role(part: gl.constexpr, schedule, flags, channels, results, parts, scale, window, C: gl.constexpr):
    begin, end = flags.range(schedule, C)
    walk = start_walk(schedule, begin, end, goes_back(C))
    at = channels.q.start()
    none = channels.q.slot(at, part)
    query = Query(none, at, gl.to_tensor(-1), none, gl.to_tensor(False))
    work = no_work(part, channels, query.slot.buffer.dtype, C)
    opened = gl.to_tensor(False)  # whether the tile at hand has been begun beside the end of the one before
    tile, span = walk.tile, walk.span
    if C.hands:
        walk = walk.next(begin)
    for t in range(begin, end):
        if not C.hands:
            tile, span = walk.tile, walk.span
        place = place_of(t, walk.last, walk.mirror)
        view = view_of(schedule, flags.due(tile, place, C), span, part, window, C)
        if not C.hands:
            walk = walk.next(t)
        next_tile, next_span = walk.tile, walk.span
        slot = gl.load(schedule.tiles + place * 8 + 7) if C.splits else -1
        if has_rows(view, C):
            if not opened:
                query = query_for(query, view, channels, part, C)
                work = open_tile(work.ring, query, view, channels, scale, C)
            work, owes = steps(work, query, view, channels, scale, C)
            query = Query(query.slot, query.at, query.held, query.owed, owes)
            rows, staging = work.rows, query.slot.buffer
            if C.tma_store and not C.stage_in_q and not C.lends:
                staging = channels.out.index(part)
            after = view_of(schedule, next_tile, next_span, part, window, C)
            opened = (t + 1 < end) & has_rows(after, C) & C.crosses
            if opened:
                query = query_for(query, after, channels, part, C, True)
                if C.halves:
                    if after.ends_early(C):
                        acc, work, walk = cross(work, query, after, walk, t + 1, channels, scale, C, True)
                    else:
                        acc, work, walk = cross(work, query, after, walk, t + 1, channels, scale, C, False)
                else:
                    acc, work, walk = cross(work, query, after, walk, t + 1, channels, scale, C, False)
            else:
                acc, ring = close_tile(work, channels)
                work = Work(rows, work.p, no_output(C), ring)
                if C.hands:
                    walk = walk.next(t + 1)
            again = finish(acc, rows, staging, results, parts, slot, view, scale, C)
            flags.tell(place, part, again, C)
        else:
            query = query_for(query, view, channels, part, C)
            work = Work(work.rows, work.p, work.acc, pass_by(work.ring, view.tile, channels))
            opened = gl.to_tensor(False)
            flags.tell(place, part, nobody(), C)
            if C.hands:
                walk = walk.next(t + 1)
        if C.hands:
            tile, span = next_tile, next_span
    tma.store_wait(0)


@gluon.jit
def clear(results, sequence, first, row, C: gl.constexpr):
    """Row `row` of O, query `first` of a sequence: 0, and lse -inf."""
    WIDTH: gl.constexpr = C.q_heads * C.value_dim
    at = gl.arange(0, 256, gl.BlockedLayout([8], [32], [1], [0]))
    place = results.out + row.to(gl.int64) * WIDTH
    for begin in range(0, WIDTH, 256):
        nothing = gl.zeros([256], results.out.dtype.element_ty, at.type.layout)
        gl.store(place + begin + at, nothing, mask=begin + at < WIDTH)
    lse = results.lse
    if C.jagged:
        lse += row.to(gl.int64) * results.row
    else:
        lse += sequence.to(gl.int64) * results.batch + first * results.row
    head = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for begin in range(0, C.q_heads, 32):
        blind = gl.full([32], float("-inf"), gl.float32, head.type.layout)
        gl.store(lse + (begin + head) * results.head, blind, mask=begin + head < C.q_heads)


@gluon.jit
def fill_role(schedule, results, batch, q_rows, right, C: gl.constexpr):
    """Rows without a tile: of sequences without keys, before all keys that the window lets them see, and past the last
    sequence. A block mask hides others, too: then the launcher has filled everything."""
    worker, workers = gl.program_id(0), gl.num_programs(0)
    if not C.masked and not C.redoes:
        for sequence in range(worker, batch, workers):
            span = read_span(schedule, sequence)
            blind = 0
            if C.right:
                blind = gl.maximum(span.q_count - span.k_count - right, 0) * C.group // C.block_m * C.block_m // C.group
            blind = gl.where(span.k_count == 0, span.q_count, blind)
            for i in range(blind):
                clear(results, sequence, i, span.q_start + i, C)
        if C.jagged:
            end = gl.load(schedule.q_offsets + batch).to(gl.int32)
            for row in range(end + worker, q_rows, workers):
                clear(results, batch, row, row, C)


@gluon.jit(do_not_specialize=["lse_batch", "lse_row", "lse_head", "q_len", "batch", "q_rows", "left", "right"])
def forward_kernel(
    q,  # ragged descriptors, see shared.ragged
    k,
    v,
    out,
    out_pointer,
    lse,  # fp32 [B, Hq, Lq] or [rows, Hq]
    lse_batch,
    lse_row,
    lse_head,  # its strides
    part_out,  # scratch for parts of tiles, see merge.Parts; None if no tile is cut
    part_lse,
    flags,  # scratch, see Flags
    tiles,  # of the schedule
    worker_offsets,
    listed,  # blocks, None without a block mask
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    batch,  # B
    q_rows,  # of q, if jagged
    scale_log2,  # |scale| * log2(e)
    coarse,  # the power of two nearest to it
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.rows, C.block_d], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_d], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_dv], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.rows, C.block_dv], dtype)
    channels = Channels(
        make_channel(dtype, [C.rows, C.block_d], q_layout, C.q_stages, C.consumers, 1, C.consumers),
        make_channel(dtype, [C.block_n, C.block_d], k_layout, C.kv_stages, C.consumers),
        make_channel(dtype, [C.block_n, C.block_dv], v_layout, C.v_stages, C.consumers),
        gl.allocate_shared_memory(dtype, [C.consumers, C.rows, C.block_dv], out_layout)
        if C.tma_store and not C.stage_in_q and not C.lends
        else None,
        new_barriers(2, 1) if C.alternates else None,
    )
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed)
    results = Results(out, out_pointer, lse, lse_batch, lse_row, lse_head)
    parts = Parts(part_out, part_lse)
    scale = Scale(scale_log2, coarse)
    window = (left, right)
    some = True
    if C.redoes:
        begin, end = my_range(schedule)
        some = any_flagged(flags, begin, end, C.flags)
    flags = Flags(flags, some)
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, flags, channels, results, parts, scale, window, C)),
                (load_role, (schedule, flags, (q, k, v), channels, C)),
                (fill_role, (schedule, results, batch, q_rows, right, C)),
            ],
            [1, 1],
            [24, 24],
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, flags, channels, results, parts, scale, window, C)),
                (consume_role, (1, schedule, flags, channels, results, parts, scale, window, C)),
                (leading_load_role if C.leads else load_role, (schedule, flags, (q, k, v), channels, C)),
                (fill_role, (schedule, results, batch, q_rows, right, C)),
            ],
            [4, 1, 1],
            [C.registers, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume_role, (0, schedule, flags, channels, results, parts, scale, window, C)),
                (consume_role, (1, schedule, flags, channels, results, parts, scale, window, C)),
                (consume_role, (2, schedule, flags, channels, results, parts, scale, window, C)),
                (load_role, (schedule, flags, (q, k, v), channels, C)),
                (fill_role, (schedule, results, batch, q_rows, right, C)),
            ],
            [4, 4, 1, 1],
            [C.registers, C.registers, 24, 24],
        )


@gluon.jit(do_not_specialize=["lse_batch", "lse_row", "lse_head", "q_len"])
def merge_kernel(
    out,  # [rows, Hq, Dv], without gaps
    lse,
    lse_batch,
    lse_row,
    lse_head,
    part_out,
    part_lse,
    merges,  # of the schedule
    q_offsets,
    k_offsets,
    q_len,
    C: gl.constexpr,
):
    schedule = Schedule(merges, merges, q_offsets, k_offsets, q_len, None)
    results = Results(None, out, lse, lse_batch, lse_row, lse_head)
    merge_parts(schedule, merges, Parts(part_out, part_lse), results, C)
