"""What both backward kernels do with rings, scores and operands."""

from jaggedtensor.kernels.shared.arithmetic import LOG2_E as LOG2_E
from jaggedtensor.kernels.shared.arithmetic import at_most as at_most
from jaggedtensor.kernels.shared.arithmetic import rounded as rounded
from jaggedtensor.kernels.shared.dsl import gl, gluon
from jaggedtensor.kernels.shared.pipeline import Counter


@gluon.jit
def by_turn(channel, turn):
    """Where number `turn` of all that passes is in a ring whose depth is a power of two: one number for many rings."""
    return Counter(turn & (channel.depth - 1), (turn & channel.depth) // channel.depth, channel.depth)


@gluon.jit
def as_operand(x, acc):
    """The left operand of the product that goes to `acc`: no data moves."""
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=acc.type.layout, k_width=2)
    return gl.convert_layout(x, layout, assert_trivial=True)
