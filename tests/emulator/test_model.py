"""The model of cost: what small kernels take, by hand; and that it stays near what an H200 has measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.testing.model import B200, H200, Chip, replay
from jaggedtensor.testing.model.replay import Engine, interpolated
from jaggedtensor.testing.mutants import load_module

ROOT = Path(__file__).resolve().parents[2]
# Round numbers: HBM 10 bytes a cycle, L2 50, TMA and shared memory 100.
PLAIN = Chip(
    "plain", 1, 1.0, 10.0, 50.0, tma=100.0, shared=100.0, tma_latency=400.0, hbm_latency=300.0, store_latency=50.0,
    wait=30.0, arrive=20.0, product_latency=7.0, product_start=11.0, shared_latency=3.0, fence=5.0, per_instruction=2.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def only_engines(monkeypatch, request):
    """No instructions but arithmetic, but for the tests that are about them."""
    if "instructions" not in request.node.name and "H200" not in request.node.name:
        module = sys.modules["jaggedtensor.testing.model.replay"]
        monkeypatch.setattr(module, "INSTRUCTIONS", {})
        monkeypatch.setattr(module, "WGMMA_INSTRUCTIONS", 0.0)
        monkeypatch.setattr(module, "TCGEN05_INSTRUCTIONS", 0.0)
        monkeypatch.setattr(module, "MOVED", 1e30)


def layout_of(shape, dtype):
    return gl.NVMMASharedLayout.get_default_for(list(shape), dtype)


@gluon.jit
def load_kernel(desc, times):
    buffers = gl.allocate_shared_memory(gl.float16, [4, 64, 64], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, times * desc.nbytes_per_cta)
    for i in range(times):
        tma.async_load(desc, [64 * i, 0], bar, buffers.index(i))
    mbarrier.wait(bar, 0)


def loaded(times):
    x = torch.zeros(256, 64, dtype=torch.float16)
    desc = TensorDescriptor.from_tensor(x, [64, 64], layout_of((64, 64), gl.float16))
    return emulate(load_kernel, (1,), desc, times, num_warps=4).raise_if_bad()


def test_a_load_takes_its_latency_and_its_bytes():
    report = loaded(1)
    transfer = 64 * 64 * 2 / 100
    assert replay(report, PLAIN, misses=0.0).cycles == pytest.approx(transfer + 400 + 30)
    assert replay(report, PLAIN).cycles == pytest.approx(transfer + 400 + 300 + 30)


def test_loads_wait_for_each_others_bytes_and_share_the_latency():
    size = 64 * 64 * 2
    cached = replay(loaded(4), PLAIN, misses=0.0)
    assert cached.cycles == pytest.approx(3 * size / 50 + size / 100 + 400 + 30)
    assert replay(loaded(4), PLAIN).cycles == pytest.approx(3 * size / 10 + size / 100 + 700 + 30)
    assert cached.engines["l2"] == 4 * size / 50
    assert replay(loaded(4), PLAIN, misses=0.5).engines["hbm"] == 4 * size / 20


@gluon.jit
def chain_kernel(times, A_LAYOUT: gl.constexpr):
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = gl.allocate_shared_memory(gl.float16, [64, 64], A_LAYOUT)
    a.store(gl.zeros([64, 64], gl.float16, plain))
    fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, acc_layout)
    for _ in range(times):
        acc = warpgroup_mma(a, a, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))


@pytest.mark.parametrize("times", [1, 3])
def test_products_of_a_chain_follow_each_other(times):
    report = emulate(chain_kernel, (1,), times, layout_of((64, 64), gl.float16), num_warps=4).raise_if_bad()
    stored = 64 * 64 * 2 / 100 + 3 + 5
    # Four steps of K = 16; 64 columns take 32 cycles, their operands 2048 + 64 * 32 bytes of shared memory 40.96.
    assert replay(report, PLAIN).cycles == pytest.approx(stored + times * (11 + 4 * 40.96) + 7)


@gluon.jit
def tensor_kernel(times, A_LAYOUT: gl.constexpr):
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    a = gl.allocate_shared_memory(gl.float16, [128, 64], A_LAYOUT)
    acc = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    a.store(gl.zeros([128, 64], gl.float16, plain))
    fence_async_shared()
    for i in range(times):
        tcgen05_mma(a, a.permute((1, 0)), acc, use_acc=i > 0, mbarriers=[])
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)


def test_a_commit_comes_after_the_products_before_it():
    layout = layout_of((128, 64), gl.float16)
    report = emulate(tensor_kernel, (1,), 3, layout, num_warps=4, target="sm100").raise_if_bad()
    chip = replace(PLAIN, shared=128.0, tensor={"shared": {128: 70.0}, "tensor": {128: 60.0}})
    stored = 128 * 64 * 2 / 128 + 3 + 5
    assert replay(report, chip).cycles == stored + 3 * 4 * 70 + 7 + 20 + 30
    assert replay(report, replace(chip, shared=64.0)).cycles == 2 * 128 + 3 + 5 + 3 * 4 * 128 + 7 + 20 + 30


def test_copies_go_in_between_what_else_an_engine_is_asked_for():
    engine = Engine()
    engine.copy(30)
    assert engine.serve(0, 20) == 40  # 20 of the copy, turn about
    assert engine.serve(0, 20) == 70
    engine.copy(30)
    assert engine.serve(200, 20) == 220  # over, while there was nothing else to do
    assert engine.busy == 120


@gluon.jit
def serve_role(bars, times):
    for i in range(times):
        mbarrier.wait(bars.index(0), i & 1)
        mbarrier.arrive(bars.index(1), count=1)


@gluon.jit
def return_role(bars, times):
    for i in range(times):
        mbarrier.arrive(bars.index(0), count=1)
        mbarrier.wait(bars.index(1), i & 1)


@gluon.jit
def rally_kernel(times):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize([(serve_role, (bars, times)), (return_role, (bars, times))], [4])


def test_a_rally_takes_two_arrivals_and_two_waits_a_round():
    for times in (1, 2, 7):
        result = replay(emulate(rally_kernel, (1,), times, num_warps=4).raise_if_bad(), PLAIN)
        assert result.cycles == times * 2 * (20 + 30)
        waits = result.roles["serve_role 0"].waits
        assert waits == {"bars (arrive of return_role)": 20 + (times - 1) * (20 + 30 + 20)}


@gluon.jit
def exponential_kernel(out, FIRST: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    x = gl.zeros([64, 32], gl.float32, layout)
    if FIRST:
        peak = gl.expand_dims(gl.max(x, 1), 1)
        x = gl.exp2(x - peak)
    else:
        x = gl.exp2(x)
    smem = gl.allocate_shared_memory(gl.float32, [64, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    smem.store(x)


def test_arithmetic_takes_the_pipe_that_is_slowest_for_its_instructions():
    out = torch.zeros(1)
    stored = 64 * 32 * 4 / 100 + 3
    # 2048 elements are 16 instructions of each of four warps: 8 cycles of the special function unit for each.
    report = emulate(exponential_kernel, (1,), out, False, num_warps=4).raise_if_bad()
    assert replay(report, PLAIN).cycles == pytest.approx(16 * 8 + stored)
    # A maximum comes first: 16 instructions of 2 cycles, then its latency; a subtraction goes beside the exponentials.
    report = emulate(exponential_kernel, (1,), out, True, num_warps=4).raise_if_bad()
    assert replay(report, PLAIN).cycles == pytest.approx(16 * 2 + 60 + 16 * 8 + stored)


def test_instructions_of_events_count_too():
    result = replay(emulate(rally_kernel, (1,), 5, num_warps=4).raise_if_bad(), PLAIN)
    assert result.cycles > 5 * 100
    assert result.roles["serve_role 0"].instructions == 5 * (6 + 4)


def test_the_same_events_take_the_same_time_whatever_order_they_came_in():
    def played(order, seed):
        return replay(emulate(rally_kernel, (1,), 6, num_warps=4, order=order, seed=seed).raise_if_bad(), PLAIN).cycles

    assert len({played(order, seed) for order in ("round_robin", "random", "late", "eager") for seed in range(3)}) == 1


def test_all_events_of_a_run_are_needed():
    report = emulate(rally_kernel, (1,), 6, num_warps=4)
    report.events = [event for event in report.events if event.kind != "arrive"]
    with pytest.raises(ValueError, match="never come"):
        replay(report, PLAIN)


def test_a_table_of_columns_is_interpolated():
    table = B200.tensor["shared"]
    assert interpolated(table, 128) == 64.6
    assert interpolated(table, 96) == pytest.approx((48.6 + 64.6) / 2)
    assert interpolated(table, 32) == 48.6


def test_a_backward_of_the_H200_is_near_its_measurement(monkeypatch):
    """The model's time of a workload within 15 % of what benchmarks/results has of it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    model = load_module(str(ROOT / "benchmarks" / "model.py"))
    kernel = next(k for k in model.HOPPER if k.name == "bwd, 128 rows for all")
    rows = json.loads(model.RESULTS.read_text())
    (measured,) = (r["ms"] for r in rows if (r["workload"], r["pass"]) == ("pma128-tail", "bwd"))
    cost = replace(kernel, compiled=None).cost()
    ms = model.milliseconds(model.planned("pma128-tail", "bwd", H200).made, cost)
    assert abs(ms / measured - 1) < 0.15
    assert 0.85 < cost.share("hbm") < 1.01  # the difference of two short runs can be a little more than there is
    assert 0.85 < cost.share("tensor") < 1
