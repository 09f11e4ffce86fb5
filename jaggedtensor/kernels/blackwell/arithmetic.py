"""Arithmetic of rows that a thread holds whole, as tensor memory gives them: packed in pairs, nothing moves."""

from triton.language.core import PropagateNan

from jaggedtensor.kernels.shared.dsl import add2, fma2, gl, gluon, mul2, sub2

KEEP_NAN: gl.constexpr = gl.constexpr(PropagateNan.ALL)
MAX3: gl.constexpr = gl.constexpr("max.f32 $0, $1, $2, $3;")
ROUNDER: gl.constexpr = gl.constexpr(12582912.0 + 127)  # 1.5 * 2 ** 23: a sum has no fraction, and the exponent's bias
# 2 ** x for |x| <= 1/2 is about 1 + x * (C1 + x * (C2 + x * (C3 + x * C4))), to a relative 2.9e-6. With one less,
# 1.0e-4, lse would be less exact than scores in low precision make it.
C1: gl.constexpr = gl.constexpr(0.6931241930159827)
C2: gl.constexpr = gl.constexpr(0.24024098608279443)
C3: gl.constexpr = gl.constexpr(0.05590642810376715)
C4: gl.constexpr = gl.constexpr(0.009582854427064484)


@gluon.jit
def halves(x):
    """[M, N] to two of [M, N / 2]."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def joined(left, right):
    """What `halves` took apart."""
    return gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def pieces_of(x, n: gl.constexpr):
    """[M, N] to a tuple of n (a power of two) of [M, N / n], from left to right."""
    if n == 1:
        return (x,)
    else:
        left, right = halves(x)
        return pieces_of(left, n // 2) + pieces_of(right, n // 2)


@gluon.jit
def folded(x):
    """[M, N] to [M, 2]: sums by column modulo 2."""
    if x.shape[1] == 2:
        return x
    else:
        left, right = halves(x)
        return folded(add2(left, right))


@gluon.jit
def max3(a, b, c):
    """The greatest of three, in one instruction (PTX ISA 8.8, "max", for SM100): a number rather than NaN."""
    return gl.inline_asm_elementwise(MAX3, "=f,f,f,f", [a, b, c], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def greatest(x):
    """[M, N] to [M] in N / 2 instructions, of three operands each."""
    left, right = halves(x)
    return gl.convert_layout(greater(left, right), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def greater(a, b):
    """[M, N] twice to [M]."""
    if a.shape[1] == 1:
        return gl.max(gl.maximum(a, b), 1)
    else:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        return greater(max3(a0, a1, b0), b1)


@gluon.jit
def exp2_by_polynomial(x):
    """2 ** x without the special function unit, for x below 127: to a relative 3e-6, and 2 ** -125 for all below.

    The integer part goes to the exponent, a polynomial of the rest to the fraction (Cody and Waite 1980). NaN stays.
    """
    x = gl.maximum(x, -125.0, propagate_nan=KEEP_NAN)
    rounded = add2(x, ROUNDER)
    rest = sub2(x, sub2(rounded, ROUNDER))
    power = (rounded.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
    y = fma2(rest, C4, C3)
    y = fma2(y, rest, C2)
    y = fma2(y, rest, C1)
    y = fma2(y, rest, 1.0)
    return mul2(y, power)


@gluon.jit
def by_row(x, like):
    """[M] as a column for a block [M, N]: no data moves."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True), 1)
