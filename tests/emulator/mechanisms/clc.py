"""Cluster launch control: whoever is free takes the tile of a program that has not started yet.

    clc      wait taken[s] · fence · expect offered[s] 16 bytes · try_cancel → answer[s] · wait offered[s] · stop if
             refused
    default  this tile · wait offered[s] · answer[s] → next tile, or stop · arrive taken[s]

One program per tile; each program works at its own tile first. The answer to a later request is on its way while a
tile is worked at.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import clc, fence_async_shared, mbarrier

from jaggedtensor.testing.families import Bad, Case, Family, Operands

SIZE = 256


@gluon.jit
def request_role(answers, offered, taken):
    STAGES: gl.constexpr = answers.shape[0]
    slot = 0
    phase = 0
    more = gl.to_tensor(True)
    while more:
        mbarrier.wait(taken.index(slot), phase ^ 1)
        fence_async_shared()  # after ordinary reads of the last answer
        mbarrier.expect(offered.index(slot), 16)
        clc.try_cancel(answers.index(slot), offered.index(slot))
        mbarrier.wait(offered.index(slot), phase)
        more = clc.load_result(answers.index(slot)).is_canceled()
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1


@gluon.jit
def work_role(x, out, visits, answers, offered, taken, SIZE: gl.constexpr):
    STAGES: gl.constexpr = answers.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    lanes = gl.arange(0, SIZE, layout)
    slot = 0
    phase = 0
    tile = gl.program_id(0)
    more = gl.to_tensor(True)
    while more:
        value = gl.load(x + tile * SIZE + lanes)
        gl.store(out + tile * SIZE + lanes, value * 2 + tile)
        gl.atomic_add(visits + tile, 1)
        mbarrier.wait(offered.index(slot), phase)
        answer = clc.load_result(answers.index(slot))
        mbarrier.arrive(taken.index(slot))
        more = answer.is_canceled()
        tile = answer.program_id(0)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1


@gluon.jit
def kernel(x, out, visits, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """x, out [tiles, SIZE] fp32; visits [tiles] int32 counts how often each tile was worked at. Grid: tiles."""
    answers = gl.allocate_shared_memory(gl.int64, [STAGES, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    offered = mbarrier.allocate_mbarrier(batch=STAGES)
    taken = mbarrier.allocate_mbarrier(batch=STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(offered.index(s), count=1)
        mbarrier.init(taken.index(s), count=1)
    gl.warp_specialize(
        [
            (work_role, (x, out, visits, answers, offered, taken, SIZE)),
            (request_role, (answers, offered, taken)),
        ],
        [1],
    )


def case(tiles: int, stages: int) -> Case:
    """So many tiles, each of which must be worked at once."""

    def operands(device: str) -> Operands:
        x = torch.randint(-4, 5, (tiles, SIZE), generator=torch.Generator().manual_seed(0)).float()
        out = torch.full((tiles, SIZE), float("nan"), device=device)
        visits = torch.zeros(tiles, dtype=torch.int32, device=device)
        outputs = {
            "out": (out, 2 * x + torch.arange(tiles)[:, None]),
            "visits": (visits, torch.ones(tiles)),
        }
        return Operands((x.to(device), out, visits), outputs)

    constexprs = {"SIZE": SIZE, "STAGES": stages}
    return Case(f"{tiles} tiles, {stages} stages", kernel, (tiles,), operands, constexprs, target="sm100")


CASES = [case(1, stages=1), case(5, stages=2), case(9, stages=3), case(3, stages=4)]

BAD = [
    Bad("work_role: delete mbarrier.wait(offered.index(slot), phase)", ("uninitialised", "race")),
    Bad("work_role: move up mbarrier.arrive(taken.index(slot))", ("race",)),
    Bad("request_role: delete mbarrier.wait(taken.index(slot), phase ^ 1)", ("race", "wrong value", "deadlock")),
    Bad("request_role: half the bytes in mbarrier.expect(offered.index(slot), 16)", ("wrong bytes",)),
    Bad("request_role: delete mbarrier.wait(offered.index(slot), phase)", ("race", "uninitialised")),
    Bad("work_role: delete mbarrier.arrive(taken.index(slot))", ("deadlock",)),
]

FAMILY = Family("clc", CASES, bad=BAD)
