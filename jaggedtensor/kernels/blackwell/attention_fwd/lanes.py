"""A lane: scores, weights and output of 128 rows in tensor memory, and the barriers between those who work on it."""

from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tensor_memory_descriptor,
)

ROWS: gl.constexpr = gl.constexpr(128)  # of a lane: what one tcgen05.mma takes
GROUPS: gl.constexpr = gl.constexpr(2)  # of four warps that share a lane where rows are anchored, half of its keys each


@aggregate
class Lane:
    s: tensor_memory_descriptor  # [128, N] fp32
    o: tensor_memory_descriptor  # [128, Dv] fp32
    peaks: gl.shared_memory_descriptor  # [128] fp32
    norms: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    weighted: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor | gl.constexpr  # None where P is published whole
    told: gl.shared_memory_descriptor | gl.constexpr  # None where O never fades
    ended: gl.shared_memory_descriptor
    heard: gl.shared_memory_descriptor
    summed: gl.shared_memory_descriptor
    offered: gl.shared_memory_descriptor | gl.constexpr  # of the groups of an anchored lane, else None
    agreed: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def weights(self, dtype: gl.constexpr):
        """P [128, N], over the left half of S, or of 8 bits over the left quarter."""
        WIDE: gl.constexpr = self.s.shape[1] * 32 // dtype.primitive_bitwidth
        layout: gl.constexpr = TensorMemoryLayout([ROWS, WIDE], col_stride=1)
        return reinterpret(self.s, dtype, [ROWS, WIDE], layout).slice(0, self.s.shape[1])

    @gluon.jit
    def half(self, group: gl.constexpr, dtype: gl.constexpr):
        """The half of P [128, N / 2] that a group of warps makes, over the left half of its own half of S."""
        N: gl.constexpr = self.s.shape[1]
        layout: gl.constexpr = TensorMemoryLayout([ROWS, 2 * N], col_stride=1)
        return reinterpret(self.s, dtype, [ROWS, 2 * N], layout).slice(group * N, N // GROUPS)

    @gluon.jit
    def factor(self):
        """[128, 1] fp32: what O must be multiplied by, over the column of S behind P."""
        layout: gl.constexpr = TensorMemoryLayout([ROWS, 1], col_stride=1)
        return reinterpret(self.s, gl.float32, [ROWS, self.s.shape[1]], layout).slice(self.s.shape[1] // 2, 1)


@gluon.jit
def new_barrier(count: gl.constexpr):
    barrier = mbarrier.allocate_mbarrier()
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def make_lanes(C: gl.constexpr):
    """Two lanes, each with its O, or both with the same."""
    o_layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_dv], col_stride=1)
    o = allocate_tensor_memory(gl.float32, [ROWS, C.block_dv], o_layout)
    other = o if C.wide else allocate_tensor_memory(gl.float32, [ROWS, C.block_dv], o_layout)
    return make_lane(o, C), make_lane(other, C)


@gluon.jit
def make_lane(o, C: gl.constexpr):
    s_layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_n], col_stride=1)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Lane(
        allocate_tensor_memory(gl.float32, [ROWS, C.block_n], s_layout),
        o,
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [ROWS], plain),
        new_barrier(1),
        new_barrier(2),
        new_barrier(GROUPS if C.anchored else 1) if C.early else None,
        None if C.anchored else new_barrier(1),
        new_barrier(1),
        new_barrier(1),
        new_barrier(1),
        new_barrier(1) if C.anchored else None,
        new_barrier(1) if C.anchored else None,
    )


@gluon.jit
def first_row(tile, part: gl.constexpr, C: gl.constexpr):
    """The packed row of a tile's sequence that is a lane's row 0."""
    return tile.q_block * C.block_m + (part * ROWS if C.q_parts == 2 else 0)


@gluon.jit
def has_rows(tile, span, part: gl.constexpr, C: gl.constexpr):
    """Whether a lane has anything to do in a tile."""
    return first_row(tile, part, C) < span.q_count * C.group


@gluon.jit
def blocks_of(tile, part: gl.constexpr, C: gl.constexpr):
    """How many blocks of a tile a lane has."""
    count = tile.kv_end - tile.kv_begin
    return count if C.q_parts == 2 else (count + 1 - part) // 2


@gluon.jit
def skipped(source, tile, span, part: gl.constexpr, C: gl.constexpr):
    """How many of a tile's last blocks the rows of a lane do not see, though those of the other do: leaves it one."""
    if C.skips and part == 0:
        last = gl.minimum((first_row(tile, part, C) + ROWS - 1) // C.group, span.q_count - 1)
        end = last + span.k_count - span.q_count + source.right + 1  # of the keys that they see
        blocks = (gl.maximum(end, 0) + C.block_n - 1) // C.block_n
        return tile.kv_end - gl.maximum(gl.minimum(blocks, tile.kv_end), tile.kv_begin + 1)
    else:
        return 0
