"""tcgen05 with its first operand in tensor memory, where registers put it.

    default  A block → registers → tensor memory a[t], arrive a_full[t] · … · wait ready, acc → registers → out
    load     b[s] ← B block
    mma      for each step: wait a_full[t] and full[s], acc += a[t] · b[s]ᵀ, commit to both · commit ready

The accumulator is one and has no barrier that says it has been read: the role that reads it also puts the next tile's
A, and only then.
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


@gluon.jit
def load_role(b_desc, starts, tiles, b, full, empty):
    N: gl.constexpr = b_desc.block_shape[0]
    STAGES: gl.constexpr = b.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            s = step % STAGES
            mbarrier.wait(empty.index(s), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(s), b_desc.nbytes_per_cta)
            tma.async_load(b_desc, [block * N, 0], full.index(s), b.index(s))
            step += 1


@gluon.jit
def mma_role(starts, tiles, a, a_full, a_empty, b, full, empty, acc, ready):
    A_STAGES: gl.constexpr = a.shape[0]
    STAGES: gl.constexpr = b.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        if first < end:
            for block in range(first, end):
                s = step % STAGES
                t = step % A_STAGES
                mbarrier.wait(a_full.index(t), (step // A_STAGES) & 1)
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                tcgen05_mma(
                    a.index(t),
                    b.index(s).permute((1, 0)),
                    acc,
                    use_acc=block > first,
                    mbarriers=[a_empty.index(t), empty.index(s)],
                )
                step += 1
            tcgen05_commit(ready)


@gluon.jit
def compute_role(x, out, starts, tiles, a, a_full, a_empty, acc, ready):
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    K: gl.constexpr = a.shape[2]
    A_STAGES: gl.constexpr = a.shape[0]
    a_layout: gl.constexpr = a.index(0).get_reg_layout()
    layout: gl.constexpr = acc.get_reg_layout()
    a_rows = gl.arange(0, M, gl.SliceLayout(1, a_layout))[:, None]
    a_cols = gl.arange(0, K, gl.SliceLayout(0, a_layout))[None, :]
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    step = 0
    ready_phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            t = step % A_STAGES
            value = gl.load(x + (block * M + a_rows) * K + a_cols) * 2
            mbarrier.wait(a_empty.index(t), (step // A_STAGES + 1) & 1)
            a.index(t).store(value.to(gl.bfloat16))
            mbarrier.arrive(a_full.index(t))
            step += 1
        total = gl.zeros([M, N], gl.float32, layout)
        if first < end:
            mbarrier.wait(ready, ready_phase)
            ready_phase = ready_phase ^ 1
            total = acc.load(layout)
        gl.store(out + (tile * M + rows) * N + cols, total)


@gluon.jit
def kernel(x, b_desc, out, starts, tiles, K: gl.constexpr, A_STAGES: gl.constexpr, STAGES: gl.constexpr):
    """x [blocks · M, K] fp32, b [blocks · N, K] bf16; starts [tiles + 1] int32; out [tiles · M, N] fp32 of 2 x · bᵀ."""
    M: gl.constexpr = 128
    N: gl.constexpr = b_desc.block_shape[0]
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    a = allocate_tensor_memory(gl.bfloat16, [A_STAGES, M, K], TensorMemoryLayout([M, K], col_stride=1))
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], col_stride=1))
    a_full = mbarrier.allocate_mbarrier(batch=A_STAGES)
    a_empty = mbarrier.allocate_mbarrier(batch=A_STAGES)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    ready = mbarrier.allocate_mbarrier()
    for t in gl.static_range(A_STAGES):
        mbarrier.init(a_full.index(t), count=1)
        mbarrier.init(a_empty.index(t), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [
            (compute_role, (x, out, starts, tiles, a, a_full, a_empty, acc, ready)),
            (mma_role, (starts, tiles, a, a_full, a_empty, b, full, empty, acc, ready)),
            (load_role, (b_desc, starts, tiles, b, full, empty)),
        ],
        [1, 1],
    )


def case(trips: list[int], stages: tuple[int, int], programs: int = 1) -> Case:
    """Tiles of so many blocks each, with `stages` slots for A in tensor memory and for B in shared memory."""
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        random = torch.Generator().manual_seed(0)
        x = torch.randint(-2, 3, (blocks * M, K), generator=random).float()
        b = torch.randint(-2, 3, (blocks * N, K), generator=random).bfloat16()
        expected = sums_of_tiles(2 * x.view(blocks, M, K) @ b.float().view(blocks, N, K).mT, trips)
        out = torch.full((len(trips) * M, N), float("nan"), device=device)
        args = (x.to(device), tiled(b, N, device), out, starts_of(trips, device), len(trips))
        return Operands(args, {"out": (out, expected.view_as(out))})

    constexprs = {"K": K, "A_STAGES": stages[0], "STAGES": stages[1]}
    return Case(
        f"trips {trips}, stages {stages}, {programs} programs",
        kernel,
        (programs,),
        operands,
        constexprs,
        target="sm100",
    )


CASES = [
    case([0, 1, 2], stages=(2, 3)),
    case([1, 3, 0, 2], stages=(1, 1)),
    case([2, 1], stages=(4, 5)),
    case([2, 0, 5, 1], stages=(2, 3), programs=2),
]

BAD = [
    Bad("mma_role: delete mbarrier.wait(a_full.index(t), (step // A_STAGES) & 1)", ("race", "uninitialised")),
    Bad("mma_role: delete tcgen05_commit(ready)", ("deadlock",)),
    Bad(
        "compute_role: delete mbarrier.wait(a_empty.index(t), (step // A_STAGES + 1) & 1)",
        ("deadlock", "lap", "race", "over-arrival"),
    ),
    Bad("compute_role: move up mbarrier.arrive(a_full.index(t))", ("race", "uninitialised")),
    Bad("compute_role: delete mbarrier.wait(ready, ready_phase)", ("uninitialised", "race")),
    Bad("compute_role: no flip in ready_phase = ready_phase ^ 1", ("race", "lap", "deadlock")),
    Bad("load_role: half the bytes in mbarrier.expect(full.index(s), b_desc.nbytes_per_cta)", ("wrong bytes",)),
    Bad("A is always put into the first slot", ("uninitialised", "race"), ("a.index(t).store(", "a.index(0).store(")),
]

FAMILY = Family("tcgen05_tensor", CASES, bad=BAD)
