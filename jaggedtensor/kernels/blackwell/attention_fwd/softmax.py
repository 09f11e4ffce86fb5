"""The role that turns a lane's scores into weights, and keeps the peaks and sums of its rows."""

from jaggedtensor.kernels.blackwell.arithmetic import (
    by_row,
    exp2_by_polynomial,
    folded,
    greatest,
    halves,
    joined,
    pieces_of,
)
from jaggedtensor.kernels.blackwell.attention_fwd.lanes import ROWS, blocks_of, first_row, has_rows, skipped
from jaggedtensor.kernels.blackwell.walk import start_walk
from jaggedtensor.kernels.shared import masks
from jaggedtensor.kernels.shared.dsl import add2, aggregate, fma2, gl, gluon, mbarrier
from jaggedtensor.kernels.shared.walk import Schedule, Span, Tile

blocks_seen_by_all = gluon.jit(masks.blocks_seen_by_all.fn)


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
    def masked(self, score, place, C: gl.constexpr, at: gl.constexpr = 0):
        """-inf for what is past the last key or hidden by the window, in the block at a place of the tile's range, from
        its column `at` on."""
        past = self.schedule.block(place) * C.block_n + at
        column = gl.arange(0, score.shape[1], gl.SliceLayout(0, score.type.layout))[None, :]
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
    """P = 2 ** (score * unit + shift) [128, N], in pieces, published; and its sums [128, 2], of what P is before it is
    rounded to its dtype."""
    PIECES: gl.constexpr = C.pieces
    WIDTH: gl.constexpr = C.block_n // PIECES
    # They run beside the special function unit; they know no 0, which a masked score must give.
    POLYNOMIALS: gl.constexpr = 0 if MASK else C.polynomials
    weights = lane.weights(dtype)
    scores = pieces_of(score, PIECES)
    norm = None
    for i in gl.static_range(PIECES):
        x = fma2(scores[i], by_row(unit, scores[i]), by_row(shift, scores[i]))
        if i < POLYNOMIALS:
            left, right = halves(x)
            p = joined(gl.exp2(left), exp2_by_polynomial(right))
        else:
            p = gl.exp2(x)
        part = weights.slice(i * WIDTH, WIDTH)
        part.store(gl.convert_layout(p.to(dtype), part.get_reg_layout(), assert_trivial=True))
        norm = folded(p) if norm is None else add2(norm, folded(p))
        if C.early and (i + 1) * WIDTH == C.early:
            mbarrier.arrive(lane.weighted, count=1)
    mbarrier.arrive(lane.filled if C.early else lane.weighted, count=1)
    return norm


@gluon.jit
def step(rows, lane, view, place, units, dtype: gl.constexpr, C: gl.constexpr, FIRST: gl.constexpr, MASK: gl.constexpr):
    """One block of keys, at a place of the tile's range."""
    mbarrier.wait(lane.scored, rows.phase)
    score = lane.s.load()
    if MASK:
        score = view.masked(score, place, C)
    peak = greatest(score)
    if not FIRST:
        peak = gl.maximum(rows.peak, peak)
        peak = gl.where(peak - rows.peak > units.grown, peak, rows.peak)
    base = gl.where(peak == float("-inf"), 0.0, peak) if C.windowed else peak
    unit = units.of_rows(base)
    if not FIRST:
        fade = gl.exp2((rows.peak - base) * unit)
        factor = lane.factor()
        factor.store(gl.convert_layout(gl.expand_dims(fade, 1), factor.get_reg_layout()))
        mbarrier.arrive(lane.told, count=1)
    shift = gl.fma(-base, unit, 1.0 * C.boost) if C.boost else -base * unit
    norm = write_weights(lane, score, unit, shift, dtype, C, MASK)
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
def exponentiate(part: gl.constexpr, lane, view, skip, units, phase, heard, dtype: gl.constexpr, C: gl.constexpr):
    """All blocks that a lane has of a tile; the phase of `scored` after it."""
    STRIDE: gl.constexpr = 2 if C.streams else 1
    OFFSET: gl.constexpr = part if C.streams else 0
    CUT: gl.constexpr = C.windowed or OFFSET == 0  # the lane's first block may not be seen whole
    top = view.tile.kv_end - 1 - OFFSET - skip
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, lane.s.get_reg_layout()))
    rows = Rows(none, none, phase)
    rows = step(rows, lane, view, top, units, dtype, C, True, CUT)
    low, high = view.unmasked(C)
    place = top - STRIDE
    if C.windowed:
        many = gl.maximum(place - high + STRIDE, 0) // STRIDE
        for _ in range(many):
            rows = step(rows, lane, view, place, units, dtype, C, False, True)
            place -= STRIDE
    many = gl.maximum(place - low + STRIDE, 0) // STRIDE
    for _ in range(many):
        rows = step(rows, lane, view, place, units, dtype, C, False, False)
        place -= STRIDE
    if C.left:
        many = gl.maximum(place - view.tile.kv_begin + STRIDE, 0) // STRIDE
        for _ in range(many):
            rows = step(rows, lane, view, place, units, dtype, C, False, True)
            place -= STRIDE
    tell(lane, rows.peak, gl.sum(rows.norm, 1), heard)
    return rows.phase


@gluon.jit
def softmax_role(part: gl.constexpr, source, lane, scales, dtype: gl.constexpr, C: gl.constexpr):
    walk = start_walk(source)
    phase, heard = gl.to_tensor(0), gl.to_tensor(1)
    rows_layout: gl.constexpr = gl.SliceLayout(1, lane.s.get_reg_layout())
    while walk.more:
        tile, span = walk.tile, walk.span
        units = scales.of_tile(tile, rows_layout, C)
        if C.streams or has_rows(tile, span, part, C):
            view = View(source.schedule, tile, span, first_row(tile, part, C), source.left, source.right)
            if not C.streams or blocks_of(tile, part, C) > 0:
                skip = skipped(source, tile, span, part, C)
                phase = exponentiate(part, lane, view, skip, units, phase, heard, dtype, C)
            else:
                peak = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
                tell(lane, peak, gl.full([ROWS], 0.0, gl.float32, rows_layout), heard)
            heard = heard ^ 1
        walk = walk.next()


@gluon.jit
def softmax_wide_role(source, lanes, scales, dtype: gl.constexpr, C: gl.constexpr):
    """Of both lanes by turns. The tensor cores bound it, so that a loop without masks would gain nothing."""
    walk = start_walk(source)
    phase0, phase1, heard = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1)
    rows_layout: gl.constexpr = gl.SliceLayout(1, lanes[0].s.get_reg_layout())
    none = gl.full([ROWS], 0.0, gl.float32, rows_layout)
    while walk.more:
        tile = walk.tile
        units = scales.of_tile(tile, rows_layout, C)
        view = View(source.schedule, tile, walk.span, first_row(tile, 0, C), source.left, source.right)
        place = tile.kv_end - 1
        rows = step(Rows(none, none, phase0), lanes[0], view, place, units, dtype, C, True, True)
        phase0 = rows.phase
        for _ in range(blocks_of(tile, 0, C) - 1):
            rows = Rows(rows.peak, rows.norm, phase1)
            rows = step(rows, lanes[1], view, place - 1, units, dtype, C, False, C.windowed)
            phase1 = rows.phase
            place -= 2
            rows = Rows(rows.peak, rows.norm, phase0)
            rows = step(rows, lanes[0], view, place, units, dtype, C, False, C.windowed)
            phase0 = rows.phase
        if place > tile.kv_begin:
            rows = Rows(rows.peak, rows.norm, phase1)
            rows = step(rows, lanes[1], view, place - 1, units, dtype, C, False, C.windowed)
            phase1 = rows.phase
        tell(lanes[0], rows.peak, gl.sum(rows.norm, 1), heard)
        heard = heard ^ 1
        walk = walk.next()
