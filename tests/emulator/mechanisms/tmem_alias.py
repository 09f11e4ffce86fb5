"""P in bf16 over S in fp32, in the same columns of tensor memory: the inner loop of attention on Blackwell.

    load     q ← Q tile · ring ← K, V, K, V …
    mma      wait q, o_empty · for each step: S = q · Kᵀ, commit s_full · wait p_full, O += P · V · commit o_full
    softmax  wait s_full: S → registers · P = bf16(scale · S) → over S · arrive p_full
    default  wait o_full: O → registers · arrive o_empty · registers → out

    columns   0            16           32                      64
              |<----------------- S, fp32 ---------------------->|      [ROWS, KEYS = 64]
              |<------- P, bf16, two to a column ->|                    [ROWS, KEYS] over columns 0 to 31

The next S may be issued while P · V still reads P: products of one issuing role run in their order. `p_full` also says
that S has been read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from jaggedtensor.kernels.shared.dsl import reinterpret
from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import attention_operands

ROWS, KEYS, DIM = 128, 64, 32


@gluon.jit
def load_role(q_desc, k_desc, v_desc, starts, tiles, q, q_full, q_empty, ring, full, empty):
    ROWS: gl.constexpr = q_desc.block_shape[0]
    KEYS: gl.constexpr = k_desc.block_shape[0]
    STAGES: gl.constexpr = ring.shape[0]
    q_phase = 1
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        if first < end:
            mbarrier.wait(q_empty, q_phase)
            q_phase = q_phase ^ 1
            mbarrier.expect(q_full, q_desc.nbytes_per_cta)
            tma.async_load(q_desc, [tile * ROWS, 0], q_full, q)
        for block in range(first, end):
            s = step % STAGES
            mbarrier.wait(empty.index(s), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(s), k_desc.nbytes_per_cta)
            tma.async_load(k_desc, [block * KEYS, 0], full.index(s), ring.index(s))
            t = (step + 1) % STAGES
            mbarrier.wait(empty.index(t), ((step + 1) // STAGES + 1) & 1)
            mbarrier.expect(full.index(t), v_desc.nbytes_per_cta)
            tma.async_load(v_desc, [block * KEYS, 0], full.index(t), ring.index(t))
            step += 2


@gluon.jit
def p_over(s_tmem):
    """P's view of S's columns."""
    ROWS: gl.constexpr = s_tmem.shape[0]
    KEYS: gl.constexpr = s_tmem.shape[1]
    wide: gl.constexpr = TensorMemoryLayout([ROWS, 2 * KEYS], col_stride=1)
    return reinterpret(s_tmem, gl.bfloat16, [ROWS, 2 * KEYS], wide).slice(0, KEYS)


@gluon.jit
def mma_role(starts, tiles, q, q_full, q_empty, ring, full, empty, s_tmem, o_tmem, s_full, p_full, o_full, o_empty):
    STAGES: gl.constexpr = ring.shape[0]
    p_tmem = p_over(s_tmem)
    tile_phase = 0
    s_phase = 0
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        if first < end:
            mbarrier.wait(q_full, tile_phase)
            mbarrier.wait(o_empty, tile_phase ^ 1)
            tile_phase = tile_phase ^ 1
            for block in range(first, end):
                k_slot = step % STAGES
                mbarrier.wait(full.index(k_slot), (step // STAGES) & 1)
                k = ring.index(k_slot).permute((1, 0))
                tcgen05_mma(q, k, s_tmem, use_acc=False, mbarriers=[s_full, empty.index(k_slot)])
                v_slot = (step + 1) % STAGES
                mbarrier.wait(full.index(v_slot), ((step + 1) // STAGES) & 1)
                mbarrier.wait(p_full, s_phase)
                s_phase = s_phase ^ 1
                v = ring.index(v_slot)
                tcgen05_mma(p_tmem, v, o_tmem, use_acc=block > first, mbarriers=[empty.index(v_slot)])
                step += 2
            tcgen05_commit(o_full)
            tcgen05_commit(q_empty)


@gluon.jit
def softmax_role(scale, starts, tiles, s_tmem, s_full, p_full):
    p_tmem = p_over(s_tmem)
    p_layout: gl.constexpr = p_tmem.get_reg_layout()
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for _ in range(first, end):
            mbarrier.wait(s_full, phase)
            phase = phase ^ 1
            p = (s_tmem.load() * scale).to(gl.bfloat16)
            p_tmem.store(gl.convert_layout(p, p_layout))
            mbarrier.arrive(p_full)


@gluon.jit
def store_role(out, starts, tiles, o_tmem, o_full, o_empty):
    ROWS: gl.constexpr = o_tmem.shape[0]
    DIM: gl.constexpr = o_tmem.shape[1]
    layout: gl.constexpr = o_tmem.get_reg_layout()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        o = gl.zeros([ROWS, DIM], gl.float32, layout)
        if gl.load(starts + tile) < gl.load(starts + tile + 1):
            mbarrier.wait(o_full, phase)
            phase = phase ^ 1
            o = o_tmem.load(layout)
            mbarrier.arrive(o_empty)
        gl.store(out + (tile * ROWS + rows) * DIM + cols, o)


@gluon.jit
def kernel(q_desc, k_desc, v_desc, out, scale, starts, tiles, STAGES: gl.constexpr):
    """q [tiles · ROWS, DIM], k and v [blocks · KEYS, DIM] bf16; starts [tiles + 1] int32; out [tiles · ROWS, DIM]."""
    ROWS: gl.constexpr = q_desc.block_shape[0]
    DIM: gl.constexpr = q_desc.block_shape[1]
    KEYS: gl.constexpr = k_desc.block_shape[0]
    q = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    s_tmem = allocate_tensor_memory(gl.float32, [ROWS, KEYS], TensorMemoryLayout([ROWS, KEYS], col_stride=1))
    o_tmem = allocate_tensor_memory(gl.float32, [ROWS, DIM], TensorMemoryLayout([ROWS, DIM], col_stride=1))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    q_full = mbarrier.allocate_mbarrier()
    q_empty = mbarrier.allocate_mbarrier()
    s_full = mbarrier.allocate_mbarrier()
    p_full = mbarrier.allocate_mbarrier()
    o_full = mbarrier.allocate_mbarrier()
    o_empty = mbarrier.allocate_mbarrier()
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(s_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(o_full, count=1)
    mbarrier.init(o_empty, count=1)
    gl.warp_specialize(
        [
            (store_role, (out, starts, tiles, o_tmem, o_full, o_empty)),
            (softmax_role, (scale, starts, tiles, s_tmem, s_full, p_full)),
            (
                mma_role,
                (starts, tiles, q, q_full, q_empty, ring, full, empty, s_tmem, o_tmem, s_full, p_full, o_full, o_empty),
            ),
            (load_role, (q_desc, k_desc, v_desc, starts, tiles, q, q_full, q_empty, ring, full, empty)),
        ],
        [4, 1, 1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles whose keys are so many blocks each."""

    def operands(device: str) -> Operands:
        return attention_operands(trips, ROWS, KEYS, DIM, device)

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages}, target="sm100")


CASES = [
    case([0, 1, 2], stages=3),
    case([3, 0, 2, 1], stages=2),
    case([2, 1], stages=8),
    case([2, 0, 4, 1], stages=3, programs=2),
]

BAD = [
    Bad("mma_role: delete mbarrier.wait(p_full, s_phase)", ("race",)),
    Bad("mma_role: delete mbarrier.wait(o_empty, tile_phase ^ 1)", ("race", "deadlock", "lap")),
    Bad("softmax_role: delete mbarrier.wait(s_full, phase)", ("uninitialised", "race")),
    Bad("softmax_role: move up mbarrier.arrive(p_full)", ("race",)),
    Bad("softmax_role: no flip in phase = phase ^ 1", ("race", "deadlock", "lap")),
    Bad("softmax_role: other phase in mbarrier.wait(s_full, phase)", ("uninitialised", "deadlock", "lap")),
    Bad("mma_role: move up tcgen05_commit(o_full)", ("uninitialised", "race")),
    Bad("mma_role: delete mbarrier.wait(q_full, tile_phase)", ("race", "uninitialised")),
]

FAMILY = Family("tmem_alias", CASES, bad=BAD)
