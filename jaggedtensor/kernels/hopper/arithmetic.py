"""What both backward kernels do with rings, scores and operands."""

from triton.language.core import PropagateNan

from jaggedtensor.kernels.shared.dsl import gl, gluon
from jaggedtensor.kernels.shared.pipeline import Counter

KEEP_NAN: gl.constexpr = gl.constexpr(PropagateNan.ALL)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LARGEST_HALF: gl.constexpr = gl.constexpr(65504.0)


@gluon.jit
def by_turn(channel, turn):
    """Where number `turn` of all that passes is in a ring whose depth is a power of two: one number for many rings."""
    return Counter(turn & (channel.depth - 1), (turn & channel.depth) // channel.depth, channel.depth)


@gluon.jit
def at_most(x, most):
    """The lesser, and NaN if x is."""
    return gl.minimum(x, most, propagate_nan=KEEP_NAN)


@gluon.jit
def rounded(ds, dtype: gl.constexpr):
    """dS in the dtype of the operands. Of a key past the end it must not be inf in fp16, since inf * 0 is NaN."""
    if dtype == gl.float16:
        ds = at_most(-at_most(-ds, LARGEST_HALF), LARGEST_HALF)
    return ds.to(dtype)


@gluon.jit
def as_operand(x, acc):
    """The left operand of the product that goes to `acc`: no data moves."""
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(x, layout, assert_trivial=True)
