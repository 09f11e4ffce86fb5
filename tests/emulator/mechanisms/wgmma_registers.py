"""wgmma with a register operand: O += (scale · Q · Kᵀ) · V, where the product in brackets never leaves registers.

    load     q ← Q tile · ring ← K, V, K, V …
    default  S = q · Kᵀ, wait, release K · P = bf16(scale · S) · O += P · V, wait, release V · … · release q

One ring serves K and V alike; q is a channel of one slot, refilled for each tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import attention_operands

ROWS, KEYS, DIM = 64, 32, 32


@gluon.jit
def load_role(q_desc, k_desc, v_desc, starts, tiles, q, q_full, q_empty, ring, full, empty):
    ROWS: gl.constexpr = q_desc.block_shape[0]
    KEYS: gl.constexpr = k_desc.block_shape[0]
    STAGES: gl.constexpr = ring.shape[0]
    q_phase = 1
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(q_empty, q_phase)
        mbarrier.expect(q_full, q_desc.nbytes_per_cta)
        tma.async_load(q_desc, [tile * ROWS, 0], q_full, q)
        q_phase = q_phase ^ 1
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
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
def attend_role(out, scale, starts, tiles, q, q_full, q_empty, ring, full, empty):
    ROWS: gl.constexpr = q.shape[0]
    DIM: gl.constexpr = q.shape[1]
    KEYS: gl.constexpr = ring.shape[1]
    STAGES: gl.constexpr = ring.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, parent=o_layout, k_width=2)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))[:, None]
    cols = gl.arange(0, DIM, gl.SliceLayout(0, o_layout))[None, :]
    q_phase = 0
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        o = gl.zeros([ROWS, DIM], gl.float32, o_layout)
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        mbarrier.wait(q_full, q_phase)
        q_phase = q_phase ^ 1
        for _ in range(first, end):
            k_slot = step % STAGES
            mbarrier.wait(full.index(k_slot), (step // STAGES) & 1)
            zero = gl.zeros([ROWS, KEYS], gl.float32, s_layout)
            s_token = warpgroup_mma(q, ring.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s_token,))
            mbarrier.arrive(empty.index(k_slot))
            p = gl.convert_layout((s * scale).to(gl.bfloat16), p_layout)
            v_slot = (step + 1) % STAGES
            mbarrier.wait(full.index(v_slot), ((step + 1) // STAGES) & 1)
            o_token = warpgroup_mma(p, ring.index(v_slot), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o_token,))
            mbarrier.arrive(empty.index(v_slot))
            step += 2
        mbarrier.arrive(q_empty)
        gl.store(out + (tile * ROWS + rows) * DIM + cols, o)


@gluon.jit
def kernel(q_desc, k_desc, v_desc, out, scale, starts, tiles, STAGES: gl.constexpr):
    """q [tiles · ROWS, DIM], k and v [blocks · KEYS, DIM] bf16; starts [tiles + 1] int32; out [tiles · ROWS, DIM]."""
    q = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_shape, q_desc.layout)
    ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    q_full = mbarrier.allocate_mbarrier()
    q_empty = mbarrier.allocate_mbarrier()
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (attend_role, (out, scale, starts, tiles, q, q_full, q_empty, ring, full, empty)),
            (load_role, (q_desc, k_desc, v_desc, starts, tiles, q, q_full, q_empty, ring, full, empty)),
        ],
        [1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles whose keys are so many blocks each."""

    def operands(device: str) -> Operands:
        return attention_operands(trips, ROWS, KEYS, DIM, device)

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages})


CASES = [
    case([0, 1, 2], stages=3),
    case([4, 0, 3, 1], stages=2),
    case([2, 1], stages=8),
    case([2, 0, 5, 1], stages=3, programs=2),
]

BAD = [
    Bad("attend_role: delete mbarrier.wait(q_full, q_phase)", ("deadlock", "lap", "race", "uninitialised")),
    Bad("attend_role: delete s = warpgroup_mma_wait(0, deps=(s_token,))", ("accumulator in flight",)),
    Bad("attend_role: one more in warpgroup_mma_wait(0, deps=(o_token,))", ("accumulator in flight", "race")),
    Bad("attend_role: move up mbarrier.arrive(empty.index(k_slot))", ("race",)),
    Bad("attend_role: no flip in q_phase = q_phase ^ 1", ("lap", "deadlock", "over-arrival", "race")),
    Bad("load_role: delete mbarrier.wait(q_empty, q_phase)", ("race", "over-arrival")),
    Bad("load_role: half the bytes in mbarrier.expect(q_full, q_desc.nbytes_per_cta)", ("wrong bytes",)),
    Bad("attend_role: delete mbarrier.arrive(empty.index(v_slot))", ("deadlock",)),
]

FAMILY = Family("wgmma_registers", CASES, bad=BAD)
