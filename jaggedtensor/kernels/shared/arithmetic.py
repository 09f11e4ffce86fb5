"""Arithmetic of scores in backward kernels that keeps an exponential and a rounding finite."""

from triton.language.core import PropagateNan

from jaggedtensor.kernels.shared.dsl import gl, gluon

KEEP_NAN: gl.constexpr = gl.constexpr(PropagateNan.ALL)
LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LARGEST_HALF: gl.constexpr = gl.constexpr(65504.0)


@gluon.jit
def at_most(x, most):
    """The lesser, and NaN if x is."""
    return gl.minimum(x, most, propagate_nan=KEEP_NAN)


@gluon.jit
def rounded(ds, dtype: gl.constexpr):
    """dS in the dtype of the operands. Of a key past the end it must not be inf in fp16, since inf * 0 is NaN."""
    if dtype == gl.float16:
        ds = at_most(gl.maximum(ds, -LARGEST_HALF, propagate_nan=KEEP_NAN), LARGEST_HALF)
    return ds.to(dtype)
