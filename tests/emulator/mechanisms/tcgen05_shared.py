"""tcgen05 with both operands in shared memory; two accumulators in tensor memory take turns.

    load     wait empty[s] · expect full[s] · A and B → slot s
    mma      wait done[t] · for each step: wait full[s], acc[t] += a[s] · b[s]ᵀ, commit empty[s] · commit ready[t]
    default  wait ready[t] · acc[t] → registers · arrive done[t] · registers → out

So the product of the next tile runs while this one is read. A tile without steps has no product and stores zeros.
"""

from __future__ import annotations

import torch
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

from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import starts_of, sums_of_tiles, tiled

M, N, K = 128, 32, 32
ACCUMULATORS = gl.constexpr(2)


@gluon.jit
def load_role(a_desc, b_desc, starts, tiles, a, b, full, empty):
    M: gl.constexpr = a_desc.block_shape[0]
    N: gl.constexpr = b_desc.block_shape[0]
    STAGES: gl.constexpr = a.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            s = step % STAGES
            mbarrier.wait(empty.index(s), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(s), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
            tma.async_load(a_desc, [block * M, 0], full.index(s), a.index(s))
            tma.async_load(b_desc, [block * N, 0], full.index(s), b.index(s))
            step += 1


@gluon.jit
def mma_role(starts, tiles, a, b, full, empty, acc, ready, done):
    STAGES: gl.constexpr = a.shape[0]
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        if first < end:
            t = turn % ACCUMULATORS
            mbarrier.wait(done.index(t), (turn // ACCUMULATORS + 1) & 1)
            for block in range(first, end):
                s = step % STAGES
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                tcgen05_mma(
                    a.index(s),
                    b.index(s).permute((1, 0)),
                    acc.index(t),
                    use_acc=block > first,
                    mbarriers=[empty.index(s)],
                )
                step += 1
            tcgen05_commit(ready.index(t))
            turn += 1


@gluon.jit
def store_role(out, starts, tiles, acc, ready, done):
    M: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, N], [32, 1], [4, 1], [1, 0])
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        value = gl.zeros([M, N], gl.float32, layout)
        if gl.load(starts + tile) < gl.load(starts + tile + 1):
            t = turn % ACCUMULATORS
            mbarrier.wait(ready.index(t), (turn // ACCUMULATORS) & 1)
            value = gl.convert_layout(acc.index(t).load(), layout)
            mbarrier.arrive(done.index(t))
            turn += 1
        gl.store(out + (tile * M + rows) * N + cols, value)


@gluon.jit
def kernel(a_desc, b_desc, out, starts, tiles, STAGES: gl.constexpr):
    """a [blocks · M, K], b [blocks · N, K] bf16; starts [tiles + 1] int32, in blocks; out [tiles · M, N] fp32."""
    M: gl.constexpr = a_desc.block_shape[0]
    N: gl.constexpr = b_desc.block_shape[0]
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [ACCUMULATORS, M, N], TensorMemoryLayout([M, N], col_stride=1))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    ready = mbarrier.allocate_mbarrier(batch=ACCUMULATORS)
    done = mbarrier.allocate_mbarrier(batch=ACCUMULATORS)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for t in gl.static_range(ACCUMULATORS):
        mbarrier.init(ready.index(t), count=1)
        mbarrier.init(done.index(t), count=1)
    gl.warp_specialize(
        [
            (store_role, (out, starts, tiles, acc, ready, done)),
            (mma_role, (starts, tiles, a, b, full, empty, acc, ready, done)),
            (load_role, (a_desc, b_desc, starts, tiles, a, b, full, empty)),
        ],
        [1, 1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles of so many blocks each."""
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        random = torch.Generator().manual_seed(0)
        a = torch.randint(-2, 3, (blocks * M, K), generator=random).bfloat16()
        b = torch.randint(-2, 3, (blocks * N, K), generator=random).bfloat16()
        expected = sums_of_tiles(a.float().view(blocks, M, K) @ b.float().view(blocks, N, K).mT, trips)
        out = torch.full((len(trips) * M, N), float("nan"), device=device)
        args = (tiled(a, M, device), tiled(b, N, device), out, starts_of(trips, device), len(trips))
        return Operands(args, {"out": (out, expected.view_as(out))})

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages}, target="sm100")


CASES = [
    case([0, 1, 2], stages=2),
    case([1, 3, 0, 2, 1], stages=1),
    case([2, 1], stages=5),
    case([2, 0, 5, 1], stages=3, programs=2),
]

BAD = [
    Bad("mma_role: delete mbarrier.wait(full.index(s), (step // STAGES) & 1)", ("uninitialised", "race")),
    Bad("mma_role: delete mbarrier.wait(done.index(t), (turn // ACCUMULATORS + 1) & 1)", ("race", "deadlock", "lap")),
    Bad("mma_role: delete tcgen05_commit(ready.index(t))", ("deadlock",)),
    Bad("mma_role: move up tcgen05_commit(ready.index(t))", ("uninitialised", "race")),
    Bad("store_role: delete mbarrier.wait(ready.index(t), (turn // ACCUMULATORS) & 1)", ("uninitialised", "race")),
    Bad("store_role: move up mbarrier.arrive(done.index(t))", ("race",)),
    Bad("more bytes are expected", ("wrong bytes",), ("+ b_desc.nbytes_per_cta", "+ 2 * b_desc.nbytes_per_cta")),
    Bad(
        "the bytes of one operand are expected",
        ("wrong bytes", "race", "uninitialised"),
        ("a_desc.nbytes_per_cta + b_desc.nbytes_per_cta", "a_desc.nbytes_per_cta"),
    ),
]

FAMILY = Family("tcgen05_shared", CASES, bad=BAD)
