"""Tiles added to a shared output by TMA reduce-add, from two staging buffers that take turns.

    one role   wait until the add before last has read its buffer · registers → buffer · fence · reduce-add · next

Several programs add to the same rows; the values are small integers, so that the order does not show in the sum.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.testing.families import Bad, Case, Family, Operands

ROWS, COLS = 16, 32


@gluon.jit
def kernel(x, out_desc, starts, tiles, groups, STAGES: gl.constexpr):
    """x [blocks · ROWS, COLS] fp32; starts [tiles + 1] int32, in blocks; out [groups · ROWS, COLS] fp32, zeros.

    Block b of a tile is added to the rows of group b % groups.
    """
    ROWS: gl.constexpr = out_desc.block_shape[0]
    COLS: gl.constexpr = out_desc.block_shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    staging = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, COLS], out_desc.layout)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = gl.load(starts + tile)
        end = gl.load(starts + tile + 1)
        for block in range(first, end):
            value = gl.load(x + (block * ROWS + rows) * COLS + cols)
            slot = step % STAGES
            tma.store_wait(STAGES - 1)
            staging.index(slot).store(value * 3)
            fence_async_shared()
            tma.async_atomic_add(out_desc, [(block % groups) * ROWS, 0], staging.index(slot))
            step += 1
    tma.store_wait(0)


def case(trips: list[int], stages: int, programs: int = 1, groups: int = 2) -> Case:
    """Tiles of so many blocks each."""
    starts = list(accumulate(trips, initial=0))
    blocks = max(1, sum(trips))

    def operands(device: str) -> Operands:
        x = torch.randint(-4, 5, (blocks * ROWS, COLS), generator=torch.Generator().manual_seed(0)).float()
        out = torch.zeros(groups * ROWS, COLS, device=device)
        expected = torch.zeros(groups, ROWS, COLS)
        for block in range(sum(trips)):
            expected[block % groups] += 3 * x.view(-1, ROWS, COLS)[block]
        layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], gl.float32)
        desc = TensorDescriptor.from_tensor(out, [ROWS, COLS], layout)
        args = (x.to(device), desc, torch.tensor(starts, dtype=torch.int32, device=device), len(trips), groups)
        return Operands(args, {"out": (out, expected.view_as(out))})

    name = f"trips {trips}, {stages} stages, {programs} programs"
    return Case(name, kernel, (programs,), operands, {"STAGES": stages})


CASES = [
    case([0, 1, 2], stages=2),
    case([3, 0, 2], stages=1),
    case([1, 1], stages=4),
    case([2, 0, 5, 1], stages=2, programs=2),
]

BAD = [
    Bad("kernel: delete fence_async_shared()", ("missing fence",)),
    Bad("kernel: move up fence_async_shared()", ("missing fence",)),
    Bad("kernel: delete tma.store_wait(STAGES - 1)", ("race",)),
    Bad("kernel: one more in tma.store_wait(STAGES - 1)", ("race",)),
    Bad("kernel: delete tma.store_wait(0)", ("outstanding",)),
    Bad("a plain store instead of an add", ("wrong value",), ("tma.async_atomic_add(", "tma.async_store(")),
]

FAMILY = Family("reduce_add", CASES, bad=BAD)
