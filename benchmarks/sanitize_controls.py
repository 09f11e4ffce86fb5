"""Kernels that show what a sanitizer can be trusted with: three that are right, and three with a fault.

quiet     roles that touch no shared memory of their own
channel   four warps write by ordinary stores, four read, ordered by mbarriers alone, as our kernels do it
narrow    the same, but one warp writes
hasty     as `channel`, but the reader does not wait the last time: a race
careless  a role reads what another writes, and nothing is between them: a race
overrun   a store past the end of an allocation
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaggedtensor.kernels.shared.pipeline import make_channel

SIZE = 256  # two elements for each thread of four warps: STS.64, as racecheck does not look at STSM
ROUNDS = 5


@gluon.jit
def count_role(x, SIZE: gl.constexpr, ROUNDS: gl.constexpr):
    lanes = gl.program_id(0) * SIZE * 2 + gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(ROUNDS):
        gl.store(x + lanes, gl.load(x + lanes) + i)


@gluon.jit
def idle_role(x, SIZE: gl.constexpr, ROUNDS: gl.constexpr):
    lanes = (gl.program_id(0) * 2 + 1) * SIZE + gl.arange(0, SIZE, gl.BlockedLayout([4], [32], [1], [0]))
    gl.store(x + lanes, gl.load(x + lanes) * ROUNDS)


@gluon.jit
def quiet_kernel(x, SIZE: gl.constexpr, ROUNDS: gl.constexpr):
    """x fp32 [CTAs, 2, SIZE]: 0 + 1 + ... to the first row of a CTA, the second times ROUNDS."""
    gl.warp_specialize([(count_role, (x, SIZE, ROUNDS)), (idle_role, (x, SIZE, ROUNDS))], [1], [24])


@gluon.jit
def read_role(out, channel, SIZE: gl.constexpr, ROUNDS: gl.constexpr, HASTY: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    lanes = gl.arange(0, SIZE, layout)
    total = gl.zeros([SIZE], gl.float32, layout)
    at = channel.start()
    for _ in range(ROUNDS - HASTY):
        slot, at = channel.acquire_full(at)
        total += slot.buffer.load(layout)
        slot.release()
    if HASTY:
        total += channel.slot(at).buffer.load(layout)
    gl.store(out + lanes, total)


@gluon.jit
def write_role(x, channel, SIZE: gl.constexpr, ROUNDS: gl.constexpr, WARPS: gl.constexpr):
    lanes = gl.arange(0, SIZE, gl.BlockedLayout([2], [32], [WARPS], [0]))
    at = channel.start()
    for i in range(ROUNDS):
        slot, at = channel.acquire_empty(at)
        slot.buffer.store(gl.load(x + i * SIZE + lanes))
        slot.publish()


@gluon.jit
def channel_kernel(x, out, SIZE: gl.constexpr, ROUNDS: gl.constexpr, WARPS: gl.constexpr, HASTY: gl.constexpr):
    """out fp32 [SIZE] = the sum of x fp32 [ROUNDS, SIZE], unless HASTY."""
    channel = make_channel(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]), 2)
    gl.warp_specialize(
        [(read_role, (out, channel, SIZE, ROUNDS, HASTY)), (write_role, (x, channel, SIZE, ROUNDS, WARPS))],
        [WARPS],
        [24],
    )


@gluon.jit
def take_role(out, buffer, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    gl.store(out + gl.arange(0, SIZE, layout), buffer.load(layout))


@gluon.jit
def put_role(x, buffer, SIZE: gl.constexpr):
    lanes = gl.arange(0, SIZE, gl.BlockedLayout([2], [32], [4], [0]))
    buffer.store(gl.load(x + lanes))


@gluon.jit
def careless_kernel(x, out, SIZE: gl.constexpr):
    """out fp32 [SIZE] = x fp32 [SIZE], or what was in the buffer before."""
    buffer = gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(take_role, (out, buffer, SIZE)), (put_role, (x, buffer, SIZE))], [4], [24])


@gluon.jit
def overrun_kernel(x, SIZE: gl.constexpr):
    lanes = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x + lanes, gl.zeros([SIZE], gl.float32, lanes.type.layout))


def quiet() -> None:
    x = torch.arange(16.0 * SIZE, device="cuda").view(8, 2, SIZE)
    expected = torch.stack([x[:, 0] + sum(range(ROUNDS)), x[:, 1] * ROUNDS], 1)
    quiet_kernel[(8,)](x, SIZE, ROUNDS)
    assert torch.equal(x, expected)


def channel(warps: int = 4, hasty: bool = False) -> None:
    x, out = torch.randn(ROUNDS, SIZE, device="cuda"), torch.empty(SIZE, device="cuda")
    channel_kernel[(8,)](x, out, SIZE, ROUNDS, warps, int(hasty))  # all CTAs store the same
    torch.cuda.synchronize()
    assert hasty or (out - x.sum(0)).abs().max() < 1e-5


def narrow() -> None:
    channel(warps=1)


def hasty() -> None:
    channel(hasty=True)


def careless() -> None:
    x, out = torch.randn(SIZE, device="cuda"), torch.empty(SIZE, device="cuda")
    careless_kernel[(8,)](x, out, SIZE)
    torch.cuda.synchronize()


def overrun() -> None:
    overrun_kernel[(1,)](torch.empty(SIZE - 1, device="cuda"), SIZE)
    torch.cuda.synchronize()
