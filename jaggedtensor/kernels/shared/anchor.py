"""Softmax against an anchor, and flags of the tiles for which that was too little.

A row's anchor is the largest score of its tile's first block of keys, or of some columns of it; it stays, so that no
further block has a maximum to look for nor sums to fade (a maximum taken beforehand and a recomputation where it does
not do: FlashDecoding++, Hong et al. 2023; here it is the row's own). Floating point has the same relative precision at
any magnitude: nothing is lost while all sums stay in range, which the row sums say when the tile ends. Where one does
not, the tile's flag is set, and a second launch of the kernel that follows the maximum does the flagged tiles again. No
flag needs to be cleared.

    first launch, each part of each tile:    flag(flags, place, part, PARTS, strays(norm, acc, dtype))
                  or each of its warps:      flag(flags, place, warps, PARTS, by_warp(strayed(norm, dtype), acc))
    second launch, once:                     any_flagged(flags, begin, end, PARTS)   there may be nothing to do
                   each role, each tile:     is_flagged(flags, place, PARTS)

`place` is the tile's in the schedule, `flags` int32 [tiles, PARTS]. Warps have flags of their own where they would have
to wait for each other.
"""

from jaggedtensor.kernels.shared.dsl import gl, gluon

# A sum of positive weights is at least the largest. fp16 holds weights up to 65504; bf16 as much as fp32 does, where a
# sum of weights times values needs room, too.
LIMIT_HALF: gl.constexpr = gl.constexpr(2.0**15)
LIMIT: gl.constexpr = gl.constexpr(2.0**60)
# Of rows that saw no key in the first block, whose anchor is 0 and may be far above their scores: enough for the same
# precision as other sums have, which are at least 1.
LEAST_HALF: gl.constexpr = gl.constexpr(0.5)
LEAST: gl.constexpr = gl.constexpr(2.0**-60)
QUARTERS: gl.constexpr = gl.constexpr(4)  # of rows, one for each warp
AT_ONCE: gl.constexpr = gl.constexpr(512)  # flags


@gluon.jit
def strays(norm, acc, dtype: gl.constexpr, BLIND: gl.constexpr = False):
    """1 if a row sum [M] is past the limit of the weights' dtype or NaN, or a sum in `acc` [M, Dv] is not finite
    (values may be large, too; `acc` is None where they are looked at elsewhere), else 0. BLIND: rows may have seen
    nothing in the first block; a sum that is too small counts, too, and so does that of a row without any key."""
    if acc is not None:
        norm += gl.convert_layout(gl.sum(acc * 0.0, 1), norm.type.layout)
    return gl.max(strayed(norm, dtype, BLIND), 0)


@gluon.jit
def strayed(norm, dtype: gl.constexpr, BLIND: gl.constexpr = False):
    """The same of each row by its sum alone: int32 [M]."""
    most: gl.constexpr = LIMIT_HALF if dtype == gl.float16 else LIMIT
    least: gl.constexpr = LEAST_HALF if dtype == gl.float16 else LEAST
    good = norm <= most
    if BLIND:
        good = good & (norm >= least)
    return gl.where(good, 0, 1)


@gluon.jit
def tainted(a, b):
    """`a`, NaN if `b` is not finite."""
    return gl.fma(b, 0.0, a)


@gluon.jit
def by_warp(bad, acc):
    """1 for each of four warps that has a row which is `bad` (int32 [M]) or whose sums in `acc` [M, Dv] are not finite,
    else 0: int32 [4]. Of an MMA with 64 rows, of which each warp has a quarter."""
    M: gl.constexpr = acc.shape[0]
    sums = gl.reduce(acc.reshape([M, acc.shape[1] // 8, 8]), 1, tainted)  # a thread's own
    bad = gl.convert_layout(bad, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    bad = gl.where(sums * 0.0 == 0.0, bad[:, None], 1)
    return gl.max(bad.reshape([QUARTERS, M * 8 // QUARTERS]), 1)


@gluon.jit
def flag(flags, place, part, PARTS: gl.constexpr, value):
    gl.store(flags + place * PARTS + part, value)


@gluon.jit
def is_flagged(flags, place, PARTS: gl.constexpr):
    """Whether any part of a tile is."""
    found = gl.load(flags + place * PARTS)
    for part in gl.static_range(1, PARTS):
        found |= gl.load(flags + place * PARTS + part)
    return found != 0


@gluon.jit
def any_flagged(flags, begin, end, PARTS: gl.constexpr):
    """Whether any of the tiles begin..end-1 is. By all warps of a kernel, before its roles begin."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([AT_ONCE // (32 * WARPS)], [32], [WARPS], [0])
    at = gl.arange(0, AT_ONCE, layout)
    found = gl.zeros([AT_ONCE], gl.int32, layout)
    for first in range(begin * PARTS, end * PARTS, AT_ONCE):
        found |= gl.load(flags + first + at, mask=first + at < end * PARTS, other=0)
    return gl.max(found, 0) != 0
