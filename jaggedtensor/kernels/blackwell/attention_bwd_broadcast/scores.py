"""Scores of the backward kernel of a broadcast query: S and dP of a block, from which compute roles make P and dS."""

from jaggedtensor.kernels.blackwell.arithmetic import halves as halves_of
from jaggedtensor.kernels.blackwell.backward import HALF, PIECE, ROWS
from jaggedtensor.kernels.shared.arithmetic import at_most, rounded
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    reinterpret,
    sub2,
    tensor_memory_descriptor,
)
from jaggedtensor.kernels.shared.pipeline import new_barriers


@aggregate
class Scores:
    """S and dP of a block, transposed: [N, 128] fp32 each."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor
    ds: gl.shared_memory_descriptor  # [N, 128]
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    graded: gl.shared_memory_descriptor
    differed: gl.shared_memory_descriptor

    @gluon.jit
    def low(self, wide, part: gl.constexpr):
        """[N, 64] in low precision over the left of a compute role's half of S or dP: its P or dS."""
        layout: gl.constexpr = TensorMemoryLayout([wide.shape[0], 2 * ROWS], col_stride=1)
        whole = reinterpret(wide, self.ds.dtype, [wide.shape[0], 2 * ROWS], layout)
        return whole.slice(part * ROWS, HALF)


@gluon.jit
def make_scores(dtype: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([C.block_n, ROWS], col_stride=1)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, ROWS], dtype)
    return Scores(
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        gl.allocate_shared_memory(dtype, [C.block_n, ROWS], ds_layout),
        new_barriers(1, 1).index(0),
        new_barriers(1, 2).index(0),
        new_barriers(1, 1).index(0),
        new_barriers(1, 2).index(0),
    )


@gluon.jit
def write_weights_of(s, part: gl.constexpr, piece: gl.constexpr, scores, shifts, scale_log2):
    """P of a piece of S [N, 32]."""
    shift = shifts.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(at_most(fma2(s, scale_log2, gl.expand_dims(shift, 0)), 0.0))
    target = scores.low(scores.s, part).slice(piece * PIECE, PIECE)
    target.store(gl.convert_layout(p.to(target.dtype), target.get_reg_layout(), assert_trivial=True))
    return p


@gluon.jit
def write_weights(part: gl.constexpr, scores, shifts, scale_log2):
    """P of a role's half of a block, published: two fp32 [N, 32]."""
    left, right = halves_of(scores.s.slice(part * HALF, HALF).load())
    weights = (
        write_weights_of(left, part, 0, scores, shifts, scale_log2),
        write_weights_of(right, part, 1, scores, shifts, scale_log2),
    )
    mbarrier.arrive(scores.weighted, count=1)
    return weights


@gluon.jit
def write_differences_of(p, dp, part: gl.constexpr, piece: gl.constexpr, scores, deltas):
    """dS of a piece of P and dP, to shared memory and over dP."""
    delta = deltas.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, dp.type.layout))
    ds = rounded(mul2(p, sub2(dp, gl.expand_dims(delta, 0))), scores.ds.dtype)
    target = scores.low(scores.dp, part).slice(piece * PIECE, PIECE)
    target.store(gl.convert_layout(ds, target.get_reg_layout(), assert_trivial=True))
    scores.ds.slice(part * HALF + piece * PIECE, PIECE, dim=1).store(ds)


@gluon.jit
def write_differences(part: gl.constexpr, scores, weights, deltas):
    """dS of a role's half of a block, published."""
    left, right = halves_of(scores.dp.slice(part * HALF, HALF).load())
    write_differences_of(weights[0], left, part, 0, scores, deltas)
    write_differences_of(weights[1], right, part, 1, scores, deltas)
    fence_async_shared()
    mbarrier.arrive(scores.differed, count=1)
