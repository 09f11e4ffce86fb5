"""wgmma with both operands in shared memory, two in flight, each slot released as soon as its product is done.

    load     a[s] ← A tile · b[t] ← left half of B tile · b[t+1] ← right half
    default  left += a · b[t], right += a · b[t+1], both issued · wait(1): release b[t] · wait(0): release b[t+1], a[s]

Two rings of different depth, so that their slots and phases drift apart. C = A · B over the steps of a tile, each
step weighted by nothing: every block of A and B is different.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import starts_of, sums_of_tiles, tiled

M, N, K = 64, 32, 32


@gluon.jit
def load_role(a_desc, b_desc, starts, tiles, a, b, a_full, a_empty, b_full, b_empty):
    M: gl.constexpr = a_desc.block_shape[0]
    K: gl.constexpr = a_desc.block_shape[1]
    N: gl.constexpr = b_desc.block_shape[1]
    A_STAGES: gl.constexpr = a.shape[0]
    B_STAGES: gl.constexpr = b.shape[0]
    a_step = 0
    b_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            s = a_step % A_STAGES
            mbarrier.wait(a_empty.index(s), (a_step // A_STAGES + 1) & 1)
            mbarrier.expect(a_full.index(s), a_desc.nbytes_per_cta)
            tma.async_load(a_desc, [block * M, 0], a_full.index(s), a.index(s))
            a_step += 1
            for half in gl.static_range(2):
                t = b_step % B_STAGES
                mbarrier.wait(b_empty.index(t), (b_step // B_STAGES + 1) & 1)
                mbarrier.expect(b_full.index(t), b_desc.nbytes_per_cta)
                tma.async_load(b_desc, [block * K, half * N], b_full.index(t), b.index(t))
                b_step += 1


@gluon.jit
def multiply_role(out, starts, tiles, a, b, a_full, a_empty, b_full, b_empty):
    M: gl.constexpr = a.shape[1]
    N: gl.constexpr = b.shape[2]
    A_STAGES: gl.constexpr = a.shape[0]
    B_STAGES: gl.constexpr = b.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows = gl.arange(0, M, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
    a_step = 0
    b_step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        left = gl.zeros([M, N], gl.float32, layout)
        right = gl.zeros([M, N], gl.float32, layout)
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for _ in range(first, end):
            s = a_step % A_STAGES
            t = b_step % B_STAGES
            u = (b_step + 1) % B_STAGES
            mbarrier.wait(a_full.index(s), (a_step // A_STAGES) & 1)
            mbarrier.wait(b_full.index(t), (b_step // B_STAGES) & 1)
            left_token = warpgroup_mma(a.index(s), b.index(t), left, is_async=True)
            mbarrier.wait(b_full.index(u), ((b_step + 1) // B_STAGES) & 1)
            right_token = warpgroup_mma(a.index(s), b.index(u), right, is_async=True)
            left = warpgroup_mma_wait(1, deps=(left_token,))
            mbarrier.arrive(b_empty.index(t))
            right = warpgroup_mma_wait(0, deps=(right_token,))
            mbarrier.arrive(b_empty.index(u))
            mbarrier.arrive(a_empty.index(s))
            a_step += 1
            b_step += 2
        place = out + (tile * M + rows) * (2 * N) + cols
        gl.store(place, left)
        gl.store(place + N, right)


@gluon.jit
def kernel(a_desc, b_desc, out, starts, tiles, A_STAGES: gl.constexpr, B_STAGES: gl.constexpr):
    """a [blocks · M, K], b [blocks · K, 2 N] bf16; starts [tiles + 1] int32, in blocks; out [tiles · M, 2 N] fp32."""
    a = gl.allocate_shared_memory(a_desc.dtype, [A_STAGES] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [B_STAGES] + b_desc.block_shape, b_desc.layout)
    a_full = mbarrier.allocate_mbarrier(batch=A_STAGES)
    a_empty = mbarrier.allocate_mbarrier(batch=A_STAGES)
    b_full = mbarrier.allocate_mbarrier(batch=B_STAGES)
    b_empty = mbarrier.allocate_mbarrier(batch=B_STAGES)
    for s in gl.static_range(A_STAGES):
        mbarrier.init(a_full.index(s), count=1)
        mbarrier.init(a_empty.index(s), count=1)
    for s in gl.static_range(B_STAGES):
        mbarrier.init(b_full.index(s), count=1)
        mbarrier.init(b_empty.index(s), count=1)
    gl.warp_specialize(
        [
            (multiply_role, (out, starts, tiles, a, b, a_full, a_empty, b_full, b_empty)),
            (load_role, (a_desc, b_desc, starts, tiles, a, b, a_full, a_empty, b_full, b_empty)),
        ],
        [1],
    )


def case(trips: list[int], stages: tuple[int, int], programs: int = 1) -> Case:
    """Tiles of so many blocks each, with rings of `stages` slots for A and for B."""
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        random = torch.Generator().manual_seed(0)
        a = torch.randint(-2, 3, (blocks * M, K), generator=random).bfloat16()
        b = torch.randint(-2, 3, (blocks * K, 2 * N), generator=random).bfloat16()
        expected = sums_of_tiles(a.float().view(blocks, M, K) @ b.float().view(blocks, K, 2 * N), trips)
        out = torch.full((len(trips) * M, 2 * N), float("nan"), device=device)
        args = (tiled(a, M, device), tiled(b, K, device, N), out, starts_of(trips, device), len(trips))
        return Operands(args, {"out": (out, expected.view_as(out))})

    constexprs = dict(zip(("A_STAGES", "B_STAGES"), stages, strict=True))
    return Case(f"trips {trips}, stages {stages}, {programs} programs", kernel, (programs,), operands, constexprs)


CASES = [
    case([0, 1, 2], stages=(2, 3)),
    case([4, 0, 3, 1], stages=(1, 2)),
    case([2, 1], stages=(5, 7)),
    case([3, 2], stages=(4, 2)),  # B's ring comes round before A's: A's barriers do not order B's loads
    case([2, 0, 5, 1], stages=(2, 4), programs=2),
]

BAD = [
    Bad(
        "multiply_role: delete mbarrier.wait(b_full.index(u), ((b_step + 1) // B_STAGES) & 1)",
        ("uninitialised", "race"),
    ),
    Bad("multiply_role: delete left = warpgroup_mma_wait(1, deps=(left_token,))", ("race", "accumulator in flight")),
    Bad("multiply_role: delete right = warpgroup_mma_wait(0, deps=(right_token,))", ("accumulator in flight", "race")),
    Bad("multiply_role: one more in warpgroup_mma_wait(1, deps=(left_token,))", ("race", "accumulator in flight")),
    Bad("multiply_role: move up mbarrier.arrive(b_empty.index(t))", ("race",)),
    Bad(
        "multiply_role: other phase in mbarrier.wait(a_full.index(s), (a_step // A_STAGES) & 1)",
        ("lap", "race", "deadlock", "uninitialised"),
    ),
    Bad("load_role: half the bytes in mbarrier.expect(b_full.index(t), b_desc.nbytes_per_cta)", ("wrong bytes",)),
    Bad("multiply_role: delete mbarrier.arrive(a_empty.index(s))", ("deadlock",)),
]

FAMILY = Family("wgmma_shared", CASES, bad=BAD)
