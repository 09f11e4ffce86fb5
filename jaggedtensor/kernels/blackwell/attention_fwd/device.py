"""Forward: one CTA for each multiprocessor walks its tiles of the schedule. A tile's work is in two lanes, each with
its scores S, its part of O and a softmax warpgroup of its own, so that the tensor cores multiply for one lane while the
other exponentiates:

    two tiles     a lane is 128 packed query rows; both see every block of keys, and end in rows of their own
    two streams   a lane is every other block of keys of one sequence, for the same 128 rows; merged once, at the end

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
    summed       O is complete (commit)
    ended        the rows' peaks and sums are where correction looks
    heard        it has read them

O fades only when some row's peak has grown by more than `limit` in log2 units since it last did (Zadouri et al. 2026),
which the sum in fp32 and P's dtype have room for. Blocks of keys are walked from the last to the first: the one that
the sequence's end cuts is peeled off in front, and the loop has no mask (but for windows, whose edges get loops of
their own). K and V come through descriptors that end where the sequence ends, so rows of a neighbour are zeros. Q stays
as long as tiles have the same one, and is released with the last scores that need it.
"""

from jaggedtensor.kernels.blackwell.arithmetic import by_row, exp2_by_polynomial, folded, pieces_of
from jaggedtensor.kernels.shared import masks
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    add2,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    reinterpret,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)
from jaggedtensor.kernels.shared.epilogue import Results, store_by_pointers, store_statistics
from jaggedtensor.kernels.shared.pipeline import Channel, make_channel
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.softmax import Scale
from jaggedtensor.kernels.shared.walk import Schedule, Span, Tile, my_range, query_of, start_walk

blocks_seen_by_all = gluon.jit(masks.blocks_seen_by_all.fn)

ROWS: gl.constexpr = gl.constexpr(128)  # of a lane: what one tcgen05.mma takes
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


@aggregate
class Channels:
    q: Channel  # [128, D] for each lane with rows of its own
    kv: Channel  # [N, D], keys and values by turns


@aggregate
class Lane:
    s: tensor_memory_descriptor  # [128, N] fp32
    o: tensor_memory_descriptor  # [128, Dv] fp32
    peaks: gl.shared_memory_descriptor  # [128] fp32
    norms: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor | gl.constexpr  # None where P is published whole
    told: gl.shared_memory_descriptor
    ended: gl.shared_memory_descriptor
    heard: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor

    @gluon.jit
    def weights(self, dtype: gl.constexpr):
        """P [128, N], over the left half of S."""
        WIDE: gl.constexpr = 2 * self.s.shape[1]
        layout: gl.constexpr = TensorMemoryLayout([ROWS, WIDE], col_stride=1)
        return reinterpret(self.s, dtype, [ROWS, WIDE], layout).slice(0, WIDE // 2)

    @gluon.jit
    def factor(self):
        """[128, 1] fp32: what O must be multiplied by, over the column of S behind P."""
        layout: gl.constexpr = TensorMemoryLayout([ROWS, 1], col_stride=1)
        return reinterpret(self.s, gl.float32, [ROWS, self.s.shape[1]], layout).slice(self.s.shape[1] // 2, 1)


@gluon.jit
def new_barrier(count: gl.constexpr):
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def make_lane(C: gl.constexpr):
    s_layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_n], col_stride=1)
    o_layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_dv], col_stride=1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Lane(
        allocate_tensor_memory(gl.float32, [ROWS, C.block_n], s_layout),
        allocate_tensor_memory(gl.float32, [ROWS, C.block_dv], o_layout),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        new_barrier(1),
        new_barrier(2),
        new_barrier(1) if C.early else None,
        new_barrier(1),
        new_barrier(1),
        new_barrier(1),
        new_barrier(1),
    )


@gluon.jit
def first_row(tile, part: gl.constexpr, C: gl.constexpr):
    """The packed row of a tile's sequence that is a lane's row 0."""
    return tile.q_block * C.block_m + (0 if C.streams else part * ROWS)


@gluon.jit
def has_rows(tile, span, part: gl.constexpr, C: gl.constexpr):
    """Whether a lane has anything to do in a tile."""
    return first_row(tile, part, C) < span.q_count * C.group


@gluon.jit
def blocks_of(tile, part: gl.constexpr, C: gl.constexpr):
    """How many blocks of a tile a lane has."""
    count = tile.kv_end - tile.kv_begin
    return (count + 1 - part) // 2 if C.streams else count


# Load --------------------------------------------------------------------------------------------------------------


@gluon.jit
def load_role(schedule, descriptors, channels, C: gl.constexpr):
    AHEAD: gl.constexpr = 2 if C.streams else 1  # blocks whose scores come before a block's values
    PARTS: gl.constexpr = C.q_parts
    q_desc, k_desc, v_desc = descriptors
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    q_at, at = channels.q.start(), channels.kv.start()
    held = -1
    for t in range(begin, end):
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
                row = schedule.block(tile.kv_end - 1 - n) * C.block_n
                slot, at = channels.kv.acquire_empty(at)
                slot.load(v_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
            if n + AHEAD < count:
                row = schedule.block(tile.kv_end - 1 - n - AHEAD) * C.block_n
                slot, at = channels.kv.acquire_empty(at)
                slot.load(k_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
        walk = walk.next(t)


# Products ----------------------------------------------------------------------------------------------------------


@gluon.jit
def issue_scores(lane, q, k, barriers):
    """S = Q K^T."""
    tcgen05_mma(q, k.permute((1, 0)), lane.s, use_acc=False, mbarriers=barriers)


@gluon.jit
def issue_sum(lane, v, phase, more, barriers, C: gl.constexpr):
    """O (+)= P V, in parts as they are there. The phase of `weighted` after it."""
    weights = lane.weights(v.dtype)
    mbarrier.wait(lane.weighted, phase)
    if C.early == 0:
        tcgen05_mma(weights, v, lane.o, use_acc=more, mbarriers=barriers)
    else:  # three quarters, in powers of two, and the rest
        HALF: gl.constexpr = C.block_n // 2
        LAST: gl.constexpr = C.block_n // 4
        tcgen05_mma(weights.slice(0, HALF), v.slice(0, HALF), lane.o, use_acc=more, mbarriers=[])
        tcgen05_mma(weights.slice(HALF, LAST), v.slice(HALF, LAST), lane.o, mbarriers=[])
        mbarrier.wait(lane.filled, phase)
        tcgen05_mma(weights.slice(HALF + LAST, LAST), v.slice(HALF + LAST, LAST), lane.o, mbarriers=barriers)
    return phase ^ 1


@gluon.jit
def leaves(walk, place, end, C: gl.constexpr):
    """Whether the tile after `place` needs another Q."""
    return (place + 1 < end) & (not C.resident or query_of(walk.ahead, C) != query_of(walk.tile, C))


@gluon.jit
def mma_streams_role(schedule, channels, lanes, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    q_at, at = channels.q.start(), channels.kv.start()
    q_slot = channels.q.slot(q_at)
    phases = (gl.to_tensor(0), gl.to_tensor(0))
    held = -1
    for t in range(begin, end):
        tile = walk.tile
        if not C.resident or query_of(tile, C) != held:
            q_slot, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        leave = leaves(walk, t, end, C)
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
        walk = walk.next(t)


@gluon.jit
def mma_tiles_role(schedule, channels, lanes, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    q_at, at = channels.q.start(), channels.kv.start()
    held_at = q_at
    phase0, phase1 = gl.to_tensor(0), gl.to_tensor(0)
    held = -1
    for t in range(begin, end):
        tile = walk.tile
        if not C.resident or query_of(tile, C) != held:
            held_at = q_at
            _, q_at = channels.q.acquire_full(q_at)
            held = query_of(tile, C)
        q0, q1 = channels.q.slot(held_at, 0), channels.q.slot(held_at, 1)
        leave = leaves(walk, t, end, C)
        both = has_rows(tile, walk.span, 1, C)
        count = tile.kv_end - tile.kv_begin
        k_slot, at = channels.kv.acquire_full(at)
        issue_scores(lanes[0], q0.buffer, k_slot.buffer, [lanes[0].scored])
        if both:
            issue_scores(lanes[1], q1.buffer, k_slot.buffer, [lanes[1].scored])
        tcgen05_commit(k_slot.empty)
        tcgen05_commit(q0.empty, pred=leave & (count == 1))
        for n in range(count - 1):
            v_slot, at = channels.kv.acquire_full(at)
            k_slot, at = channels.kv.acquire_full(at)
            phase0 = issue_sum(lanes[0], v_slot.buffer, phase0, n > 0, [], C)
            issue_scores(lanes[0], q0.buffer, k_slot.buffer, [lanes[0].scored])
            if both:
                phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, n > 0, [v_slot.empty], C)
                issue_scores(lanes[1], q1.buffer, k_slot.buffer, [lanes[1].scored])
            else:
                tcgen05_commit(v_slot.empty)
            tcgen05_commit(k_slot.empty)
            tcgen05_commit(q0.empty, pred=leave & (n + 2 == count))
        v_slot, at = channels.kv.acquire_full(at)
        phase0 = issue_sum(lanes[0], v_slot.buffer, phase0, count > 1, [lanes[0].summed], C)
        if both:
            phase1 = issue_sum(lanes[1], v_slot.buffer, phase1, count > 1, [lanes[1].summed], C)
        tcgen05_commit(v_slot.empty)
        walk = walk.next(t)


# Softmax -----------------------------------------------------------------------------------------------------------


@aggregate
class View:
    """A lane's rows of a tile, and what decides which keys they see."""

    schedule: Schedule
    tile: Tile
    span: Span
    first: gl.tensor  # packed row of the sequence that is row 0 here
    left: gl.tensor
    right: gl.tensor

    @gluon.jit
    def masked(self, score, place, C: gl.constexpr):
        """-inf for what is past the last key or hidden by the window, in the block at a place of the tile's range."""
        past = self.schedule.block(place) * C.block_n
        column = gl.arange(0, C.block_n, gl.SliceLayout(0, score.type.layout))[None, :]
        i = (self.first + gl.arange(0, ROWS, gl.SliceLayout(1, score.type.layout)))[:, None] // C.group
        diagonal = i + self.span.k_count - self.span.q_count
        end = self.span.k_count
        if C.right:
            end = gl.minimum(end, diagonal + self.right + 1)
        seen = column < end - past
        if C.left:
            seen = seen & (column >= diagonal - self.left - past)
        return gl.where(seen, score, float("-inf"))

    @gluon.jit
    def unmasked(self, C: gl.constexpr):
        """The range of places below the last whose blocks all rows see whole."""
        low, high = self.tile.kv_begin, self.tile.kv_end - 1
        if C.windowed and C.masked:  # a list of blocks has no such range
            high = low
        elif C.windowed:
            last = gl.minimum((self.first + ROWS - 1) // C.group, self.span.q_count - 1)
            shift = self.span.k_count - self.span.q_count
            window = (self.left, self.right)
            low, high = blocks_seen_by_all(self.first // C.group, last, self.span.k_count, shift, window, low, high, C)
        return low, high


@aggregate
class Rows:
    """What is known of a lane's rows so far, and the phase of its `scored`."""

    peak: gl.tensor  # [128]: a raw score, which none passes by more than the limit
    norm: gl.tensor  # [128, 2]: sums of probabilities, by column modulo 2
    phase: gl.tensor


@gluon.jit
def write_weights(lane, score, unit, shift, dtype: gl.constexpr, C: gl.constexpr, MASK: gl.constexpr):
    """P = 2 ** (score * unit + shift) [128, N], in pieces, published; and its sums [128, 2]."""
    PIECES: gl.constexpr = C.pieces
    WIDTH: gl.constexpr = C.block_n // PIECES
    # Evenly spread, so that they run beside the special function unit; they know no 0, which a masked score must give.
    POLYNOMIALS: gl.constexpr = 0 if MASK else C.polynomials
    weights = lane.weights(dtype)
    scores = pieces_of(score, PIECES)
    norm = None
    for i in gl.static_range(PIECES):
        x = fma2(scores[i], by_row(unit, scores[i]), by_row(shift, scores[i]))
        p = exp2_by_polynomial(x) if POLYNOMIALS and i % (PIECES // POLYNOMIALS) == 1 else gl.exp2(x)
        part = weights.slice(i * WIDTH, WIDTH)
        part.store(gl.convert_layout(p.to(dtype), part.get_reg_layout(), assert_trivial=True))
        norm = folded(p) if norm is None else add2(norm, folded(p))
        if C.early and (i + 1) * WIDTH == C.early:
            mbarrier.arrive(lane.weighted, count=1)
    mbarrier.arrive(lane.filled if C.early else lane.weighted, count=1)
    return norm


@gluon.jit
def step(rows, lane, view, place, scale, dtype: gl.constexpr, C: gl.constexpr, FIRST: gl.constexpr, MASK: gl.constexpr):
    """One block of keys, at a place of the tile's range."""
    mbarrier.wait(lane.scored, rows.phase)
    score = lane.s.load()
    if MASK:
        score = view.masked(score, place, C)
    peak = gl.max(score, 1)
    if not FIRST:
        peak = gl.maximum(rows.peak, peak)
        peak = gl.where((peak - rows.peak) * scale.exact > C.limit, peak, rows.peak)
    base = gl.where(peak == float("-inf"), 0.0, peak) if C.windowed else peak
    unit = scale.of_rows(base)
    if not FIRST:
        fade = gl.exp2((rows.peak - base) * unit)
        factor = lane.factor()
        factor.store(gl.convert_layout(gl.expand_dims(fade, 1), factor.get_reg_layout()))
        mbarrier.arrive(lane.told, count=1)
    norm = write_weights(lane, score, unit, -base * unit, dtype, C, MASK)
    if not FIRST:
        norm = fma2(rows.norm, by_row(fade, norm), norm)
    return Rows(peak, norm, rows.phase ^ 1)


@gluon.jit
def tell(lane, peak, norm, phase):
    """Peaks and sums [128] to correction, once it has heard those of the tile before."""
    mbarrier.wait(lane.heard, phase)
    lane.peaks.store(peak)
    lane.norms.store(norm)
    mbarrier.arrive(lane.ended, count=1)


@gluon.jit
def exponentiate(part: gl.constexpr, lane, view, scale, phase, heard, dtype: gl.constexpr, C: gl.constexpr):
    """All blocks that a lane has of a tile; the phase of `scored` after it."""
    STRIDE: gl.constexpr = 2 if C.streams else 1
    OFFSET: gl.constexpr = part if C.streams else 0
    CUT: gl.constexpr = C.windowed or OFFSET == 0  # the lane's first block may not be seen whole
    top = view.tile.kv_end - 1 - OFFSET
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, lane.s.get_reg_layout()))
    rows = Rows(none, none, phase)
    rows = step(rows, lane, view, top, scale, dtype, C, True, CUT)
    low, high = view.unmasked(C)
    place = top - STRIDE
    if C.windowed:
        many = gl.maximum(place - high + STRIDE, 0) // STRIDE
        for _ in range(many):
            rows = step(rows, lane, view, place, scale, dtype, C, False, True)
            place -= STRIDE
    many = gl.maximum(place - low + STRIDE, 0) // STRIDE
    for _ in range(many):
        rows = step(rows, lane, view, place, scale, dtype, C, False, False)
        place -= STRIDE
    if C.left:
        many = gl.maximum(place - view.tile.kv_begin + STRIDE, 0) // STRIDE
        for _ in range(many):
            rows = step(rows, lane, view, place, scale, dtype, C, False, True)
            place -= STRIDE
    tell(lane, rows.peak, gl.sum(rows.norm, 1), heard)
    return rows.phase


@gluon.jit
def softmax_role(part: gl.constexpr, schedule, lane, scale, window, dtype: gl.constexpr, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    phase, heard = gl.to_tensor(0), gl.to_tensor(1)
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        if C.streams or has_rows(tile, span, part, C):
            view = View(schedule, tile, span, first_row(tile, part, C), window[0], window[1])
            if not C.streams or blocks_of(tile, part, C) > 0:
                phase = exponentiate(part, lane, view, scale, phase, heard, dtype, C)
            else:
                nothing: gl.constexpr = gl.SliceLayout(1, lane.s.get_reg_layout())
                peak = gl.full([ROWS], float("-inf"), gl.float32, nothing)
                tell(lane, peak, gl.full([ROWS], 0.0, gl.float32, nothing), heard)
            heard = heard ^ 1
        walk = walk.next(t)


# Correction --------------------------------------------------------------------------------------------------------


@gluon.jit
def fade_output(lane, phase, C: gl.constexpr):
    """O by the factor that softmax has told, if that is not 1 for every row. The phase of `told` after it."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    mbarrier.wait(lane.told, phase)
    layout: gl.constexpr = lane.o.slice(0, PIECE).get_reg_layout()
    fade = gl.reshape(lane.factor().load(), [ROWS])
    fade = gl.convert_layout(fade, gl.SliceLayout(1, layout))
    if gl.min(fade, 0) < 1.0:
        for i in gl.static_range(COUNT):
            part = lane.o.slice(i * PIECE, PIECE)
            part.store(mul2(part.load(layout), gl.expand_dims(fade, 1)))
    mbarrier.arrive(lane.weighted, count=1)
    return phase ^ 1


@aggregate
class Told:
    """A lane's rows at the end of a tile, [128] each."""

    peak: gl.tensor
    norm: gl.tensor


@gluon.jit
def hear(lane, phase, C: gl.constexpr):
    """What softmax knows of a lane's rows at the end of a tile."""
    layout: gl.constexpr = gl.SliceLayout(1, lane.o.slice(0, C.correction_columns).get_reg_layout())
    mbarrier.wait(lane.ended, phase)
    told = Told(lane.peaks.load(layout), lane.norms.load(layout))
    mbarrier.arrive(lane.heard, count=1)
    return told


@gluon.jit
def lse_of(told, scale):
    """Natural log of the sum of exponentials [128], -inf for rows that see nothing."""
    some = told.norm > 0
    natural = (told.peak * scale.exact + gl.log2(gl.where(some, told.norm, 1.0))) * LN_2
    return gl.where(some, natural, float("-inf"))


@gluon.jit
def inverse(norm):
    """1 / norm [128], 0 for rows that see nothing, whose O is 0."""
    some = norm > 0
    return gl.where(some, 1.0 / gl.where(some, norm, 1.0), 0.0)


@gluon.jit
def put_piece(out, i: gl.constexpr, staging, results, tile, span, first, C: gl.constexpr):
    """Columns of O [128, PIECE]: to the staging buffer, or past it."""
    PIECE: gl.constexpr = C.correction_columns
    if C.tma_store:
        staging.slice(i * PIECE, PIECE, dim=1).store(out.to(staging.dtype))
    else:
        store_by_pointers(results, out, tile, span, first, C, i * PIECE)


@gluon.jit
def send(staging, results, tile, span, first, C: gl.constexpr):
    """O from the staging buffer, by TMA."""
    if C.tma_store:
        fence_async_shared()
        tma.async_store(
            results.desc, ragged_place(span.q_start, span.q_count, first // C.group, tile.head * C.heads), staging
        )


@gluon.jit
def finish_rows(part: gl.constexpr, lane, told, staging, results, tile, span, first, scale, C: gl.constexpr):
    """O and lse of a lane with rows of its own."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    share = inverse(told.norm)
    if C.tma_store:
        tma.store_wait(part)  # the tile before has left the buffer; lane 0 of this one need not
    for i in gl.static_range(COUNT):
        o = lane.o.slice(i * PIECE, PIECE).load()
        put_piece(mul2(o, by_row(share, o)), i, staging, results, tile, span, first, C)
    send(staging, results, tile, span, first, C)
    store_statistics(results, lse_of(told, scale), tile, span, first, C)


@gluon.jit
def finish_streams(lanes, told, both, staging, results, tile, span, first, scale, C: gl.constexpr):
    """O and lse of two streams of the same rows; without `both`, the second has seen nothing."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    peak = gl.maximum(told[0].peak, told[1].peak)
    base = gl.where(peak == float("-inf"), 0.0, peak)
    unit = scale.of_rows(base)
    share0 = gl.exp2((told[0].peak - base) * unit)
    share1 = gl.exp2((told[1].peak - base) * unit)
    norm = told[0].norm * share0 + told[1].norm * share1
    share0 = share0 * inverse(norm)
    share1 = share1 * inverse(norm)
    if C.tma_store:
        tma.store_wait(0)  # the tile before has left the buffer
    for i in gl.static_range(COUNT):
        o = lanes[0].o.slice(i * PIECE, PIECE).load()
        o = mul2(o, by_row(share0, o))
        if both:
            o = fma2(lanes[1].o.slice(i * PIECE, PIECE).load(), by_row(share1, o), o)
        put_piece(o, i, staging, results, tile, span, first, C)
    send(staging, results, tile, span, first, C)
    store_statistics(results, lse_of(Told(peak, norm), scale), tile, span, first, C)


@gluon.jit
def correct_streams_role(schedule, lanes, staging, results, scale, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    phase0, phase1, ended = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        steps0, steps1 = blocks_of(tile, 0, C), blocks_of(tile, 1, C)
        mbarrier.arrive(lanes[0].weighted, count=1)
        mbarrier.arrive(lanes[1].weighted, count=1, pred=steps1 > 0)
        for n in range(1, steps0):
            phase0 = fade_output(lanes[0], phase0, C)
            if n < steps1:
                phase1 = fade_output(lanes[1], phase1, C)
        told = hear(lanes[0], ended, C), hear(lanes[1], ended, C)
        mbarrier.wait(lanes[0].summed, ended)
        ended = ended ^ 1
        first = first_row(tile, 0, C)
        finish_streams(lanes, told, steps1 > 0, staging.index(0), results, tile, span, first, scale, C)
        walk = walk.next(t)
    tma.store_wait(0)


@gluon.jit
def correct_tiles_role(schedule, lanes, staging, results, scale, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    phase0, phase1 = gl.to_tensor(0), gl.to_tensor(0)
    ended0, ended1 = gl.to_tensor(0), gl.to_tensor(0)
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        both = has_rows(tile, span, 1, C)
        mbarrier.arrive(lanes[0].weighted, count=1)
        mbarrier.arrive(lanes[1].weighted, count=1, pred=both)
        for _ in range(1, tile.kv_end - tile.kv_begin):
            phase0 = fade_output(lanes[0], phase0, C)
            if both:
                phase1 = fade_output(lanes[1], phase1, C)
        told = hear(lanes[0], ended0, C)
        mbarrier.wait(lanes[0].summed, ended0)
        ended0 = ended0 ^ 1
        finish_rows(0, lanes[0], told, staging.index(0), results, tile, span, first_row(tile, 0, C), scale, C)
        if both:
            told = hear(lanes[1], ended1, C)
            mbarrier.wait(lanes[1].summed, ended1)
            ended1 = ended1 ^ 1
            finish_rows(1, lanes[1], told, staging.index(1), results, tile, span, first_row(tile, 1, C), scale, C)
        walk = walk.next(t)
    tma.store_wait(0)


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
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, C.block_d], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_dv], dtype)
    channels = Channels(
        make_channel(dtype, [ROWS, C.block_d], q_layout, C.q_stages, 1, 1, C.q_parts),
        make_channel(dtype, [C.block_n, C.block_d], kv_layout, C.kv_stages),
    )
    staging = gl.allocate_shared_memory(dtype, [C.q_parts, ROWS, C.block_dv], out_layout)
    lanes = (make_lane(C), make_lane(C))
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed)
    results = Results(out, out_pointer, lse, lse_batch, lse_row, lse_head)
    scale = Scale(scale_log2, coarse)
    window = (left, right)
    gl.warp_specialize(
        [
            (
                correct_streams_role if C.streams else correct_tiles_role,
                (schedule, lanes, staging, results, scale, C),
            ),
            (softmax_role, (0, schedule, lanes[0], scale, window, dtype, C)),
            (softmax_role, (1, schedule, lanes[1], scale, window, dtype, C)),
            (mma_streams_role if C.streams else mma_tiles_role, (schedule, channels, lanes, C)),
            (load_role, (schedule, (q, k, v), channels, C)),
        ],
        [4, 4, 1, 1],
        [C.softmax_registers, C.softmax_registers, C.single_registers, C.single_registers],
    )
