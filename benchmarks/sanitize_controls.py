"""Kernels that show what a sanitizer can be trusted with: two that are right, and two with a fault that it must find.

quiet     roles that touch no shared memory of their own: what is reported of it is the compiler's doing
channel   one warp writes by ordinary stores, four read, ordered by mbarriers alone, as our kernels do it
hasty     the same, but the reader does not wait: a race
overrun   a store past the end of an allocation
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaggedtensor.kernels.shared.pipeline import make_channel

SIZE = 128
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
def read_role(out, channel, SIZE: gl.constexpr, ROUNDS: gl.constexpr, WAITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, SIZE, layout)
    total = gl.zeros([SIZE], gl.float32, layout)
    at = channel.start()
    for _ in range(ROUNDS):
        if WAITS:
            slot, at = channel.acquire_full(at)
        else:
            slot, at = channel.slot(at), at.next()
        total += slot.buffer.load(layout)
        slot.release()
    gl.store(out + lanes, total)


@gluon.jit
def write_role(x, channel, SIZE: gl.constexpr, ROUNDS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    lanes = gl.arange(0, SIZE, layout)
    at = channel.start()
    for i in range(ROUNDS):
        slot, at = channel.acquire_empty(at)
        slot.buffer.store(gl.load(x + i * SIZE + lanes))
        slot.publish()


@gluon.jit
def channel_kernel(x, out, SIZE: gl.constexpr, ROUNDS: gl.constexpr, WAITS: gl.constexpr):
    """out fp32 [SIZE] = the sum of x fp32 [ROUNDS, SIZE], if WAITS."""
    channel = make_channel(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]), 2)
    gl.warp_specialize(
        [(read_role, (out, channel, SIZE, ROUNDS, WAITS)), (write_role, (x, channel, SIZE, ROUNDS))], [1], [24]
    )


@gluon.jit
def overrun_kernel(x, SIZE: gl.constexpr):
    lanes = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(x + lanes, gl.zeros([SIZE], gl.float32, lanes.type.layout))


def quiet() -> None:
    x = torch.arange(16.0 * SIZE, device="cuda").view(8, 2, SIZE)
    expected = torch.stack([x[:, 0] + sum(range(ROUNDS)), x[:, 1] * ROUNDS], 1)
    quiet_kernel[(8,)](x, SIZE, ROUNDS)
    assert torch.equal(x, expected)


def channel(waits: bool = True) -> None:
    x, out = torch.randn(ROUNDS, SIZE, device="cuda"), torch.empty(SIZE, device="cuda")
    channel_kernel[(8,)](x, out, SIZE, ROUNDS, waits)  # all CTAs store the same
    torch.cuda.synchronize()
    assert not waits or (out - x.sum(0)).abs().max() < 1e-5


def hasty() -> None:
    channel(waits=False)


def overrun() -> None:
    overrun_kernel[(1,)](torch.empty(SIZE - 1, device="cuda"), SIZE)
    torch.cuda.synchronize()
