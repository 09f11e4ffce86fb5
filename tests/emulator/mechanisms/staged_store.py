"""Values staged in shared memory by one role and stored by TMA from another.

    default  wait empty[s] · registers → slot s · fence · arrive full[s] · next
    store    wait full[s] · TMA store · wait until the store before has read its slot · arrive empty of that slot

A store is left in flight while the next is issued, so a slot is released one step late; the last ones are waited for
at the end, before the shared memory goes.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.testing.families import Bad, Case, Family, Operands

ROWS, COLS = 16, 32


@gluon.jit
def compute_role(x, starts, tiles, staging, full, empty):
    ROWS: gl.constexpr = staging.shape[1]
    COLS: gl.constexpr = staging.shape[2]
    STAGES: gl.constexpr = staging.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            value = gl.load(x + (block * ROWS + rows) * COLS + cols)
            mbarrier.wait(empty.index(slot), phase)
            staging.index(slot).store(value * value + 1)
            fence_async_shared()
            mbarrier.arrive(full.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase = phase ^ 1


@gluon.jit
def store_role(out_desc, starts, tiles, staging, full, empty):
    ROWS: gl.constexpr = out_desc.block_shape[0]
    STAGES: gl.constexpr = staging.shape[0]
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            tma.async_store(out_desc, [block * ROWS, 0], staging.index(slot))
            tma.store_wait(1)
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
            step += 1
    tma.store_wait(0)


@gluon.jit
def kernel(x, out_desc, starts, tiles, STAGES: gl.constexpr):
    """x, out [blocks · ROWS, COLS] fp32; starts [tiles + 1] int32, in blocks."""
    staging = gl.allocate_shared_memory(gl.float32, [STAGES] + out_desc.block_shape, out_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (compute_role, (x, starts, tiles, staging, full, empty)),
            (store_role, (out_desc, starts, tiles, staging, full, empty)),
        ],
        [1],
    )


def case(trips: list[int], stages: int, programs: int = 1) -> Case:
    """Tiles of so many blocks each; a single slot would deadlock, since it is released by the store after it."""
    assert stages >= 2
    starts = list(accumulate(trips, initial=0))
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        x = torch.randint(-9, 10, (blocks * ROWS, COLS), generator=torch.Generator().manual_seed(0)).float()
        out = torch.full((blocks * ROWS, COLS), float("nan"), device=device)
        layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float32)
        desc = TensorDescriptor.from_tensor(out, [ROWS, COLS], layout)
        return Operands(
            (x.to(device), desc, torch.tensor(starts, dtype=torch.int32, device=device), len(trips)),
            {"out": (out, x * x + 1)},
        )

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages})


CASES = [
    case([0, 1, 2], stages=2),
    case([4, 0, 3, 1], stages=3),
    case([1, 1], stages=5),
    case([2, 0, 5, 1], stages=2, programs=2),
]

BAD = [
    Bad("compute_role: delete fence_async_shared()", ("missing fence",)),
    Bad("compute_role: move up mbarrier.arrive(full.index(slot))", ("missing fence",)),
    Bad("compute_role: delete mbarrier.wait(empty.index(slot), phase)", ("race", "deadlock", "lap")),
    Bad("store_role: delete mbarrier.wait(full.index(slot), (step // STAGES) & 1)", ("race", "uninitialised")),
    Bad("store_role: one more in tma.store_wait(1)", ("race",)),
    Bad("store_role: delete tma.store_wait(0)", ("outstanding",)),
    Bad("compute_role: no flip in phase = phase ^ 1", ("race", "lap", "deadlock")),
    Bad("released without having been read", ("race",), ("(step + STAGES - 1) % STAGES), pred=step > 0", "slot)")),
]

FAMILY = Family("staged_store", CASES, bad=BAD)
