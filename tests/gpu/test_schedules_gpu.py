"""Schedules built on a GPU: the same integers as on a CPU, nobody waits, graphs replay, and it is quick."""

import statistics
import subprocess
import sys

import pytest
import torch

from jaggedtensor import JaggedLayout, JaggedTensor, ScheduleKind
from jaggedtensor.schedules import TileAxis, Wave
from jaggedtensor.schedules.build import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ON_DEVICE = [kind for kind in ScheduleKind if kind is not ScheduleKind.LPT]  # LPT is built on the host
BAR_MS = 0.3


def offsets_of(lengths, device="cpu", dtype=torch.int64):
    return torch.cat((torch.zeros(1, dtype=dtype), torch.as_tensor(lengths).cumsum(0).to(dtype))).to(device)


def drawn(batch, longest, seed=0):
    """Uniform lengths, a fifth of them 0 and a few much longer."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (batch,), generator=generator)
    lengths[torch.rand(batch, generator=generator) < 0.2] = 0
    lengths[::50] *= 7
    return lengths


def lognormal():
    generator = torch.Generator().manual_seed(0)
    return torch.exp(torch.randn(4096, generator=generator) * 1.2 + 5.3).to(torch.int64).clamp(1, 8192)


def sparse(sequence, q_block, kv_block):
    return (sequence + q_block + 2 * kv_block) % 3 != 0


def assert_same(on_gpu, on_cpu):
    for x, y in zip(on_gpu.tensors(), on_cpu.tensors(), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.device.type == "cuda"
            assert torch.equal(x.cpu(), y)


OPTIONS = {
    "plain": {},
    "grouped": dict(group=3, q_len=70),
    "causal": dict(right=0),
    "window": dict(left=100, right=30),
    "jagged": dict(jagged=True),
    "jagged causal": dict(jagged=True, right=0, group=2),
    "mask": dict(mask="tensor"),
    "mask function": dict(mask="function", left=200),
    "weighed": dict(tile_cost=2),
    "odd heads": dict(heads=3),
    "more workers than tiles": dict(workers=5000),
}


@pytest.mark.parametrize("run", [1, 33, 132])
@pytest.mark.parametrize("wave", [Wave.FIRST, Wave.MIDDLE, Wave.LAST])
def test_gpu_and_cpu_build_the_same_waves(wave, run):
    options = dict(
        axis=TileAxis.KEY, q_len=100, heads=4, workers=132, block_kv=64, wave=wave, cut_last_round=1, run=run
    )
    for lengths in (drawn(300, 500), torch.full((9,), 1000), torch.zeros(5, dtype=torch.int64)):
        on_cpu, on_gpu = (
            JaggedLayout(offsets_of(lengths, device)).schedule(ScheduleKind.ZIGZAG, **options)
            for device in ("cpu", "cuda")
        )
        assert_same(on_gpu, on_cpu)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ScheduleKind)
def test_gpu_and_cpu_build_the_same(kind, axis, options):
    options = dict(q_len=100, heads=4, workers=132, block_q=64, block_kv=64) | options
    jagged, mask = options.pop("jagged", False), options.pop("mask", None)
    for number, lengths in enumerate((drawn(300, 500), drawn(7, 40), torch.zeros(5, dtype=torch.int64))):
        dtype = torch.int32 if number else torch.int64
        cpu, gpu = (JaggedLayout(offsets_of(lengths, device, dtype)) for device in ("cpu", "cuda"))
        each = {"cpu": dict(options), "cuda": dict(options)}
        if jagged:
            q_lengths = drawn(len(lengths), 300, seed=1)
            queries = {device: JaggedLayout(offsets_of(q_lengths, device)) for device in each}
            each = {device: one | {"q_len": queries[device]} for device, one in each.items()}
        if mask is not None:
            dense = torch.rand(len(lengths), 2, 60, generator=torch.Generator().manual_seed(2)) < 0.5
            each = {
                device: one | {"mask": dense.to(device) if mask == "tensor" else sparse} for device, one in each.items()
            }
        assert_same(gpu.schedule(kind, axis=axis, **each["cuda"]), cpu.schedule(kind, axis=axis, **each["cpu"]))


@pytest.mark.parametrize("axis", TileAxis)
def test_a_last_round_is_cut_as_on_a_cpu_and_the_host_does_not_wait(axis):
    lengths = torch.full((8,), 4096)
    cpu, gpu = (JaggedLayout(offsets_of(lengths, device)) for device in ("cpu", "cuda"))
    common = dict(heads=16, workers=132, block_q=64, axis=axis, tile_cost=2, cut_last_round=4)
    on_cpu = cpu.schedule(ScheduleKind.ZIGZAG, q_len=cpu, **common)
    assert on_cpu.slots == 64
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = gpu.schedule(ScheduleKind.ZIGZAG, q_len=gpu, **common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert on_gpu.slots == on_cpu.slots
    assert_same(on_gpu, on_cpu)


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_the_host_never_waits(kind, axis):
    lengths = drawn(300, 500)
    offsets, q_offsets = offsets_of(lengths, "cuda"), offsets_of(drawn(300, 300, seed=1), "cuda")
    mask = torch.ones(300, 2, 60, dtype=torch.bool, device="cuda")
    rows = int(offsets[-1]) + 5
    common = dict(heads=4, workers=132, block_q=64, block_kv=64, axis=axis, rows=rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = JaggedLayout(offsets, validate=False, max_length=4000)
        query = JaggedLayout(q_offsets, validate=False)
        made = [
            layout.schedule(kind, q_len=100, **common),
            layout.schedule(kind, q_len=100, right=0, left=200, tile_cost=1, **common),
            layout.schedule(kind, q_len=query, q_rows=200_000, **common),
            layout.schedule(kind, q_len=100, mask=mask, **common),
            layout.schedule(kind, q_len=100, mask=sparse, **common),
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layout._schedules.builds == len(made)
    on_cpu = JaggedLayout(offsets.cpu()).schedule(kind, q_len=100, **common)
    count = int(on_cpu.count)
    assert torch.equal(made[0].tiles[:count].cpu(), on_cpu.tiles[:count])  # more capacity, the same tiles
    assert (made[0].tiles[count:, 0] == -1).all()


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_a_graph_rebuilds_for_other_offsets(kind, axis):
    batch, tokens, longest = 64, 20_000, 3000
    common = dict(heads=4, workers=132, block_q=64, block_kv=64, axis=axis)
    static = JaggedLayout.with_capacity(batch, tokens, longest, device="cuda")
    query = JaggedLayout.with_capacity(batch, tokens, longest, device="cuda")
    mask = torch.ones(batch, 2, 47, dtype=torch.bool, device="cuda")

    def build_all():
        return (
            static.schedule(kind, q_len=100, **common),
            static.schedule(kind, q_len=query, right=0, **common),
            static.schedule(kind, q_len=100, mask=mask, **common),
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        build_all()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build_all()

    full = torch.full((batch,), tokens // batch)
    giant = torch.zeros(batch, dtype=torch.int64)
    giant[5] = longest
    for seed, lengths in enumerate((drawn(batch, 300), full, giant, torch.zeros_like(full))):
        q_lengths = drawn(batch, 200, seed=seed + 10)
        static.copy_(offsets_of(lengths, "cuda"))
        query.copy_(offsets_of(q_lengths, "cuda"))
        mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.5)
        graph.replay()
        on_cpu = JaggedLayout.with_capacity(batch, tokens, longest).copy_(offsets_of(lengths))
        q_cpu = JaggedLayout.with_capacity(batch, tokens, longest).copy_(offsets_of(q_lengths))
        expected = (
            on_cpu.schedule(kind, q_len=100, **common),
            on_cpu.schedule(kind, q_len=q_cpu, right=0, **common),
            on_cpu.schedule(kind, q_len=100, mask=mask.cpu(), **common),
        )
        for x, y in zip(captured, expected, strict=True):
            assert_same(x, y)


@pytest.mark.parametrize("within", ["eager", "graph"])
def test_more_tokens_than_declared_fail_visibly(within):
    """In a process of its own, as a device assert leaves the GPU's context unusable."""
    program = f"""
import torch
from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.schedules import TileAxis, Wave
layout = JaggedLayout.with_capacity(4, 1000, 500, device="cuda")
def make():
    return layout.schedule(ScheduleKind.ZIGZAG, q_len=1, heads=1, workers=4, axis=TileAxis.KEY, block_kv=1)
make()
if {within == "graph"}:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = make()
    layout._offsets.copy_(torch.tensor([0, 400, 400, 900, 1400]))  # past the check of copy_
    graph.replay()
else:
    layout._offsets = torch.tensor([0, 400, 400, 900, 1400], device="cuda")
    layout._version = 0
    made = make()
torch.cuda.synchronize()
print("nobody noticed")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "nobody noticed" not in run.stdout
    assert "the number of tiles must be at most" in run.stderr or "device-side assert" in run.stderr


def test_a_schedule_built_on_a_cpu_is_used_on_the_gpu():
    lengths = drawn(300, 500)
    keys = JaggedTensor.from_lengths(torch.zeros(int(lengths.sum()), 4, 64, dtype=torch.float16), lengths)
    keys.layout.schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132)
    keys.layout.schedule(ScheduleKind.STREAM_K, q_len=keys.layout, heads=4, workers=132)
    for start in (keys, keys.pin_memory()):
        moved = start.to("cuda", non_blocking=True).layout
        ones = [
            moved.schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132),
            moved.schedule(ScheduleKind.STREAM_K, q_len=moved, heads=4, workers=132),
        ]
        assert moved._schedules.builds == 0
        for one in ones:
            q_len = 100 if one.kind is ScheduleKind.ZIGZAG else keys.layout
            assert_same(one, keys.layout.schedule(one.kind, q_len=q_len, heads=4, workers=132))
            one.require(moved)
            assert one.tiles.data_ptr() % 32 == 0
    with pytest.raises(ValueError, match="the schedule must be on cuda:0, as the layout, got one on cpu"):
        keys.layout.schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132).require(moved)


def test_a_schedule_built_on_a_side_stream_is_used_on_another():
    lengths = lognormal()
    layout = JaggedLayout(offsets_of(lengths, "cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layout.schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132)
    torch.cuda.current_stream().wait_stream(side)
    layout.record_stream(torch.cuda.current_stream())
    schedule = layout.schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132)
    assert layout._schedules.builds == 1
    assert_same(
        schedule, JaggedLayout(offsets_of(lengths)).schedule(ScheduleKind.ZIGZAG, q_len=100, heads=4, workers=132)
    )


def test_the_device_tells_the_number_of_workers():
    schedule = JaggedLayout(offsets_of([5], "cuda")).schedule(ScheduleKind.ZIGZAG, q_len=1, heads=1)
    assert schedule.workers == torch.cuda.get_device_properties("cuda").multi_processor_count


@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_a_hundred_thousand_sequences(kind, axis):
    lengths = torch.randint(0, 201, (100_000,), generator=torch.Generator().manual_seed(0))
    common = dict(q_len=128, heads=4, workers=132, axis=axis)
    gpu, cpu = (JaggedLayout(offsets_of(lengths, device)).schedule(kind, **common) for device in ("cuda", "cpu"))
    assert_same(gpu, cpu)


def milliseconds(run, repeat=30):
    for _ in range(5):
        run()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@pytest.mark.alone
@pytest.mark.parametrize("axis", TileAxis)
@pytest.mark.parametrize("kind", ON_DEVICE)
def test_building_takes_little_time_of_the_gpu(kind, axis, capsys):
    """4096 sequences, 4 heads."""
    lengths = lognormal()
    static = JaggedLayout.with_capacity(4096, int(lengths.sum()), 8192, device="cuda").copy_(
        offsets_of(lengths, "cuda")
    )
    request = JaggedLayout(offsets_of(lengths)).schedule(kind, q_len=128, heads=4, workers=132, axis=axis).request
    eager = milliseconds(lambda: build(request, static))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        build(request, static)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / 1000
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        build(request, static)
    replay = milliseconds(graph.replay)
    with capsys.disabled():
        print(
            f"\n{kind.value} by {axis.value}: graph replay {replay:.3f} ms, {len(kernels)} kernels that alone take "
            f"{busy:.3f} ms, eager {eager:.3f} ms",
            end="",
        )
    # The bar is for the time that the GPU works. By key zigzag sorts 68,000 tiles, and no kernel asks for it.
    if (kind, axis) != (ScheduleKind.ZIGZAG, TileAxis.KEY):
        assert busy < BAR_MS
