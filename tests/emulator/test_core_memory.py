"""Memory: which bytes an access touches, what descriptors clip, poison, aliases, budgets."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.kernels.emulator import ORDERS, UnknownBuiltin, emulate
from jaggedtensor.kernels.emulator.checks import Actor, store
from jaggedtensor.kernels.emulator.errors import OutOfBounds, Outstanding, OverBudget, Race, Uninitialised
from jaggedtensor.kernels.emulator.language.blackwell import _builder, tensor_view
from jaggedtensor.kernels.emulator.memory import Holder, Memory, View, row_major, strided_footprint

ROWS: gl.constexpr = gl.constexpr(16)
COLS: gl.constexpr = gl.constexpr(32)
LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_footprint_has_the_granules_of_its_elements_and_no_other(data):
    itemsize = data.draw(st.sampled_from([2, 4, 8]))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    strides = tuple(itemsize * data.draw(st.integers(1, 40)) for _ in shape)
    offset = itemsize * data.draw(st.integers(0, 30))
    touched = set()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)).tolist():
        start = offset + sum(i * s for i, s in zip(index, strides, strict=True))
        touched |= set(range(start // 2, (start + itemsize) // 2))
    footprint = strided_footprint(offset, shape, strides, itemsize)
    assert {i for i in range(footprint.mask.bit_length()) if footprint.mask >> i & 1} == touched
    assert (footprint.low, footprint.high) == (min(touched), max(touched) + 1)


class Stranger(Actor):
    """Somebody who stores."""

    label, clock, fenced, timeline = "somebody", [1], [], 0

    def chain(self):
        return ()


def shared_view(shape, dtype=tl.float16):
    memory = Memory("shared", 0)
    size = torch.tensor(shape).prod().item() * 2
    return memory, View(Holder(memory.allocate("x", size, 16, ())), dtype, 0, shape, row_major(shape))


def test_views_slice_permute_and_reshape_as_torch_does():
    memory, view = shared_view((4, 6, 8))
    x = torch.arange(192, dtype=torch.float16).reshape(4, 6, 8)
    view.write(memory, x)
    assert torch.equal(view.sliced(0, 2, 1, squeeze=True).permuted((1, 0)).read(memory), x[2].T)
    assert torch.equal(view.sliced(2, 3, 4).read(memory), x[:, :, 3:7])
    assert torch.equal(view.reshaped((24, 8)).read(memory), x.reshape(24, 8))
    assert not view.sliced(2, 0, 4).footprint().meets(view.sliced(2, 4, 4).footprint())
    assert view.sliced(2, 0, 5).footprint().meets(view.sliced(2, 4, 4).footprint())


def test_memory_that_is_given_back_is_given_out_again_and_counts_as_not_written():
    memory, view = shared_view((64, 64))
    assert view.read(memory).isnan().all()
    store(Stranger(), view, memory, torch.ones(64, 64))
    footprint, log = view.footprint(), view.allocation.log
    assert view.allocation.covers(footprint)
    del view
    again, other = memory.allocate("y", 8192, 16, ()), memory.allocate("z", 64, 16, ())
    assert (again.start, other.start) == (0, 8192)
    assert not again.covers(footprint)
    assert log.whole() is again.log
    assert len(again.log.writes) == 1
    assert memory.allocate("w", 227 * 1024, 16, ()) is None


def tensor_memory(columns):
    memory = Memory("tensor", 0)
    return memory, Holder(memory.allocate("acc", columns, 1, ()))


def test_half_precision_over_an_fp32_buffer_takes_half_of_its_columns():
    memory, holder = tensor_memory(128)
    s = tensor_view(holder, tl.float32, 0, TensorMemoryLayout((128, 128), 1), (128, 128))
    p = tensor_view(holder, tl.bfloat16, 0, TensorMemoryLayout((128, 128), 1), (128, 128))
    assert p.footprint().meets(s.sliced(1, 0, 64).footprint())
    assert not p.footprint().meets(s.sliced(1, 64, 64).footprint())
    s.write(memory, torch.ones(128, 128))
    p.write(memory, torch.full((128, 128), 2.0))
    assert (s.sliced(1, 64, 64).read(memory) == 1).all()
    assert not (s.sliced(1, 0, 64).read(memory) == 1).any()


def test_rows_past_a_block_of_tensor_memory_lie_in_further_columns():
    memory, holder = tensor_memory(256)
    view = tensor_view(holder, tl.float32, 0, TensorMemoryLayout((128, 64), 1), (256, 128))
    x = torch.randn(256, 128)
    view.write(memory, x)
    assert torch.equal(view.read(memory), x)
    flat = memory.typed(torch.float32).view(128, -1)
    assert torch.equal(flat[:, :64], x[:128, :64])
    assert torch.equal(flat[:, 64:128], x[128:, :64])


# Descriptors --------------------------------------------------------------------------------------------------------


@gluon.jit
def copy_kernel(source, target, row, column, to_row):
    """A block from one place to another, by way of shared memory."""
    buffer = gl.allocate_shared_memory(gl.float32, source.block_shape, source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    tma.async_load(source, [row, column], full, buffer)
    mbarrier.wait(full, 0)
    tma.async_store(target, [to_row, 0], buffer)
    tma.store_wait(0)


def copied(x, out, row, column, to_row, padding="zero"):
    source = TensorDescriptor.from_tensor(x, [16, 32], SHARED.value, padding)
    target = TensorDescriptor.from_tensor(out, [16, 32], SHARED.value)
    for order in ("round_robin", "late"):
        emulate(copy_kernel, (1,), source, target, row, column, to_row, num_warps=4, order=order).raise_if_bad()
    return out


@pytest.mark.parametrize(("row", "column"), [(0, 0), (-3, 0), (8, 16), (-40, 0), (0, 64), (15, -31)])
def test_a_load_fills_what_is_outside(row, column):
    x = torch.randn(20, 40)
    padded = torch.zeros(120, 160)
    padded[50:70, 50:90] = x
    out = copied(x, torch.full((16, 32), 7.0), row, column, 0)
    assert torch.equal(out, padded[50 + row : 66 + row, 50 + column : 82 + column])


def test_a_load_fills_with_nan_if_the_descriptor_says_so():
    assert copied(torch.ones(8, 32), torch.zeros(16, 32), 0, 0, 0, "nan")[8:].isnan().all()


def test_a_store_is_clipped():
    x, out = torch.randn(16, 32), torch.full((24, 32), 7.0)
    copied(x, out, 0, 0, -6)
    assert torch.equal(out[:10], x[6:])
    assert (out[10:] == 7).all()
    copied(x, out, 0, 0, 20)
    assert torch.equal(out[20:], x[:4])


@gluon.jit
def ragged_kernel(source, target, start, count, row):
    """Rows row.. of a sequence, by descriptors whose strides wrap (triton.tools.ragged_tma)."""
    buffer = gl.allocate_shared_memory(gl.float32, source.block_shape, source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    place = [1 << 30, start + count, (1 << 30) - count + row, 0]
    tma.async_load(source, place, full, buffer)
    mbarrier.wait(full, 0)
    tma.async_atomic_add(target, place, buffer)
    tma.store_wait(0)


def ragged(x):
    row = x.stride(0)
    layout = gl.NVMMASharedLayout(128, 32, 4)
    sizes = [0x7FFF0000, 0x7FFF0000, 1 << 30, x.shape[1]]
    return TensorDescriptor(x, sizes, [2**34 - row, row, row, 1], [1, 1, 16, 32], layout)


@pytest.mark.parametrize(("start", "count", "row"), [(5, 40, 16), (5, 20, 16), (0, 3, 0), (50, 14, 0)])
def test_a_ragged_descriptor_ends_where_the_sequence_does(start, count, row):
    x, out = torch.randn(64, 32), torch.full((64, 32), 1.0)
    emulate(ragged_kernel, (1,), ragged(x), ragged(out), start, count, row, num_warps=4).raise_if_bad()
    expected = torch.ones(64, 32)
    begin, end = start + row, start + min(count, row + 16)
    expected[begin:end] += x[begin:end]
    assert torch.equal(out, expected)


def test_a_ragged_descriptor_that_leaves_the_tensor_is_found():
    with pytest.raises(OutOfBounds, match=r"elements \d+..\d+ of source.base, which has 2048"):
        emulate(
            ragged_kernel, (1,), ragged(torch.zeros(64, 32)), ragged(torch.zeros(99, 32)), 60, 20, 0, num_warps=4
        ).raise_if_bad()


@gluon.jit
def relayout_kernel(source, out, R: gl.constexpr, C: gl.constexpr):
    buffer = gl.allocate_shared_memory(gl.float32, source.block_shape, source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    tma.async_load(source, [0, 0], full, buffer)
    mbarrier.wait(full, 0)
    other = buffer._reinterpret(gl.float32, [R, C], source.layout)
    gl.store(out, gl.sum(gl.sum(other.load(LAYOUT), 1), 0))


def test_bytes_read_in_another_layout_than_they_were_written_in_are_not_guessed():
    """With 128 bytes of swizzling, rows of 64 fp32 are two panels, those of 32 one."""
    source = TensorDescriptor.from_tensor(torch.ones(16, 64), [16, 64], SHARED.value)
    with pytest.raises(UnknownBuiltin, match="where the bytes of buffer lie in another layout"):
        emulate(relayout_kernel, (1,), source, torch.zeros(1), num_warps=4, R=32, C=32)
    narrow = TensorDescriptor.from_tensor(torch.ones(16, 32), [16, 32], SHARED.value)
    out = torch.zeros(1)
    emulate(relayout_kernel, (1,), narrow, out, num_warps=4, R=8, C=32).raise_if_bad()
    assert out.item() == 256
    with pytest.raises(OutOfBounds, match=r"reinterprets buffer \(2048 bytes\) as \[17, 32\] of fp32"):
        emulate(relayout_kernel, (1,), narrow, out, num_warps=4, R=17, C=32).raise_if_bad()


@gluon.jit
def panels_kernel(out, R: gl.constexpr):
    """Two buffers of 32 columns, read as one of 64."""
    buffers = gl.allocate_shared_memory(gl.float32, [2, R, 32], SHARED)
    for i in gl.static_range(2):
        buffers.index(i).store(gl.full([R, 32], i + 1.0, gl.float32, LAYOUT))
    both = buffers._reinterpret(gl.float32, [1, R, 64], SHARED).index(0)
    rows, columns = gl.arange(0, R, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * 64 + columns[None], both.load(LAYOUT))
    turned = both.permute((1, 0)).load(LAYOUT)
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, R, gl.SliceLayout(0, LAYOUT))
    gl.store(out + R * 64 + rows[:, None] * R + columns[None], turned)


def test_buffers_of_one_panel_each_are_read_as_a_block_of_several():
    """As Triton has them: panels lie one after the other, so that the last bit of an offset is that of the panel."""
    builder, _ = _builder()
    for cga in ([], [[0, 1]]):
        layout = gl.NVMMASharedLayout(128, 32, 2, cga_layout=cga)
        one, two = (builder.to_linear_layout(layout._to_ir(builder), [16, n << len(cga)]) for n in (32, 64))
        assert two.offset_bases == [*one.offset_bases, [0, 32]]
    out = torch.zeros(2, 16 * 64)
    emulate(panels_kernel, (1,), out, num_warps=4, R=16).raise_if_bad()
    wanted = torch.tensor([1.0, 2.0]).repeat_interleave(32).expand(16, 64)
    assert torch.equal(out[0].view(16, 64), wanted)
    assert torch.equal(out[1].view(64, 16), wanted.T)


# Judgement ----------------------------------------------------------------------------------------------------------


@gluon.jit
def hole_kernel(out, STORE: gl.constexpr):
    i = (
        gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None] * COLS
        + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))[None]
    )
    staging = gl.allocate_shared_memory(gl.float32, [ROWS, COLS], SHARED)
    staging.slice(0, STORE, dim=1).store(gl.full([ROWS, STORE], 1.0, gl.float32, LAYOUT))
    gl.store(out + i, staging.load(LAYOUT))


def test_a_read_of_what_nobody_wrote_is_found():
    emulate(hole_kernel, (1,), torch.zeros(16, 32), num_warps=4, STORE=32).raise_if_bad()
    with pytest.raises(Uninitialised, match="staging, of which nobody has written 1024 bytes"):
        emulate(hole_kernel, (1,), torch.zeros(16, 32), num_warps=4, STORE=16).raise_if_bad()


@gluon.jit
def unwaited_kernel(target, WAIT: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [ROWS, COLS], SHARED)
    staging.store(gl.full([ROWS, COLS], 1.0, gl.float32, LAYOUT))
    fence_async_shared()
    tma.async_store(target, [0, 0], staging)
    if WAIT:
        tma.store_wait(0)


def test_a_store_under_way_when_the_cta_ends_is_found():
    out = torch.zeros(16, 32)
    target = TensorDescriptor.from_tensor(out, [16, 32], SHARED.value)
    emulate(unwaited_kernel, (1,), target, num_warps=4, WAIT=True).raise_if_bad()
    assert (out == 1).all()
    with pytest.raises(Outstanding, match=r"tma store of unwaited_kernel \(staging\) may still be at its memory"):
        emulate(unwaited_kernel, (1,), target, num_warps=4, WAIT=False).raise_if_bad()


@gluon.jit
def large_kernel(BYTES: gl.constexpr):
    small = gl.allocate_shared_memory(gl.int8, [1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    large = gl.allocate_shared_memory(gl.int8, [BYTES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    small._keep_alive()
    large._keep_alive()


def test_shared_memory_has_its_budget():
    assert emulate(large_kernel, (1,), num_warps=4, BYTES=226 * 1024).raise_if_bad().shared_peak == 227 * 1024
    with pytest.raises(OverBudget, match="large needs 231425 bytes of shared memory; 1024 of 232448 are taken"):
        emulate(large_kernel, (1,), num_warps=4, BYTES=226 * 1024 + 1).raise_if_bad()


@gluon.jit
def looping_kernel(target, N, UNROLLED: gl.constexpr, WAIT: gl.constexpr):
    for i in range(N):
        large = gl.allocate_shared_memory(gl.float32, [1024, 32], SHARED)
        tile = large.slice(0, ROWS)
        if WAIT:
            tma.store_wait(0)  # the last store may read until here, from the same bytes
        tile.store(gl.full([ROWS, COLS], 1.0, gl.float32, LAYOUT))
        fence_async_shared()
        tma.async_store(target, [ROWS * i, 0], tile)
    kept = ()
    for _ in gl.static_range(UNROLLED):
        kept += (gl.allocate_shared_memory(gl.float32, [64, 32], SHARED),)
    for i in gl.static_range(UNROLLED):
        kept[i].store(gl.full([64, 32], i, gl.float32, gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])))
    for i in gl.static_range(UNROLLED):
        gl.device_assert(gl.max(gl.max(kept[i].load(LAYOUT), 1), 0) == i)
    tma.store_wait(0)


def test_a_loop_comes_to_the_same_buffer_and_an_unrolled_one_has_one_for_each_step():
    def run(order="round_robin", **kwargs):
        out = torch.zeros(80, 32)
        target = TensorDescriptor.from_tensor(out, [16, 32], SHARED.value)
        report = emulate(looping_kernel, (1,), target, 5, num_warps=4, order=order, **kwargs)
        assert not report.ok or bool((out == 1).all())
        return report

    assert run(UNROLLED=4, WAIT=True).raise_if_bad().shared_peak == 131072 + 4 * 8192
    for order in ORDERS:
        run(order, UNROLLED=1, WAIT=True).raise_if_bad()
        with pytest.raises(Race, match=r"(reads|writes) large while"):
            run(order, UNROLLED=1, WAIT=False).raise_if_bad()


@gluon.jit
def columns_kernel(N: gl.constexpr, M: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout((M, 128), 1)
    first = allocate_tensor_memory(gl.float32, [N, M, 128], layout)
    second = allocate_tensor_memory(gl.bfloat16, [M, 256], TensorMemoryLayout((M, 128), 1))
    gl.static_assert(first.shape[0] == N)
    gl.static_assert(second.shape[1] == 256)


def test_tensor_memory_has_its_budget_and_half_the_lanes_take_half():
    assert emulate(columns_kernel, (1,), num_warps=4, target="sm100", N=3, M=128).raise_if_bad().tensor_peak == 512
    with pytest.raises(OverBudget, match="second needs 128 columns of tensor memory; of 512, taken are first 512"):
        emulate(columns_kernel, (1,), num_warps=4, target="sm100", N=4, M=128).raise_if_bad()
    emulate(columns_kernel, (1,), num_warps=4, target="sm100", N=7, M=64).raise_if_bad()
