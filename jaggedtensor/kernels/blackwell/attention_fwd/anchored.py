"""The role that turns a lane's scores into weights against the rows' anchors, the peaks of their first block.

Without a peak to look for no score waits for another: a piece of S is loaded, exponentiated and published before the
next is looked at, and O is left alone until the tile ends. And two groups of warps share a lane, half of each block's
keys for either, so that their loads from tensor memory overlap. What they have in common is told through shared memory,
the anchor when a block with a mask shows some rows their first keys, the sums when the tile ends:

    group 0    offers its peak                  hears the greater | offers its sum
    group 1                     agrees: greater of the two        |                 adds its own, tells correction
"""

from jaggedtensor.kernels.blackwell.arithmetic import by_row, folded, greatest, pieces_of
from jaggedtensor.kernels.blackwell.attention_fwd.lanes import GROUPS, ROWS, first_row, has_rows, skipped
from jaggedtensor.kernels.blackwell.attention_fwd.softmax import View
from jaggedtensor.kernels.blackwell.walk import start_walk
from jaggedtensor.kernels.shared.dsl import add2, aggregate, fma2, gl, gluon, mbarrier


@aggregate
class Anchored:
    """What a group knows of a lane's rows so far."""

    peak: gl.tensor  # [128]: a raw score, -inf while a row has seen nothing
    unit: gl.tensor  # [128]: what scores are multiplied by
    shift: gl.tensor  # [128]: what is added to that
    norm: gl.tensor  # [128, 2]: sums of the group's weights, by column modulo 2
    phase: gl.tensor  # of `scored`
    turn: gl.tensor  # of the barrier at which the group waits for the other


@gluon.jit
def publish(lane, score, unit, shift, group: gl.constexpr, i: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """Piece i of a group's weights, 2 ** (score * unit + shift), and word of it; its sums [128, 2]."""
    WIDTH: gl.constexpr = C.block_n // C.pieces
    p = gl.exp2(fma2(score, by_row(unit, score), by_row(shift, score)))
    part = lane.half(group, dtype).slice(i * WIDTH, WIDTH)
    part.store(gl.convert_layout(p.to(dtype), part.get_reg_layout(), assert_trivial=True))
    if (i + 1) * WIDTH == C.early // GROUPS:
        mbarrier.arrive(lane.weighted, count=1)
    if i + 1 == C.pieces // GROUPS:
        mbarrier.arrive(lane.filled, count=1)
    return folded(p)


@gluon.jit
def next_step(rows, lane, group: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """A block that all rows see whole, after one that has given them anchors."""
    HALF: gl.constexpr = C.block_n // GROUPS
    WIDTH: gl.constexpr = C.block_n // C.pieces
    mbarrier.wait(lane.scored, rows.phase)
    norm = rows.norm
    for i in gl.static_range(C.pieces // GROUPS):
        score = lane.s.slice(group * HALF + i * WIDTH, WIDTH).load()
        norm = add2(norm, publish(lane, score, rows.unit, rows.shift, group, i, dtype, C))
    return Anchored(rows.peak, rows.unit, rows.shift, norm, rows.phase ^ 1, rows.turn)


@gluon.jit
def agree(lane, peak, turn, group: gl.constexpr):
    """The greater of the peaks [128] of both groups."""
    if group == 0:
        lane.peaks.store(peak)
        mbarrier.arrive(lane.offered, count=1)
        mbarrier.wait(lane.agreed, turn)
        return lane.peaks.load(peak.type.layout)
    else:
        mbarrier.wait(lane.offered, turn)
        peak = gl.maximum(peak, lane.peaks.load(peak.type.layout))
        lane.peaks.store(peak)
        mbarrier.arrive(lane.agreed, count=1)
        return peak


@gluon.jit
def masked_step(
    rows,
    lane,
    view,
    place,
    units,
    heard,
    group: gl.constexpr,
    dtype: gl.constexpr,
    C: gl.constexpr,
    FIRST: gl.constexpr,
):
    """A block that some rows may see in part or not at all: those that have seen nothing so far take their anchors."""
    HALF: gl.constexpr = C.block_n // GROUPS
    COUNT: gl.constexpr = C.pieces // GROUPS
    mbarrier.wait(lane.scored, rows.phase)
    score = view.masked(lane.s.slice(group * HALF, HALF).load(), place, C, group * HALF)
    peak = greatest(score)
    if FIRST:
        mbarrier.wait(lane.heard, heard)  # O of the tile before, its anchors and its sums are out
    else:
        peak = gl.where(rows.peak == float("-inf"), peak, rows.peak)
    peak = agree(lane, peak, rows.turn, group)
    base = gl.where(peak == float("-inf"), 0.0, peak) if C.windowed else peak
    unit = units.of_rows(base)
    shift = -base * unit
    norm = None if FIRST else rows.norm
    scores = pieces_of(score, COUNT)
    for i in gl.static_range(COUNT):
        part = publish(lane, scores[i], unit, shift, group, i, dtype, C)
        norm = part if norm is None else add2(norm, part)
    return Anchored(peak, unit, shift, norm, rows.phase ^ 1, rows.turn ^ 1)


@gluon.jit
def tell(lane, rows, group: gl.constexpr, C: gl.constexpr):
    """Anchors and sums [128] to correction. The phase of the barrier at which the group waits for the other."""
    norm = gl.sum(rows.norm, 1)
    if group == 0:
        lane.norms.store(norm)
        mbarrier.arrive(lane.offered, count=1)
        return rows.turn
    else:
        mbarrier.wait(lane.offered, rows.turn)
        lane.norms.store(norm + lane.norms.load(norm.type.layout))
        if C.windowed:  # rows that saw nothing before the bulk
            lane.peaks.store(gl.where(rows.peak == float("-inf"), 0.0, rows.peak))
        mbarrier.arrive(lane.ended, count=1)
        return rows.turn ^ 1


@gluon.jit
def exponentiate(lane, view, skip, units, phases, heard, group: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """All blocks that a lane has of a tile; the phases of `scored` and of the other group's barrier after it."""
    place = view.tile.kv_end - 1 - skip
    none = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, lane.s.get_reg_layout()))
    rows = Anchored(none, none, none, none, phases[0], phases[1])
    rows = masked_step(rows, lane, view, place, units, heard, group, dtype, C, True)
    low, high = view.unmasked(C)
    place -= 1
    if C.windowed:
        for _ in range(gl.maximum(place - high + 1, 0)):
            rows = masked_step(rows, lane, view, place, units, heard, group, dtype, C, False)
            place -= 1
    for _ in range(gl.maximum(place - low + 1, 0)):
        rows = next_step(rows, lane, group, dtype, C)
        place -= 1
    if C.left:
        for _ in range(gl.maximum(place - view.tile.kv_begin + 1, 0)):
            rows = masked_step(rows, lane, view, place, units, heard, group, dtype, C, False)
            place -= 1
    return rows.phase, tell(lane, rows, group, C)


@gluon.jit
def anchored_role(part: gl.constexpr, group: gl.constexpr, source, lane, scales, dtype: gl.constexpr, C: gl.constexpr):
    walk = start_walk(source)
    phases, heard = (gl.to_tensor(0), gl.to_tensor(0)), gl.to_tensor(1)
    rows_layout: gl.constexpr = gl.SliceLayout(1, lane.s.get_reg_layout())
    while walk.more:
        tile, span = walk.tile, walk.span
        if has_rows(tile, span, part, C):
            units = scales.of_tile(tile, rows_layout, C)
            view = View(source.schedule, tile, span, first_row(tile, part, C), source.left, source.right)
            skip = skipped(source, tile, span, part, C)
            phases = exponentiate(lane, view, skip, units, phases, heard, group, dtype, C)
            heard = heard ^ 1
        walk = walk.next()
