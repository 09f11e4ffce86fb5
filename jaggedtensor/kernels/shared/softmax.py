"""The online softmax in registers (Milakov and Gimelshein 2018; Dao et al. 2022), one block of scores after another.

Probabilities are 2 ** (score * unit - peak * unit), one fused multiply-add and one exponential each. The product with
the score is exact there, the one with the peak is rounded: what they differ by is the same factor for a whole row, and
divided out. It grows with the scores; where a row's peak passes `STEEP` log2 units, one unit in a score's last place is
8 of them or more, and the nearest power of two as the unit makes both products exact, and changes less than the scores
were rounded by.
"""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon

# Of four values: themselves. It never happens that a sum of probabilities is negative, but ptxas cannot know.
SETTLE: gl.constexpr = gl.constexpr(
    """{
    .reg .pred never;
    .reg .f32 sum, other;
    add.f32 sum, $4, $5;
    add.f32 other, $6, $7;
    add.f32 sum, sum, other;
    setp.lt.f32 never, sum, 0f00000000;
    @never pmevent 0;
    mov.b32 $0, $4;
    mov.b32 $1, $5;
    mov.b32 $2, $6;
    mov.b32 $3, $7;
    }"""
)
STEEP: gl.constexpr = gl.constexpr(1 << 27)  # 2 ** (a rounding of it) is at most 2 ** 8, in the range of fp16


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
