"""Barriers: phases and parities, and each way to get them wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.kernels.emulator import ORDERS, emulate
from jaggedtensor.kernels.emulator.barriers import Mbarrier
from jaggedtensor.kernels.emulator.errors import KINDS

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


def finding(kernel, *args, order="round_robin", seed=0, **kwargs):
    """Status and text of the report."""
    report = emulate(kernel, (1,), *args, num_warps=4, order=order, seed=seed, **kwargs)
    return report.status, str(report)


@pytest.mark.parametrize(("completed", "parity", "passes"), [(0, 0, False), (0, 1, True), (1, 0, True), (1, 1, False)])
def test_a_wait_passes_when_the_last_completed_phase_has_its_parity(completed, parity, passes):
    assert Mbarrier("b", 1, 1, 0, 0, completed=completed).passes(parity) is passes


@gluon.jit
def write_role(buffer, ready, free, steps, ORDERED: gl.constexpr):
    for i in range(steps):
        if ORDERED:
            mbarrier.wait(free, (i + 1) & 1)
        buffer.store(gl.full([16, 32], i.to(gl.float32), gl.float32, LAYOUT))
        mbarrier.arrive(ready)


@gluon.jit
def read_role(out, buffer, ready, free, steps, EARLY: gl.constexpr):
    total = gl.zeros([16, 32], gl.float32, LAYOUT)
    for i in range(steps):
        mbarrier.wait(ready, i & 1)
        if EARLY:
            mbarrier.arrive(free)
        total += buffer.load(LAYOUT) * (i + 1)
        if not EARLY:
            mbarrier.arrive(free)
    gl.store(out, gl.sum(gl.sum(total, 1), 0))


@gluon.jit
def exchange_kernel(
    out, written, read, ORDERED: gl.constexpr = True, EARLY: gl.constexpr = False, COUNT: gl.constexpr = 1
):
    buffer = gl.allocate_shared_memory(gl.float32, [16, 32], FLAT)
    ready = mbarrier.allocate_mbarrier()
    free = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=COUNT)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(read_role, (out, buffer, ready, free, read, EARLY)), (write_role, (buffer, ready, free, written, ORDERED))],
        [4],
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_right_exchange_is_right_and_nothing_is_found_in_any_order(order):
    for seed in range(8):
        out = torch.full((1,), float("nan"))
        status, text = finding(exchange_kernel, out, 5, 5, order=order, seed=seed)
        assert status == "ok", text
        assert out.item() == 512 * sum(i * (i + 1) for i in range(5))


def test_a_role_with_fewer_steps_is_a_deadlock_that_says_who_waits_for_whom():
    status, text = finding(exchange_kernel, torch.zeros(1), 3, 4)
    assert status == "deadlock"
    assert "read_role (CTA 0) waits for parity 1 of ready (phase 3: 1 of 1 arrivals missing)" in text
    assert "ready: write_role last arrived in phase 2 at" in text
    assert text.count("test_core_barriers.py:") >= 2


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"EARLY": True}, {"race"}),
        ({"ORDERED": False}, {"race", "lap", "deadlock"}),
        ({"COUNT": 2}, {"deadlock"}),
    ],
)
def test_a_wrong_exchange_is_found_in_every_order(change, kinds):
    for order in ORDERS:
        for seed in range(4):
            status, text = finding(exchange_kernel, torch.zeros(1), 5, 5, order=order, seed=seed, **change)
            assert status in kinds, text


@gluon.jit
def load_kernel(desc, EXPECTED: gl.constexpr, LOADS: gl.constexpr, AGAIN: gl.constexpr = False):
    buffers = gl.allocate_shared_memory(gl.float32, [2, 16, 32], SHARED)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, EXPECTED)
    for i in gl.static_range(LOADS):
        tma.async_load(desc, [16 * i, 0], full, buffers.index(i))
    mbarrier.wait(full, 0)
    if AGAIN:
        mbarrier.arrive(full, count=2)


@pytest.mark.parametrize(
    ("expected", "loads", "kinds"),
    [
        (2048, 1, {"ok"}),
        (4096, 2, {"ok"}),
        (4096, 1, {"wrong bytes"}),
        (2048, 2, {"wrong bytes", "outstanding"}),
        (1024, 1, {"wrong bytes"}),
    ],
)
def test_bytes_are_counted(expected, loads, kinds):
    for order in ORDERS:
        desc = TensorDescriptor.from_tensor(torch.zeros(32, 32), [16, 32], SHARED.value)
        status, text = finding(load_kernel, desc, order=order, EXPECTED=expected, LOADS=loads)
        assert status in kinds, text


def test_more_arrivals_than_the_count_are_found():
    desc = TensorDescriptor.from_tensor(torch.zeros(32, 32), [16, 32], SHARED.value)
    status, text = finding(load_kernel, desc, EXPECTED=2048, LOADS=1, AGAIN=True)
    assert status == "over-arrival"
    assert "arrives on full with 2, but phase 1 waits for 1 of 1" in text


@gluon.jit
def misuse_kernel(INIT: gl.constexpr, TWICE: gl.constexpr, INVALIDATE: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    if INIT:
        mbarrier.init(bar, count=2)
    if INVALIDATE:
        mbarrier.arrive(bar)
        mbarrier.invalidate(bar)
    if TWICE:
        mbarrier.init(bar, count=2)
    mbarrier.arrive(bar)
    mbarrier.arrive(bar)
    mbarrier.wait(bar, 0)


@pytest.mark.parametrize(
    ("init", "twice", "invalidate", "message"),
    [
        (True, False, False, None),
        (False, False, False, "arrives on bar, which is not initialised"),
        (True, True, False, "initialises bar again without invalidating it"),
        (True, True, True, r"invalidates bar, which is in use: bar \(phase 0: 1 of 2"),
    ],
)
def test_the_life_of_a_barrier(init, twice, invalidate, message):
    report = emulate(misuse_kernel, (1,), num_warps=4, INIT=init, TWICE=twice, INVALIDATE=invalidate)
    if message is None:
        report.raise_if_bad()
    else:
        with pytest.raises(KINDS["barrier misuse"], match=message):
            report.raise_if_bad()


@gluon.jit
def late_role(bars):
    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(0), 1)


@gluon.jit
def eager_role(bars, out):
    mbarrier.arrive(bars.index(0))
    mbarrier.arrive(bars.index(0))
    gl.store(out, 1)


@gluon.jit
def lap_kernel(out):
    bars = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(bars.index(0), count=1)
    gl.warp_specialize([(eager_role, (bars, out)), (late_role, (bars,))], [1])


def test_a_phase_that_ends_before_its_waiter_has_passed_is_found():
    kinds = {finding(lap_kernel, torch.zeros(1), order=o, seed=s)[0] for o in ORDERS for s in range(6)}
    assert kinds == {"lap", "deadlock"}


@gluon.jit
def ring_kernel(N: gl.constexpr, I: gl.constexpr):  # noqa: E741
    bars = mbarrier.allocate_mbarrier(batch=N)
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.arrive(bars.index(I))


def test_a_slot_outside_of_its_ring_is_found():
    assert finding(ring_kernel, N=3, I=2)[0] == "ok"
    status, text = finding(ring_kernel, N=3, I=3)
    assert status == "out of bounds"
    assert "takes bars[3], of 3" in text


@gluon.jit
def endless_role(bars):
    for i in range(1 << 30):
        mbarrier.wait(bars.index(0), (i + 1) & 1)
        mbarrier.arrive(bars.index(0))


@gluon.jit
def endless_kernel():
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    endless_role(bars)


def test_roles_that_never_end_are_stopped():
    assert finding(endless_kernel, max_steps=1000)[0] == "too long"
