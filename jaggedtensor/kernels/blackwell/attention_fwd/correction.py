"""The roles that let O fade where a peak has grown, and at a tile's end make O and lse of it."""

from jaggedtensor.kernels.blackwell.arithmetic import by_row, folded
from jaggedtensor.kernels.blackwell.attention_fwd.lanes import ROWS, blocks_of, first_row, has_rows, skipped
from jaggedtensor.kernels.blackwell.attention_fwd.units import Units
from jaggedtensor.kernels.blackwell.walk import slot_of, start_walk
from jaggedtensor.kernels.shared.anchor import flag, strays
from jaggedtensor.kernels.shared.dsl import add2, aggregate, fence_async_shared, fma2, gl, gluon, mbarrier, mul2, tma
from jaggedtensor.kernels.shared.epilogue import Results, store_by_pointers, store_statistics
from jaggedtensor.kernels.shared.merge import Parts, store_part, store_part_lse
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Span, Tile

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def fade_output(lane, phase, C: gl.constexpr):
    """O by the factor that softmax has told, if that is not 1 for every row. The phase of `told` after it."""
    PIECE: gl.constexpr = C.fade_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    layout: gl.constexpr = lane.o.slice(0, PIECE).get_reg_layout()
    mbarrier.wait(lane.told, phase)
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
def lse_of(told, units, C: gl.constexpr):
    """Natural log of the sum of exponentials [128], -inf for rows that see nothing."""
    some = told.norm > 0
    total = gl.log2(gl.where(some, told.norm, 1.0))
    if C.boost:
        total -= C.boost
    natural = (told.peak * units.exact + total) * LN_2
    return gl.where(some, natural, float("-inf"))


@gluon.jit
def inverse(norm):
    """1 / norm [128], 0 for rows that see nothing, whose O is 0."""
    some = norm > 0
    return gl.where(some, 1.0 / gl.where(some, norm, 1.0), 0.0)


@aggregate
class Target:
    """What a lane's rows of a tile count for, and where they go: to the results, or as a part of a cut tile to a
    slot."""

    units: Units
    value: gl.tensor | gl.constexpr  # what the tile's values are multiplied by
    results: Results
    parts: Parts
    tile: Tile
    span: Span
    first: gl.tensor  # packed row of the sequence that is row 0 here
    slot: gl.tensor  # -1: to the results
    left: gl.tensor  # the window
    right: gl.tensor

    @gluon.jit
    def row(self, C: gl.constexpr):
        """Row 0 within the tile."""
        return self.first - self.tile.q_block * C.block_m

    @gluon.jit
    def put_piece(self, out, at: gl.constexpr, column: gl.constexpr, staging, C: gl.constexpr):
        """Columns of O [128, PIECE] from `column` on: to the staging buffer, whose column `at` that is, or past it."""
        if C.splits and self.slot >= 0:
            store_part(self.parts, self.slot, out, self.row(C), C, column)
        elif C.tma_store:
            staging.slice(at, out.shape[1], dim=1).store(out.to(staging.dtype))
        else:
            store_by_pointers(self.results, out, self.tile, self.span, self.first, C, column)

    @gluon.jit
    def send(self, staging, C: gl.constexpr, column: gl.constexpr = 0):
        """Columns of O from `column` on, from the staging buffer, by TMA."""
        if C.tma_store and (not C.splits or self.slot < 0):
            fence_async_shared()
            row, head = self.first // C.group, self.tile.head * C.heads
            place = ragged_place(self.span.q_start, self.span.q_count, row, head, column)
            tma.async_store(self.results.desc, place, staging)

    @gluon.jit
    def put_lse(self, lse, C: gl.constexpr):
        if C.splits and self.slot >= 0:
            store_part_lse(self.parts, self.slot, lse, self.row(C), C)
        else:
            store_statistics(self.results, lse, self.tile, self.span, self.first, C)


@gluon.jit
def target_of(walk, part: gl.constexpr, lane, output, scales, C: gl.constexpr):
    layout: gl.constexpr = gl.SliceLayout(1, lane.o.slice(0, C.correction_columns).get_reg_layout())
    units, value = scales.of_tile(walk.tile, layout, C), scales.of_values(walk.tile)
    slot = slot_of(walk) if C.splits else gl.to_tensor(-1)
    first = first_row(walk.tile, part, C)
    source = walk.source
    return Target(
        units, value, output.results, output.parts, walk.tile, walk.span, first, slot, source.left, source.right
    )


@aggregate
class Output:
    """Where all tiles go."""

    results: Results
    parts: Parts
    staging: gl.shared_memory_descriptor  # [buffers, 128, columns]
    flags: gl.tensor | gl.constexpr  # int32 [tiles, 2]: of lanes whose anchors have not done; None without anchors


@gluon.jit
def finish_rows(part: gl.constexpr, lane, told, staging, target, C: gl.constexpr):
    """O and lse of a lane with rows of its own."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    share = inverse(told.norm) * target.value
    if C.tma_store:
        tma.store_wait(part)  # the tile before has left the buffer; lane 0 of this one need not
    for i in gl.static_range(COUNT):
        o = lane.o.slice(i * PIECE, PIECE).load()
        target.put_piece(mul2(o, by_row(share, o)), i * PIECE, i * PIECE, staging, C)
    target.send(staging, C)
    target.put_lse(lse_of(told, target.units, C), C)


@gluon.jit
def finish_streams(lanes, told, both, staging, target, C: gl.constexpr):
    """O and lse of two streams of the same rows; without `both`, the second has seen nothing."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    peak = gl.maximum(told[0].peak, told[1].peak)
    base = gl.where(peak == float("-inf"), 0.0, peak)
    unit = target.units.of_rows(base)
    share0 = gl.exp2((told[0].peak - base) * unit)
    share1 = gl.exp2((told[1].peak - base) * unit)
    norm = told[0].norm * share0 + told[1].norm * share1
    share = inverse(norm) * target.value
    share0, share1 = share0 * share, share1 * share
    if C.tma_store:
        tma.store_wait(0)  # the tile before has left the buffer
    for i in gl.static_range(COUNT):
        o = lanes[0].o.slice(i * PIECE, PIECE).load()
        o = mul2(o, by_row(share0, o))
        if both:
            o = fma2(lanes[1].o.slice(i * PIECE, PIECE).load(), by_row(share1, o), o)
        target.put_piece(o, i * PIECE, i * PIECE, staging, C)
    target.send(staging, C)
    target.put_lse(lse_of(Told(peak, norm), target.units, C), C)


@gluon.jit
def correct_streams_role(source, lanes, output, scales, C: gl.constexpr):
    walk = start_walk(source)
    phase0, phase1, ended = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while walk.more:
        tile, target = walk.tile, target_of(walk, 0, lanes[0], output, scales, C)
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
        finish_streams(lanes, told, steps1 > 0, output.staging.index(0), target, C)
        walk = walk.next()
    tma.store_wait(0)


@gluon.jit
def correct_tiles_role(source, lanes, output, scales, C: gl.constexpr):
    walk = start_walk(source)
    phase0, phase1 = gl.to_tensor(0), gl.to_tensor(0)
    ended0, ended1 = gl.to_tensor(0), gl.to_tensor(0)
    while walk.more:
        tile, span = walk.tile, walk.span
        target = target_of(walk, 0, lanes[0], output, scales, C)
        both = has_rows(tile, span, 1, C)
        mbarrier.arrive(lanes[0].weighted, count=1)
        mbarrier.arrive(lanes[1].weighted, count=1, pred=both)
        skip = skipped(source, tile, span, 0, C)
        for n in range(1, tile.kv_end - tile.kv_begin):
            if n > skip:
                phase0 = fade_output(lanes[0], phase0, C)
            if both:
                phase1 = fade_output(lanes[1], phase1, C)
        told = hear(lanes[0], ended0, C)
        mbarrier.wait(lanes[0].summed, ended0)
        ended0 = ended0 ^ 1
        finish_rows(0, lanes[0], told, output.staging.index(0), target, C)
        if both:
            target = target_of(walk, 1, lanes[1], output, scales, C)
            told = hear(lanes[1], ended1, C)
            mbarrier.wait(lanes[1].summed, ended1)
            ended1 = ended1 ^ 1
            finish_rows(1, lanes[1], told, output.staging.index(1), target, C)
        walk = walk.next()
    tma.store_wait(0)


@gluon.jit
def sees_none(target, layout: gl.constexpr, C: gl.constexpr):
    """Which rows [128] have no key at all, by what is known before any score."""
    span = target.span
    i = (target.first + gl.arange(0, ROWS, layout)) // C.group
    diagonal = i + span.k_count - span.q_count
    none = i >= span.q_count
    if C.right:
        none = none | (diagonal + target.right < 0)
    if C.left:
        none = none | (diagonal - target.left >= span.k_count)
    return none


@gluon.jit
def finish_anchored(part: gl.constexpr, lane, phase, staging, target, C: gl.constexpr):
    """O and lse of a lane with rows of its own, whose O has not faded. Whether it is to be done again."""
    PIECE: gl.constexpr = C.correction_columns
    COUNT: gl.constexpr = C.block_dv // PIECE
    layout: gl.constexpr = gl.SliceLayout(1, lane.o.slice(0, PIECE).get_reg_layout())
    mbarrier.wait(lane.ended, phase)
    told = Told(lane.peaks.load(layout), lane.norms.load(layout))
    share = inverse(told.norm) * target.value
    mbarrier.wait(lane.summed, phase)
    if C.tma_store:
        tma.store_wait(part)
    total = None  # [128, 2]: finite only if all of O is
    for i in gl.static_range(COUNT):
        o = lane.o.slice(i * PIECE, PIECE).load()
        total = folded(o) if total is None else add2(total, folded(o))
        target.put_piece(mul2(o, by_row(share, o)), i * PIECE, i * PIECE, staging, C)
    mbarrier.arrive(lane.heard, count=1)
    target.send(staging, C)
    target.put_lse(lse_of(told, target.units, C), C)
    norm = gl.fma(gl.convert_layout(gl.sum(total, 1), layout, assert_trivial=True), 0.0, told.norm)
    if C.windowed:  # rows that no block showed a key before the bulk have 0 for an anchor, which may be too much
        norm = gl.where((norm >= 0.5) | sees_none(target, layout, C), norm, float("nan"))
    return strays(norm, None, staging.dtype)


@gluon.jit
def finish_tiles_role(source, lanes, output, scales, C: gl.constexpr):
    """Of anchored rows."""
    walk = start_walk(source)
    phase0, phase1 = gl.to_tensor(0), gl.to_tensor(0)
    while walk.more:
        target = target_of(walk, 0, lanes[0], output, scales, C)
        flag(output.flags, walk.here, 0, 2, finish_anchored(0, lanes[0], phase0, output.staging.index(0), target, C))
        phase0 = phase0 ^ 1
        again = 0
        if has_rows(walk.tile, walk.span, 1, C):
            target = target_of(walk, 1, lanes[1], output, scales, C)
            again = finish_anchored(1, lanes[1], phase1, output.staging.index(1), target, C)
            phase1 = phase1 ^ 1
        flag(output.flags, walk.here, 1, 2, again)
        walk = walk.next()
    tma.store_wait(0)


@gluon.jit
def finish_wide(lane, told, staging, target, C: gl.constexpr):
    """O and lse of 128 rows; O by way of two buffers in turn, since one for all of it would take the place of keys."""
    PIECE: gl.constexpr = C.correction_columns
    EACH: gl.constexpr = C.out_columns // PIECE
    SENT: gl.constexpr = C.block_dv // C.out_columns
    share = inverse(told.norm) * target.value
    for i in gl.static_range(SENT):
        buffer = staging.index(i % 2)
        if C.tma_store:
            tma.store_wait(1)  # what was sent from it before has left
        for j in gl.static_range(EACH):
            o = lane.o.slice(i * C.out_columns + j * PIECE, PIECE).load()
            o = mul2(o, by_row(share, o))
            target.put_piece(o, j * PIECE, i * C.out_columns + j * PIECE, buffer, C)
        target.send(buffer, C, i * C.out_columns)
    target.put_lse(lse_of(told, target.units, C), C)


@gluon.jit
def correct_wide_role(source, lanes, output, scales, C: gl.constexpr):
    walk = start_walk(source)
    told = (gl.to_tensor(0), gl.to_tensor(0))
    summed = (gl.to_tensor(0), gl.to_tensor(0))
    ended = gl.to_tensor(0)
    while walk.more:
        tile, target = walk.tile, target_of(walk, 0, lanes[0], output, scales, C)
        count = tile.kv_end - tile.kv_begin
        mbarrier.arrive(lanes[0].weighted, count=1)
        for pair in range(count // 2):
            # Before O fades for a block, the sum of the one before is complete.
            mbarrier.wait(lanes[0].summed, summed[0])
            told1 = fade_output(lanes[1], told[1], C)
            told0, summed1 = told[0], summed[1]
            if 2 * pair + 2 < count:
                mbarrier.wait(lanes[1].summed, summed1)
                summed1 = summed1 ^ 1
                told0 = fade_output(lanes[0], told0, C)
            told, summed = (told0, told1), (summed[0] ^ 1, summed1)
        last = hear(lanes[0], ended, C)
        ended = ended ^ 1
        if count % 2 == 0:
            mbarrier.wait(lanes[1].summed, summed[1])
            summed = (summed[0], summed[1] ^ 1)
        else:
            mbarrier.wait(lanes[0].summed, summed[0])
            summed = (summed[0] ^ 1, summed[1])
        finish_wide(lanes[0], last, output.staging, target, C)
        walk = walk.next()
    tma.store_wait(0)
