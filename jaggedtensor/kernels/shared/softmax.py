"""The online softmax in registers (Milakov and Gimelshein 2018; Dao et al. 2022), one block of scores after another.

Probabilities are 2 ** (score * unit - peak * unit), one fused multiply-add and one exponential each. The product with
the score is exact there, the one with the peak is rounded: what they differ by is the same factor for a whole row, and
divided out. It grows with the scores; where a row's peak passes `STEEP` log2 units, one unit in a score's last place is
8 of them or more, and the nearest power of two as the unit makes both products exact, and changes less than the scores
were rounded by.
"""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon

# Of four values: themselves. A sum of probabilities is never that large (where it is, a profiler's counter is told so),
# but ptxas cannot know: that it is not negative, it does.
SETTLE: gl.constexpr = gl.constexpr(
    """{
    .reg .pred never;
    .reg .f32 sum, other;
    add.f32 sum, $4, $5;
    add.f32 other, $6, $7;
    add.f32 sum, sum, other;
    setp.gt.f32 never, sum, 0f7f000000;
    @never pmevent 0;
    mov.b32 $0, $4;
    mov.b32 $1, $5;
    mov.b32 $2, $6;
    mov.b32 $3, $7;
    }"""
)
LOG2: gl.constexpr = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")  # within 2 ** -22
STEEP: gl.constexpr = gl.constexpr(1 << 27)  # 2 ** (a rounding of it) is at most 2 ** 8, in the range of fp16


ANCHORING: gl.constexpr = gl.constexpr(32)  # columns that an anchor is the maximum of; in fp16, of small range, all


@aggregate
class Rows:
    """What is known of M rows so far."""

    peak: gl.tensor  # [M]: largest raw score
    norm: gl.tensor  # [M, 8]: sums of probabilities, by column modulo 8, so that they stay within a thread


@aggregate
class Scale:
    """Raw scores to log2 units: both factors positive."""

    exact: gl.tensor
    coarse: gl.tensor  # the power of two nearest to it

    @gluon.jit
    def of_rows(self, base):
        """[M]: the unit of rows with these peaks."""
        return gl.where(gl.abs(base * self.exact) < STEEP, self.exact, self.coarse)


@gluon.jit
def sums_by_thread(p):
    """[M, N] to [M, 8]; a thread holds columns 2t and 2t + 1 modulo 8 of an MMA's result."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def within(score, count):
    """Scores [M, N], -inf past the first `count` columns.

    A column is one of eight, which a thread knows, in a group whose number the compiler does: one comparison each.
    """
    M: gl.constexpr = score.shape[0]
    x = score.reshape([M, score.shape[1] // 8, 8])
    layout: gl.constexpr = x.type.layout
    left = count - gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    group = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    seen = (group * 8)[None, :, None] < left[None, None, :]
    return gl.convert_layout(
        gl.where(seen, x, float("-inf")).reshape(score.shape), score.type.layout, assert_trivial=True
    )


@gluon.jit
def log2(x):
    """In one instruction, for lse: as exact as a sum of rounded probabilities is."""
    return gl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def probabilities(score, peak, scale, BLIND: gl.constexpr):
    """exp of scores less their row's peak [M], that peak and the unit [M]. BLIND: rows may have seen nothing so far."""
    base = gl.where(peak == float("-inf"), 0.0, peak) if BLIND else peak
    unit = scale.of_rows(base)
    return gl.exp2(gl.fma(score, gl.expand_dims(unit, 1), gl.expand_dims(-base * unit, 1))), base, unit


@gluon.jit
def first_block(score, scale, BLIND: gl.constexpr):
    """Probabilities [M, N] of the first block, and the rows."""
    peak = gl.max(score, 1)
    p, _, _ = probabilities(score, peak, scale, BLIND)
    return p, Rows(peak, sums_by_thread(p))


@gluon.jit
def next_block(rows, score, scale, BLIND: gl.constexpr):
    """Probabilities [M, N] of a further block, by what all earlier sums must be multiplied [M], and the rows."""
    peak = gl.maximum(rows.peak, gl.max(score, 1))
    p, base, unit = probabilities(score, peak, scale, BLIND)
    fade = gl.exp2((rows.peak - base) * unit)  # a peak of -inf fades to 0
    part: gl.constexpr = gl.SliceLayout(1, rows.norm.type.layout)
    kept = gl.expand_dims(gl.convert_layout(fade, part, assert_trivial=True), 1)
    return p, fade, Rows(peak, rows.norm * kept + sums_by_thread(p))


@gluon.jit
def first_columns(x, WIDTH: gl.constexpr):
    """The first columns of x [M, N], N a power of two times as many: a thread has the same part of each."""
    if x.shape[1] > WIDTH:
        low, _ = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        found = first_columns(low, WIDTH)
    else:
        found = x
    return found


@gluon.jit
def anchoring_block(score, dtype: gl.constexpr, scale, BLIND: gl.constexpr):
    """Probabilities [M, N] of the first block against its first columns' peak, and the rows; see `shared.anchor`."""
    WIDTH: gl.constexpr = score.shape[1] if dtype == gl.float16 else ANCHORING
    peak = gl.max(first_columns(score, WIDTH), 1)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, score.type.layout), assert_trivial=True)
    p, _, _ = probabilities(score, peak, scale, BLIND)
    return p, Rows(peak, sums_by_thread(p))


@gluon.jit
def anchored_block(rows, score, scale, BLIND: gl.constexpr):
    """Probabilities [M, N] of a further block against the peak that the rows have already, and the rows; see
    `shared.anchor`."""
    p, _, _ = probabilities(score, rows.peak, scale, BLIND)
    return p, Rows(rows.peak, rows.norm + sums_by_thread(p))


@gluon.jit
def settled(rows):
    """The rows, and a place in the program at which all their probabilities have been computed.

    ptxas moves the wait for a product up to where nothing depends on it yet, in front of exponentials that were to run
    beside the product. It moves nothing past an instruction that has an effect, as one that needs all sums may have.
    """
    norm = gl.inline_asm_elementwise(
        SETTLE, "=f,=f,=f,=f,f,f,f,f", [rows.norm], dtype=gl.float32, is_pure=False, pack=4
    )
    return Rows(rows.peak, norm)
