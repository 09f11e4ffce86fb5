"""A ring of shared-memory slots between a role that loads by TMA and a role that reads.

    load     wait empty[s] · expect full[s] · TMA → slot s · next
    default  wait full[s] · slot s → registers · fence · arrive empty[s] · next

A tile folds its blocks of x in their order, total = 2 · total + block, so that a block which comes twice, late or
not at all changes the result. `full` counts 1 arrival (the expect) and the bytes; `empty` counts 1.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.testing.families import Bad, Case, Family, Operands

ROWS, COLS = 16, 32


@gluon.jit
def load_role(x_desc, starts, tiles, ring, full, empty, STAGES: gl.constexpr):
    ROWS: gl.constexpr = x_desc.block_shape[0]
    slot = 0
    phase = 1  # of `empty`: a fresh barrier lets the first round pass
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), x_desc.nbytes_per_cta)
            tma.async_load(x_desc, [block * ROWS, 0], full.index(slot), ring.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1


@gluon.jit
def fold_role(out, starts, tiles, ring, full, empty, STAGES: gl.constexpr):
    ROWS: gl.constexpr = ring.shape[1]
    COLS: gl.constexpr = ring.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros([ROWS, COLS], gl.float32, layout)
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for _ in range(first, end):
            mbarrier.wait(full.index(slot), phase)
            total = total * 2 + ring.index(slot).load(layout)
            fence_async_shared()  # ordinary reads, before TMA writes there again
            mbarrier.arrive(empty.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
        gl.store(out + (tile * ROWS + rows) * COLS + cols, total)


@gluon.jit
def kernel(x_desc, out, starts, tiles, STAGES: gl.constexpr):
    """x [blocks · ROWS, COLS] fp32; starts [tiles + 1] int32, in blocks; out [tiles · ROWS, COLS] fp32."""
    ring = gl.allocate_shared_memory(gl.float32, [STAGES] + x_desc.block_shape, x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (fold_role, (out, starts, tiles, ring, full, empty, STAGES)),
            (load_role, (x_desc, starts, tiles, ring, full, empty, STAGES)),
        ],
        [1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles of so many blocks each; `programs` of them share the tiles."""
    starts = list(accumulate(trips, initial=0))

    def operands(device: str) -> Operands:
        x = torch.randint(-4, 5, (max(1, sum(trips)) * ROWS, COLS), generator=torch.Generator().manual_seed(0)).float()
        out = torch.full((len(trips) * ROWS, COLS), float("nan"), device=device)
        expected = torch.zeros(len(trips), ROWS, COLS)
        for tile, (first, end) in enumerate(pairwise(starts)):
            for block in x.view(-1, ROWS, COLS)[first:end]:
                expected[tile] = 2 * expected[tile] + block
        layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float32)
        desc = TensorDescriptor.from_tensor(x.to(device), [ROWS, COLS], layout)
        return Operands(
            (desc, out, torch.tensor(starts, dtype=torch.int32, device=device), len(trips)),
            {"out": (out, expected.view_as(out))},
        )

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages})


CASES = [
    case([0, 1, 2], stages=2),
    case([5, 0, 3, 1], stages=2),
    case([2, 3], stages=8),
    case([4, 1], stages=1),
    case([3, 0, 2, 6, 1, 1], stages=3, programs=2),
]

BAD = [
    Bad("fold_role: delete mbarrier.wait(full.index(slot), phase)", ("uninitialised", "race")),
    Bad("load_role: delete mbarrier.wait(empty.index(slot), phase)", ("race", "over-arrival")),
    Bad(
        "released before it is read",
        ("race",),
        (
            """
            total = total * 2 + ring.index(slot).load(layout)
            fence_async_shared()  # ordinary reads, before TMA writes there again
            mbarrier.arrive(empty.index(slot))
""",
            """
            mbarrier.arrive(empty.index(slot))
            total = total * 2 + ring.index(slot).load(layout)
            fence_async_shared()
""",
        ),
    ),
    Bad("fold_role: delete fence_async_shared()", ("missing fence",)),
    Bad("load_role: half the bytes in mbarrier.expect(full.index(slot), x_desc.nbytes_per_cta)", ("wrong bytes",)),
    Bad("load_role: no flip in phase = phase ^ 1", ("deadlock", "over-arrival", "race")),
    Bad("fold_role: no flip in phase = phase ^ 1", ("deadlock", "lap")),
    Bad("kernel: one more in mbarrier.init(empty.index(s), count=1)", ("deadlock",)),
    Bad("the first round waits", ("deadlock",), ("phase = 1  #", "phase = 0  #")),
    Bad("more bytes are expected", ("wrong bytes",), ("x_desc.nbytes_per_cta)", "x_desc.nbytes_per_cta + 16)")),
    Bad(
        "the counter goes on before the slot that it names is released",
        ("lap", "deadlock"),
        (
            """
            mbarrier.arrive(empty.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
""",
            """
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1
            mbarrier.arrive(empty.index(slot))
""",
        ),
    ),
]

FAMILY = Family("tma_ring", CASES, bad=BAD)
