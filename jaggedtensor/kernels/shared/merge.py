"""Results of tiles that were cut between CTAs: their parts, each a softmax of its own keys, weighed by their sums of
exponentials and added in the order of the keys, whoever was ready first.

    lse = log(sum exp(lse_p))        O = sum exp(lse_p - lse) O_p
"""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon
from jaggedtensor.kernels.shared.epilogue import store_by_pointers, store_statistics
from jaggedtensor.kernels.shared.walk import Tile, read_span

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)


@aggregate
class Parts:
    """Scratch: a slot for each part, of `block_m` packed rows. None if no tile is cut."""

    out: gl.tensor | gl.constexpr  # fp32 [slots, block_m, Dv]
    lse: gl.tensor | gl.constexpr  # fp32 [slots, block_m]


@gluon.jit
def store_part(parts, slot, out, first, C: gl.constexpr, column: gl.constexpr = 0):
    """O [M, columns] of the rows of a slot from `first` on, and the columns from `column` on."""
    row = slot * C.block_m + first
    at = (row + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))).to(gl.int64) * C.block_dv
    columns = column + gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    gl.store(parts.out + at[:, None] + columns[None, :], out)


@gluon.jit
def store_part_lse(parts, slot, lse, first, C: gl.constexpr):
    """lse [M] of the same rows."""
    gl.store(parts.lse + slot * C.block_m + first + gl.arange(0, lse.shape[0], lse.type.layout), lse)


@gluon.jit
def merge_parts(schedule, merges, parts, results, C: gl.constexpr):
    """One program for some rows of a merge: (sequence, head, q_begin, q_end, slot, parts)."""
    M: gl.constexpr = C.merge_rows
    PROGRAMS: gl.constexpr = C.block_m // C.merge_rows
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    entry = merges + gl.program_id(0) // PROGRAMS * 6
    sequence, head, q_block = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    slot, count = gl.load(entry + 4), gl.load(entry + 5)
    if count > 0:
        inside = gl.program_id(0) % PROGRAMS * M
        row = inside + gl.arange(0, M, gl.SliceLayout(1, layout))
        column = gl.arange(0, C.block_dv, gl.SliceLayout(0, layout))
        peak = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        for p in range(count):
            peak = gl.maximum(peak, gl.load(parts.lse + (slot + p) * C.block_m + row))
        base = gl.where(peak == float("-inf"), 0.0, peak)
        norm = gl.zeros([M], gl.float32, gl.SliceLayout(1, layout))
        out = gl.zeros([M, C.block_dv], gl.float32, layout)
        for p in range(count):
            at = (slot + p) * C.block_m + row
            weight = gl.exp2((gl.load(parts.lse + at) - base) * LOG2E)
            norm += weight
            place = parts.out + at.to(gl.int64)[:, None] * C.block_dv + column[None, :]
            out += gl.expand_dims(weight, 1) * gl.load(place)
        some = norm > 0
        norm = gl.where(some, norm, 1.0)
        lse = gl.where(some, base + gl.log2(norm) / LOG2E, float("-inf"))
        tile = Tile(sequence, head, q_block, slot, slot)
        span, first = read_span(schedule, sequence), q_block * C.block_m + inside
        store_by_pointers(results, out / gl.expand_dims(norm, 1), tile, span, first, C)
        store_statistics(results, lse, tile, span, first, C)
