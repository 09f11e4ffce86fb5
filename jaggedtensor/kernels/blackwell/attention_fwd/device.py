"""Forward: one CTA for each multiprocessor walks its tiles of the schedule. A tile's work is in two lanes, each with
its scores S, its part of O and a softmax warpgroup of its own, so that the tensor cores multiply for one lane while the
other exponentiates:

    two tiles     a lane is 128 packed query rows; both see every block of keys, and end in rows of their own
    two streams   a lane is every other block of keys of one sequence, for the same 128 rows; merged once, at the end
    wide          for head dimensions past 128, of which two O don't fit: lanes take turns as in two streams, but add to
                  the same O, and one softmax warpgroup serves both. S of a block is issued before P V of the one before

    load         Q  K0 K1 V0 K2 V1 K3 V2 ...           one warp; TMA, as far ahead as the ring allows
    mma          S0(0) S1(1) | PV0(0) S0(2) | PV1(1) S1(3) | PV0(2) ...         one warp; two streams
                 S0(0) S1(0) | PV0(0) S0(1)   PV1(0) S1(1) | PV0(1) ...                  two tiles
    softmax 0    P(0)        .. P(2)        .. P(4)         peak, sum           four warps, a row for each thread
    softmax 1           P(1)        .. P(3)        .. P(5)  peak, sum           four warps
    correction   O0 *= fade, O1 *= fade, where a peak has grown; O and lse      four warps

Tensor memory, 512 columns of 128 lanes for Dv = 128; P lies over the left half of its S, and the factor that O must
fade by over a column of the right half:

    |  S0, 128  |  S1, 128  |    O0, Dv    |    O1, Dv    |

A lane's barriers, and what orders the use of its memory:

    scored       S is complete (commit): the products before it are too, so P and O are free to be changed
    weighted     P is written, or its first `early` columns, and O has faded (an arrival of each): its product may be
                 issued. For a tile's first block, O of the tile before is out
    filled       the rest of P is written: S may be overwritten after its product, since those of one role run in order
    told         the factor is where correction looks
    summed       O is complete (commit): at the tile's end; of a wide tile after each block, before O fades for the next
    ended        the rows' peaks and sums are where correction looks
    heard        it has read them

O fades only when some row's peak has grown by more than `limit` in log2 units since it last did (Zadouri et al. 2026),
which the sum in fp32 and P's dtype have room for. Blocks of keys are walked from the last to the first: the one that
the sequence's end cuts is peeled off in front, and the loop has no mask (but for windows, whose edges get loops of
their own). K and V come through descriptors that end where the sequence ends, so rows of a neighbour are zeros. Q stays
as long as tiles have the same one, and is released with the last scores that need it.
"""

from jaggedtensor.kernels.blackwell.attention_fwd.anchored import anchored_role
from jaggedtensor.kernels.blackwell.attention_fwd.correction import (
    Output,
    correct_streams_role,
    correct_tiles_role,
    correct_wide_role,
    finish_tiles_role,
)
from jaggedtensor.kernels.blackwell.attention_fwd.lanes import ROWS, first_row, has_rows, make_lanes, skipped
from jaggedtensor.kernels.blackwell.attention_fwd.softmax import softmax_role, softmax_wide_role
from jaggedtensor.kernels.blackwell.attention_fwd.units import Scales
from jaggedtensor.kernels.blackwell.walk import Source, any_in_range, ask_role, make_answers, start_walk
from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon, mbarrier, tcgen05_commit, tcgen05_mma
from jaggedtensor.kernels.shared.epilogue import Results
from jaggedtensor.kernels.shared.merge import Parts, merge_parts
from jaggedtensor.kernels.shared.pipeline import Channel, make_channel
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule, query_of


@aggregate
class Channels:
    q: Channel  # [128, D] for each lane with rows of its own
    kv: Channel  # [N, D], keys and values by turns


@gluon.jit
def load_role(source, descriptors, channels, C: gl.constexpr):
    AHEAD: gl.constexpr = 1 if C.q_parts == 2 else 2  # blocks whose scores come before a block's values
    PARTS: gl.constexpr = C.q_parts
    q_desc, k_desc, v_desc = descriptors
    walk = start_walk(source)
    q_at, at = channels.q.start(), channels.kv.start()
    held = -1
    while walk.more:
        tile, span = walk.tile, walk.span
        if not C.resident or query_of(tile, C) != held:
            q_start = 0 if C.broadcast else span.q_start
            _, after = channels.q.acquire_empty(q_at)
            for part in gl.static_range(PARTS):
                row = first_row(tile, part, C) // C.group
                channels.q.slot(q_at, part).load(q_desc, ragged_place(q_start, span.q_count, row, tile.head * C.heads))
            q_at = after
            held = query_of(tile, C)
        count = tile.kv_end - tile.kv_begin
        for n in range(-AHEAD, count):
            if n >= 0:
                row = source.schedule.block(tile.kv_end - 1 - n) * C.block_n
                slot, at = channels.kv.acquire_empty(at)
                slot.load(v_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
            if n + AHEAD < count:
                row = source.schedule.block(tile.kv_end - 1 - n - AHEAD) * C.block_n
                slot, at = channels.kv.acquire_empty(at)
                slot.load(k_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
        walk = walk.next()


@gluon.jit
def issue_scores(lane, q, k, barriers):
    """S = Q K^T."""
    tcgen05_mma(q, k.permute((1, 0)), lane.s, use_acc=False, mbarriers=barriers)


@gluon.jit
def issue_sum(lane, v, phase, more, barriers, C: gl.constexpr):
    """O (+)= P V, in parts as they are there. The phase of `weighted` after it."""
    HALF: gl.constexpr = C.block_n // 2
    LAST: gl.constexpr = C.block_n // 4
    mbarrier.wait(lane.weighted, phase)
    if C.anchored:  # the first columns of each half, and the rest
        left, right = lane.half(0, v.dtype), lane.half(1, v.dtype)
        tcgen05_mma(left.slice(0, LAST), v.slice(0, LAST), lane.o, use_acc=more, mbarriers=[])
        tcgen05_mma(right.slice(0, LAST), v.slice(HALF, LAST), lane.o, mbarriers=[])
        mbarrier.wait(lane.filled, phase)
        tcgen05_mma(left.slice(LAST, LAST), v.slice(LAST, LAST), lane.o, mbarriers=[])
        tcgen05_mma(right.slice(LAST, LAST), v.slice(HALF + LAST, LAST), lane.o, mbarriers=barriers)
    elif C.early == 0:
        tcgen05_mma(lane.weights(v.dtype), v, lane.o, use_acc=more, mbarriers=barriers)
    else:  # three quarters, in powers of two, and the rest
        weights = lane.weights(v.dtype)
        tcgen05_mma(weights.slice(0, HALF), v.slice(0, HALF), lane.o, use_acc=more, mbarriers=[])
        tcgen05_mma(weights.slice(HALF, LAST), v.slice(HALF, LAST), lane.o, mbarriers=[])
        mbarrier.wait(lane.filled, phase)
        tcgen05_mma(weights.slice(HALF + LAST, LAST), v.slice(HALF + LAST, LAST), lane.o, mbarriers=barriers)
    return phase ^ 1


@gluon.jit
def leaves(walk, C: gl.constexpr):
    """Whether the next tile needs another Q."""
    return walk.more_ahead & (not C.resident or query_of(walk.ahead, C) != query_of(walk.tile, C))


@gluon.jit
def mma_streams_role(source, channels, lanes, C: gl.constexpr):
    walk = start_walk(source)
    q_at, at = channels.q.start(), channels.kv.start()
    q_slot = channels.q.slot(q_at)
    phases = (gl.to_tensor(0), gl.to_tensor(0))
    held = -1
    while walk.more:
        tile = walk.tile
        if not C.resident or query_of(tile, C) != held:
            q_slot, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        leave = leaves(walk, C)
        count = tile.kv_end - tile.kv_begin
        for part in gl.static_range(2):
            if part < count:
                k_slot, at = channels.kv.acquire_full(at)
                issue_scores(lanes[part], q_slot.buffer, k_slot.buffer, [lanes[part].scored, k_slot.empty])
        tcgen05_commit(q_slot.empty, pred=leave & (count <= 2))
        for pair in range((count + 1) // 2):
            n = 2 * pair
            v_slot, at = channels.kv.acquire_full(at)
            phase0 = issue_sum(lanes[0], v_slot.buffer, phases[0], pair > 0, [v_slot.empty], C)
            phase1 = phases[1]
            if n + 2 < count:
                k_slot, at = channels.kv.acquire_full(at)
                issue_scores(lanes[0], q_slot.buffer, k_slot.buffer, [lanes[0].scored, k_slot.empty])
                tcgen05_commit(q_slot.empty, pred=leave & (n + 3 == count))
            if n + 1 < count:
                v_slot, at = channels.kv.acquire_full(at)
                phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, pair > 0, [v_slot.empty], C)
                if n + 3 < count:
                    k_slot, at = channels.kv.acquire_full(at)
                    issue_scores(lanes[1], q_slot.buffer, k_slot.buffer, [lanes[1].scored, k_slot.empty])
                    tcgen05_commit(q_slot.empty, pred=leave & (n + 4 == count))
            phases = (phase0, phase1)
        tcgen05_commit(lanes[0].summed)
        walk = walk.next()


@gluon.jit
def multiply_tiles(lanes, q, channel, state, skip, count, C: gl.constexpr, BOTH: gl.constexpr):
    """P V of each block but the last and S of the one after it, from the first that lane 0 sees; for lane 1 if BOTH."""
    at, phase0, phase1 = state
    for n in range(skip, count - 1):
        v_slot, at = channel.acquire_full(at)
        if BOTH:
            phase0 = issue_sum(lanes[0], v_slot.buffer, phase0, n > skip, [], C)
            k_slot, at = channel.acquire_full(at)
            issue_scores(lanes[0], q[0].buffer, k_slot.buffer, [lanes[0].scored])
            phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, n > 0, [v_slot.empty], C)
            issue_scores(lanes[1], q[1].buffer, k_slot.buffer, [lanes[1].scored, k_slot.empty])
        else:
            phase0 = issue_sum(lanes[0], v_slot.buffer, phase0, n > skip, [v_slot.empty], C)
            k_slot, at = channel.acquire_full(at)
            issue_scores(lanes[0], q[0].buffer, k_slot.buffer, [lanes[0].scored, k_slot.empty])
    return at, phase0, phase1


@gluon.jit
def mma_tiles_role(source, channels, lanes, C: gl.constexpr):
    walk = start_walk(source)
    q_at = channels.q.start()
    state = (channels.kv.start(), gl.to_tensor(0), gl.to_tensor(0))
    held_at = q_at
    held = -1
    while walk.more:
        tile = walk.tile
        if not C.resident or query_of(tile, C) != held:
            held_at = q_at
            _, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        q = (channels.q.slot(held_at, 0), channels.q.slot(held_at, 1))
        both = has_rows(tile, walk.span, 1, C)
        count, skip = tile.kv_end - tile.kv_begin, skipped(source, tile, walk.span, 0, C)
        at, phase0, phase1 = state
        k_slot, at = channels.kv.acquire_full(at)
        if skip == 0:
            issue_scores(lanes[0], q[0].buffer, k_slot.buffer, [lanes[0].scored])
        if both:
            issue_scores(lanes[1], q[1].buffer, k_slot.buffer, [lanes[1].scored])
        tcgen05_commit(k_slot.empty)
        if C.skips:
            for n in range(skip):  # lane 1 by itself
                v_slot, at = channels.kv.acquire_full(at)
                k_slot, at = channels.kv.acquire_full(at)
                phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, n > 0, [v_slot.empty], C)
                if n + 1 == skip:
                    issue_scores(lanes[0], q[0].buffer, k_slot.buffer, [lanes[0].scored])
                issue_scores(lanes[1], q[1].buffer, k_slot.buffer, [lanes[1].scored, k_slot.empty])
        state = (at, phase0, phase1)
        if both:  # loops of their own, as a branch in one of them takes more instructions than the products
            state = multiply_tiles(lanes, q, channels.kv, state, skip, count, C, True)
        else:
            state = multiply_tiles(lanes, q, channels.kv, state, skip, count, C, False)
        tcgen05_commit(q[0].empty, pred=leaves(walk, C))
        at, phase0, phase1 = state
        v_slot, at = channels.kv.acquire_full(at)
        phase0 = issue_sum(lanes[0], v_slot.buffer, phase0, count - 1 > skip, [lanes[0].summed], C)
        if both:
            phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, count > 1, [lanes[1].summed], C)
        tcgen05_commit(v_slot.empty)
        state = (at, phase0, phase1)
        walk = walk.next()


@gluon.jit
def mma_wide_role(source, channels, lanes, C: gl.constexpr):
    walk = start_walk(source)
    q_at, at = channels.q.start(), channels.kv.start()
    q_slot = channels.q.slot(q_at)
    phases = (gl.to_tensor(0), gl.to_tensor(0))
    held = -1
    while walk.more:
        tile = walk.tile
        if not C.resident or query_of(tile, C) != held:
            q_slot, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        leave = leaves(walk, C)
        count = tile.kv_end - tile.kv_begin
        k_slot, at = channels.kv.acquire_full(at)
        issue_scores(lanes[0], q_slot.buffer, k_slot.buffer, [lanes[0].scored, k_slot.empty])
        tcgen05_commit(q_slot.empty, pred=leave & (count == 1))
        for pair in range((count + 1) // 2):
            n = 2 * pair
            if n + 1 < count:
                k_slot, at = channels.kv.acquire_full(at)
                issue_scores(lanes[1], q_slot.buffer, k_slot.buffer, [lanes[1].scored, k_slot.empty])
                tcgen05_commit(q_slot.empty, pred=leave & (n + 2 == count))
            v_slot, at = channels.kv.acquire_full(at)
            phase0 = issue_sum(lanes[0], v_slot.buffer, phases[0], n > 0, [lanes[0].summed, v_slot.empty], C)
            phase1 = phases[1]
            if n + 1 < count:
                if n + 2 < count:
                    k_slot, at = channels.kv.acquire_full(at)
                    issue_scores(lanes[0], q_slot.buffer, k_slot.buffer, [lanes[0].scored, k_slot.empty])
                    tcgen05_commit(q_slot.empty, pred=leave & (n + 3 == count))
                v_slot, at = channels.kv.acquire_full(at)
                phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, True, [lanes[1].summed, v_slot.empty], C)
            phases = (phase0, phase1)
        walk = walk.next()


@gluon.jit(do_not_specialize=["lse_batch", "lse_row", "lse_head", "q_len", "left", "right"])
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
    part_out,  # scratch for parts of tiles, see shared.merge; None if no tile is cut
    part_lse,
    flags,  # int32 [tiles, 2], see shared.anchor: written where rows are anchored, read where tiles are redone, or None
    tiles,  # of the schedule
    worker_offsets,  # or, where CTAs ask for tiles, how many there are
    listed,  # blocks, None without a block mask
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # |scale| * log2(e)
    coarse,  # the power of two nearest to it
    units,  # fp32 [Hq], in place of these two where q and k are quantised; None otherwise
    value_scales,  # fp32 [Hkv], None unless v is quantised
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_d], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_d], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.out_columns], out.dtype)
    channels = Channels(
        make_channel(dtype, [ROWS, C.block_d], q_layout, C.q_stages, 1, 1, C.q_parts),
        make_channel(dtype, [C.block_n, C.block_d], kv_layout, C.kv_stages),
    )
    staging = gl.allocate_shared_memory(out.dtype, [C.staging, ROWS, C.out_columns], out_layout)
    lanes = make_lanes(C)
    READERS: gl.constexpr = 4 if C.wide else 5
    source = Source(
        Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed),
        make_answers(C.answers, READERS) if C.answers else None,
        left,
        right,
        flags if C.redoes else None,
        any_in_range(flags, worker_offsets) if C.redoes else None,
    )
    results = Results(out, out_pointer, lse, lse_batch, lse_row, lse_head)
    output = Output(results, Parts(part_out, part_lse), staging, flags if C.anchored else None)
    scales = Scales(scale_log2, coarse, units, value_scales)
    WIDE: gl.constexpr = C.softmax_registers
    NARROW: gl.constexpr = C.single_registers
    if C.wide and C.answers:
        gl.warp_specialize(
            [
                (correct_wide_role, (source, lanes, output, scales, C)),
                (softmax_wide_role, (source, lanes, scales, dtype, C)),
                (mma_wide_role, (source, channels, lanes, C)),
                (load_role, (source, (q, k, v), channels, C)),
                (ask_role, (source,)),
            ],
            [4, 1, 1, 1],
            [WIDE, NARROW, NARROW, NARROW],
        )
    elif C.wide:
        gl.warp_specialize(
            [
                (correct_wide_role, (source, lanes, output, scales, C)),
                (softmax_wide_role, (source, lanes, scales, dtype, C)),
                (mma_wide_role, (source, channels, lanes, C)),
                (load_role, (source, (q, k, v), channels, C)),
            ],
            [4, 1, 1],
            [WIDE, NARROW, NARROW],
        )
    elif C.anchored:
        gl.warp_specialize(
            [
                (finish_tiles_role, (source, lanes, output, scales, C)),
                (anchored_role, (0, 0, source, lanes[0], scales, dtype, C)),
                (anchored_role, (0, 1, source, lanes[0], scales, dtype, C)),
                (anchored_role, (1, 0, source, lanes[1], scales, dtype, C)),
                (anchored_role, (1, 1, source, lanes[1], scales, dtype, C)),
                (mma_tiles_role, (source, channels, lanes, C)),
                (load_role, (source, (q, k, v), channels, C)),
            ],
            [4, 4, 4, 4, 1, 1],
            [WIDE, WIDE, WIDE, WIDE, NARROW, NARROW],
        )
    elif C.answers:
        gl.warp_specialize(
            [
                (
                    correct_streams_role if C.streams else correct_tiles_role,
                    (source, lanes, output, scales, C),
                ),
                (softmax_role, (0, source, lanes[0], scales, dtype, C)),
                (softmax_role, (1, source, lanes[1], scales, dtype, C)),
                (mma_streams_role if C.streams else mma_tiles_role, (source, channels, lanes, C)),
                (load_role, (source, (q, k, v), channels, C)),
                (ask_role, (source,)),
            ],
            [4, 4, 1, 1, 1],
            [WIDE, WIDE, NARROW, NARROW, NARROW],
        )
    else:
        gl.warp_specialize(
            [
                (
                    correct_streams_role if C.streams else correct_tiles_role,
                    (source, lanes, output, scales, C),
                ),
                (softmax_role, (0, source, lanes[0], scales, dtype, C)),
                (softmax_role, (1, source, lanes[1], scales, dtype, C)),
                (mma_streams_role if C.streams else mma_tiles_role, (source, channels, lanes, C)),
                (load_role, (source, (q, k, v), channels, C)),
            ],
            [4, 4, 1, 1],
            [WIDE, WIDE, NARROW, NARROW],
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
