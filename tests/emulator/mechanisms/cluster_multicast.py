"""A cluster of two CTAs on Hopper: one TMA load fills a slot in both, and a slot is free when both have read it.

    load     wait mine[s] · wait both[s] (the lead) · expect full[s] · TMA: own block → the CTA's own slot s, and
             shared block → slot s of both CTAs (the lead)
    default  wait full[s] · slots → registers · fence · arrive both[s] of the lead, mine[s] · … · registers → out

`both` is one barrier for the pair, in the lead CTA, on which either CTA arrives. `mine` keeps the other CTA from
arming `full` for the next round before its own reader has seen this one: it does not wait for `both`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaggedtensor.testing.families import Bad, Case, Family, Operands
from jaggedtensor.testing.mechanisms import starts_of, tiled

ROWS, COLS = 16, 32  # of a CTA


@gluon.jit
def load_role(own_desc, shared_desc, starts, tiles, own, shared, full, both, mine):
    OWN: gl.constexpr = own_desc.block_shape[0]
    SHARED: gl.constexpr = shared_desc.block_shape[0]
    STAGES: gl.constexpr = own.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            s = step % STAGES
            mbarrier.wait(mine.index(s), (step // STAGES + 1) & 1)
            mbarrier.wait(both.index(s), (step // STAGES + 1) & 1)
            mbarrier.expect(full.index(s), own_desc.nbytes_per_cta + shared_desc.nbytes_per_cta)
            tma.async_load(own_desc, [block * OWN, 0], full.index(s), own.index(s))
            tma.async_load(shared_desc, [block * SHARED, 0], full.index(s), shared.index(s), multicast=True)
            step += 1


@gluon.jit
def fold_role(out_desc, starts, tiles, own, shared, staging, full, both, mine):
    ROWS: gl.constexpr = own.shape[1]
    COLS: gl.constexpr = own.shape[2]
    STAGES: gl.constexpr = own.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]])
    same: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 0]])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros([ROWS, COLS], gl.float32, layout)
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for _ in range(first, end):
            s = step % STAGES
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            block = own.index(s).load(layout)
            sums = gl.sum(shared.index(s).load(same), axis=0)
            fence_async_shared(cluster=True)  # ordinary reads, before TMA, of the other CTA too, writes there again
            mbarrier.arrive(both.index(s))
            mbarrier.arrive(mine.index(s))
            total = total * 2 + block + gl.convert_layout(sums, gl.SliceLayout(0, layout))[None, :]
            step += 1
        tma.store_wait(0)
        staging.store(total)
        fence_async_shared()
        tma.async_store(out_desc, [tile * ROWS, 0], staging)
    tma.store_wait(0)


@gluon.jit
def kernel(own_desc, shared_desc, out_desc, starts, tiles, STAGES: gl.constexpr):
    """own [blocks · 2 ROWS, COLS], shared [blocks · ROWS, COLS], out [tiles · 2 ROWS, COLS] fp32; starts [tiles + 1].

    A tile folds total = 2 · total + own block + sums of the shared block's columns.
    """
    own = gl.allocate_shared_memory(gl.float32, [STAGES] + own_desc.block_shape, own_desc.layout)
    shared = gl.allocate_shared_memory(gl.float32, [STAGES] + shared_desc.block_shape, shared_desc.layout)
    staging = gl.allocate_shared_memory(gl.float32, out_desc.block_shape, out_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    both = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    mine = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(both.index(s), count=1)
        mbarrier.init(mine.index(s), count=1)
    gl.warp_specialize(
        [
            (fold_role, (out_desc, starts, tiles, own, shared, staging, full, both, mine)),
            (load_role, (own_desc, shared_desc, starts, tiles, own, shared, full, both, mine)),
        ],
        [1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles of so many blocks each, by clusters of two CTAs."""
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        random = torch.Generator().manual_seed(0)
        own = torch.randint(-4, 5, (blocks * 2 * ROWS, COLS), generator=random).float()
        shared = torch.randint(-4, 5, (blocks * ROWS, COLS), generator=random).float()
        out = torch.full((len(trips) * 2 * ROWS, COLS), float("nan"), device=device)
        expected = torch.zeros(len(trips), 2 * ROWS, COLS)
        for tile, (first, end) in enumerate(pairwise(starts_of(trips).tolist())):
            for block in range(first, end):
                sums = shared.view(-1, ROWS, COLS)[block].sum(0)
                expected[tile] = 2 * expected[tile] + own.view(-1, 2 * ROWS, COLS)[block] + sums
        blocks_of_each = ((own, 2 * ROWS, [[1, 0]]), (shared, ROWS, [[0, 0]]), (out, 2 * ROWS, [[1, 0]]))
        descriptors = (tiled(x, rows, device, split=split) for x, rows, split in blocks_of_each)
        args = (*descriptors, starts_of(trips, device), len(trips))
        return Operands(args, {"out": (out, expected.view_as(out))})

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages}, num_ctas=2)


CASES = [
    case([0, 1, 2], stages=2),
    case([4, 0, 3, 1], stages=1),
    case([2, 1], stages=6),
    case([2, 0, 5, 1], stages=3, programs=2),
]

BAD = [
    Bad("load_role: delete mbarrier.wait(both.index(s), (step // STAGES + 1) & 1)", ("race", "uninitialised")),
    Bad("load_role: delete mbarrier.wait(mine.index(s), (step // STAGES + 1) & 1)", ("over-arrival", "race", "lap")),
    Bad("fold_role: delete mbarrier.wait(full.index(s), (step // STAGES) & 1)", ("uninitialised", "race")),
    Bad("fold_role: delete fence_async_shared(cluster=True)", ("missing fence",)),
    Bad("fold_role: delete mbarrier.arrive(mine.index(s))", ("deadlock",)),
    Bad(
        "the pair's readers count as one",
        ("race", "uninitialised"),
        ("(batch=STAGES, two_ctas=True)", "(batch=STAGES)"),
    ),
]

EQUIVALENT = {
    "load_role: move down mbarrier.wait(both.index(s), (step // STAGES + 1) & 1)": "`mine` alone guards `full`",
}

FAMILY = Family("cluster_multicast", CASES, bad=BAD, equivalent=EQUIVALENT, triton=(3, 9))
