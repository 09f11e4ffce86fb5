"""The report, and that nothing in production needs the emulator."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import jaggedtensor
from jaggedtensor.kernels.emulator import KINDS, emulate

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@gluon.jit
def load_role(source, steps, ring, full, empty):
    for i in range(steps):
        mbarrier.wait(empty.index(i % 2), (i // 2 + 1) & 1)
        mbarrier.expect(full.index(i % 2), source.nbytes_per_cta)
        tma.async_load(source, [16 * i, 0], full.index(i % 2), ring.index(i % 2))


@gluon.jit
def double_role(target, steps, ring, full, empty, EARLY: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], SHARED)
    for i in range(steps):
        mbarrier.wait(full.index(i % 2), (i // 2) & 1)
        if EARLY:
            mbarrier.arrive(empty.index(i % 2))
        value = ring.index(i % 2).load(LAYOUT)
        fence_async_shared()
        if not EARLY:
            mbarrier.arrive(empty.index(i % 2))
        tma.store_wait(0)
        staging.store(value * 2)
        fence_async_shared()
        tma.async_store(target, [16 * i, 0], staging)
    tma.store_wait(0)


@gluon.jit
def double_kernel(source, target, steps, EARLY: gl.constexpr = False):
    ring = gl.allocate_shared_memory(gl.float32, [2, 16, 32], SHARED)
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (double_role, (target, steps, ring, full, empty, EARLY)),
            (load_role, (source, steps, ring, full, empty)),
        ],
        [1],
    )


def doubled(early=False, **kwargs):
    x, out = torch.randn(80, 32), torch.full((80, 32), float("nan"))
    source = TensorDescriptor.from_tensor(x, [16, 32], SHARED.value)
    target = TensorDescriptor.from_tensor(out, [16, 32], SHARED.value)
    report = emulate(double_kernel, (1,), source, target, 5, num_warps=4, EARLY=early, **kwargs)
    return report, x, out


def test_a_good_report_counts_steps_waits_bytes_and_memory():
    report, x, out = doubled()
    assert report.raise_if_bad() is report
    assert torch.equal(out, 2 * x)
    roles = {stats.role: stats for stats in report.merged_roles()}
    assert roles["load_role"].waits == 5
    assert roles["load_role"].nbytes == 5 * 2048
    assert roles["double_role"].kinds["load"] == roles["double_role"].kinds["tma store"] == 5
    assert report.buffers == {"ring": 4096, "full": 16, "empty": 16, "staging": 2048}
    assert 6144 + 32 <= report.shared_peak < 9000
    text = str(report)
    assert text.startswith("double_kernel on sm90, order round_robin, seed 0: ok")
    assert "load_role (CTA 0): " in text


def test_every_event_has_a_kind_a_size_and_a_place_in_the_order():
    report, _, _ = doubled(order="late", seed=1)
    loads = [e for e in report.events if e.kind == "tma load"]
    waits = [e for e in report.events if e.kind == "wait" and e.name.startswith("full")]
    assert all(e.start < e.end and e.nbytes == 2048 and e.shape == (16, 32) for e in loads)
    assert [e.name for e in waits] == ["full[0]", "full[1]"] * 2 + ["full[0]"]
    for load, wait in zip(loads, waits, strict=True):
        assert load.number in wait.after
        assert load.end < wait.start
    assert loads[0].line.startswith(__file__)
    assert [e.start for e in report.events] == sorted(e.start for e in report.events)
    assert doubled(events=False)[0].events == []


def test_the_timeline_has_a_column_for_each_role():
    lines = doubled()[0].timeline(events=30).splitlines()
    assert lines[0].split() == ["double_kernel", "load_role", "double_role"]
    assert len(lines) == 31
    assert any("wait full[0]" in line for line in lines)


def test_the_timeline_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    figure = doubled(order="late")[0].plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert {"load_role/0", "load_role/0 engines", "double_role/0"} <= set(rows)


def test_a_bad_report_says_what_who_and_where_and_raises_it():
    report, _, _ = doubled(early=True, order="random", seed=2)
    assert report.status == "race"
    text = str(report)
    for part in ("double_role", "ring", "tma load of load_role", "test_core_report.py:", " in double_role", "CTA 0"):
        assert part in text
    with pytest.raises(KINDS["race"], match="nothing orders the two") as caught:
        report.raise_if_bad()
    assert caught.value.finding is report.findings[0]


def test_the_same_seed_gives_the_same_run():
    first, second, other = (doubled(order="random", seed=s)[0] for s in (3, 3, 4))
    steps = [[(e.role, e.kind, e.start, e.end) for e in r.events] for r in (first, second, other)]
    assert steps[0] == steps[1]
    assert steps[0] != steps[2]


def test_orders_and_targets_are_checked():
    with pytest.raises(ValueError, match="order must be one of"):
        doubled(order="sideways")
    with pytest.raises(ValueError, match="target must be one of"):
        doubled(target="sm80")


def test_a_finding_can_be_sent_to_another_process():
    report, _, _ = doubled(early=True)
    assert pickle.loads(pickle.dumps(report.findings)) == report.findings


def test_production_code_never_imports_the_emulator():
    package = Path(jaggedtensor.__file__).parent
    mine, allowed = package / "kernels" / "emulator", package / "testing"
    for path in package.rglob("*.py"):
        if mine not in path.parents and allowed not in path.parents:
            assert "kernels.emulator" not in path.read_text(), path
    code = (
        "import sys, jaggedtensor, jaggedtensor.kernels.dispatch, jaggedtensor.nn\n"
        "try:\n    import jaggedtensor.kernels.hopper.launch\nexcept ImportError:\n    pass\n"
        "assert not [m for m in sys.modules if 'emulator' in m or m == 'greenlet'], sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
