"""Products of a pair of CTAs, operands multicast to the other pair of the cluster, barriers shared between CTAs.

    load     wait empty[s] · expect full[s] · A, B → slot s of every CTA (A multicast to the pairs)
    mma      wait done · for each step: wait full[s], acc += a[s] · b[s]ᵀ, commit empty[s] of all that feed it
             commit ready of both                                         (the lead CTA of a pair waits and issues)
    default  wait ready · acc → registers · arrive done of the lead · registers → staging · fence · TMA store

Of an accumulator [256, N] each CTA of a pair holds 128 rows; A is split between the two by rows, B by columns. With
four CTAs the second pair works at the other half of N with the same A. `full` and `done` belong to a pair: both CTAs
arrive on the lead's. `empty` and `ready` are each CTA's own, and products arrive on them from afar.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tma,
)

from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import starts_of, sums_of_tiles, tiled

M, N, K = 256, 32, 32  # of one pair


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
            tma.async_load(a_desc, [block * M, 0], full.index(s), a.index(s), multicast=True)
            tma.async_load(b_desc, [block * N, 0], full.index(s), b.index(s), multicast=True)
            step += 1


@gluon.jit
def mma_role(starts, tiles, a, b, full, empty, acc, ready, done):
    STAGES: gl.constexpr = a.shape[0]
    step = 0
    done_phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        if first < end:
            mbarrier.wait(done, done_phase)
            done_phase = done_phase ^ 1
            for block in range(first, end):
                s = step % STAGES
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                tcgen05_mma(
                    a.index(s),
                    b.index(s).permute((1, 0)),
                    acc,
                    use_acc=block > first,
                    multicast=True,
                    mbarriers=[empty.index(s)],
                )
                step += 1
            tcgen05_commit(ready)


@gluon.jit
def store_role(out_desc, starts, tiles, staging, acc, ready, done):
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.get_reg_layout()
    ready_phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        value = gl.zeros([M, N], gl.float32, layout)
        if gl.load(starts + tile) < gl.load(starts + tile + 1):
            mbarrier.wait(ready, ready_phase)
            ready_phase = ready_phase ^ 1
            value = acc.load(layout)
            mbarrier.arrive(done)
        tma.store_wait(0)
        staging.store(value)
        fence_async_shared()
        tma.async_store(out_desc, [tile * M, 0], staging)
    tma.store_wait(0)


@gluon.jit
def kernel(a_desc, b_desc, out_desc, starts, tiles, ACC: gl.constexpr, STAGES: gl.constexpr):
    """a [blocks · M, K], b [blocks · N, K] bf16; starts [tiles + 1] int32, in blocks; out [tiles · M, N] fp32.

    ACC is the accumulator's layout; N is that of the cluster.
    """
    M: gl.constexpr = a_desc.block_shape[0]
    N: gl.constexpr = b_desc.block_shape[0]
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, out_desc.block_shape, out_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [M, N], ACC)
    full = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    ready = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier(two_ctas=True)
    b_operand = b.index(0).permute((1, 0))
    releases: gl.constexpr = tcgen05_mma_barrier_count([a.index(0), b_operand], multicast=True, two_ctas=True)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=releases)
    mbarrier.init(ready, count=1)
    mbarrier.init(done, count=1)
    gl.warp_specialize(
        [
            (store_role, (out_desc, starts, tiles, staging, acc, ready, done)),
            (mma_role, (starts, tiles, a, b, full, empty, acc, ready, done)),
            (load_role, (a_desc, b_desc, starts, tiles, a, b, full, empty)),
        ],
        [1, 1],
    )


def case(trips: list[int], stages: int, ctas: int, programs: int = 1) -> Case:
    """Tiles of so many blocks each, by clusters of 2 or 4 CTAs."""
    blocks, columns = max(1, sum(trips)), N * ctas // 2
    pairs = ctas == 4
    a_split = [[1, 0], [0, 0]] if pairs else [[1, 0]]
    b_split = [[1, 0], [2, 0]] if pairs else [[1, 0]]
    out_split = [[1, 0], [0, 1]] if pairs else [[1, 0]]

    def operands(device: str) -> Operands:
        random = torch.Generator().manual_seed(0)
        a = torch.randint(-2, 3, (blocks * M, K), generator=random).bfloat16()
        b = torch.randint(-2, 3, (blocks * columns, K), generator=random).bfloat16()
        expected = sums_of_tiles(a.float().view(blocks, M, K) @ b.float().view(blocks, columns, K).mT, trips)
        out = torch.full((len(trips) * M, columns), float("nan"), device=device)
        blocks_of_each = ((a, M, a_split), (b, columns, b_split), (out, M, out_split))
        descriptors = (tiled(x, rows, device, split=split) for x, rows, split in blocks_of_each)
        return Operands((*descriptors, starts_of(trips, device), len(trips)), {"out": (out, expected.view_as(out))})

    acc = TensorMemoryLayout((M // 2, N), col_stride=1, cga_layout=out_split, two_ctas=True)
    return Case(
        f"trips {trips}, {stages} stages, {ctas} CTAs, {programs} programs",
        kernel,
        (programs,),
        operands,
        {"ACC": acc, "STAGES": stages},
        num_ctas=ctas,
        target="sm100",
    )


CASES = [
    case([0, 1, 2], stages=2, ctas=2),
    case([3, 1], stages=1, ctas=2),
    case([1, 0, 2, 1], stages=4, ctas=2, programs=2),
    case([0, 1, 3], stages=2, ctas=4),
]

BAD = [
    Bad("mma_role: delete mbarrier.wait(full.index(s), (step // STAGES) & 1)", ("uninitialised", "race")),
    Bad("mma_role: delete mbarrier.wait(done, done_phase)", ("race",)),
    Bad("store_role: delete mbarrier.arrive(done)", ("deadlock",)),
    Bad("store_role: move up mbarrier.arrive(done)", ("race",)),
    Bad("store_role: delete fence_async_shared()", ("missing fence",)),
    Bad("more bytes are expected", ("wrong bytes",), ("+ b_desc.nbytes_per_cta", "+ 2 * b_desc.nbytes_per_cta")),
    Bad(
        "the pair's readers count as one",
        ("lap", "deadlock", "race"),
        ("done = mbarrier.allocate_mbarrier(two_ctas=True)", "done = mbarrier.allocate_mbarrier()"),
    ),
]

FAMILY = Family("two_cta", CASES, bad=BAD)
