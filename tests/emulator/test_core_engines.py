"""Engines: what lands when, in which order, through which proxy, and what instructions cannot take."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jaggedtensor.kernels.emulator import ORDERS, emulate
from jaggedtensor.kernels.emulator.engines import multiply, truncated

BLOCKED: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
HALF: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FULL: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
ACC: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


def statuses(kernel, *args, seeds=3, **kwargs):
    """Of every order, under some seeds."""
    return {
        emulate(kernel, (1,), *(a() for a in args), num_warps=4, order=order, seed=seed, **kwargs).status
        for order in ORDERS
        for seed in range(seeds)
    }


def descriptor(rows=64, columns=32, block=(16, 32)):
    return lambda: TensorDescriptor.from_tensor(torch.zeros(rows, columns), list(block), FULL.value)


def test_products_add_in_fp32_and_tf32_has_ten_bits():
    a, b = torch.randn(64, 96, dtype=torch.bfloat16), torch.randn(96, 32, dtype=torch.bfloat16)
    assert torch.equal(multiply(a, b, None), a.float() @ b.float())
    assert truncated(torch.tensor([1 + 2**-10, 1 + 2**-11])).tolist() == [1 + 2**-10, 1]
    ints = torch.randint(-128, 127, (16, 32), dtype=torch.int8)
    assert torch.equal(multiply(ints, ints.T, None), (ints.long() @ ints.T.long()).int())


# Proxies ------------------------------------------------------------------------------------------------------------


@gluon.jit
def fence_kernel(target, STORES: gl.constexpr, FENCE: gl.constexpr, PENDING: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], FULL)
    for i in gl.static_range(STORES):
        staging.store(gl.full([16, 32], i, gl.float32, BLOCKED))
        if FENCE:
            fence_async_shared()
        tma.async_store(target, [16 * i, 0], staging)
        tma.store_wait(PENDING)
    tma.store_wait(0)


def test_a_store_needs_a_fence_before_and_a_wait_after():
    assert statuses(fence_kernel, descriptor(), STORES=3, FENCE=True, PENDING=0) == {"ok"}
    assert statuses(fence_kernel, descriptor(), STORES=1, FENCE=False, PENDING=0) == {"missing fence"}
    assert statuses(fence_kernel, descriptor(), STORES=2, FENCE=True, PENDING=1) == {"race"}


def test_fences_that_the_compiler_adds_within_a_role_count_if_asked_for():
    unfenced = {"STORES": 1, "FENCE": False, "PENDING": 0, "compiler_fences": True}
    assert statuses(fence_kernel, descriptor(), **unfenced) == {"ok"}
    assert statuses(reader_fence_kernel, descriptor(), WHERE="after", compiler_fences=True) == {"missing fence"}


def test_a_fence_that_a_later_reader_makes_counts_too():
    assert statuses(reader_fence_kernel, descriptor(), WHERE="reader") == {"ok"}
    assert statuses(reader_fence_kernel, descriptor(), WHERE="writer") == {"ok"}
    assert statuses(reader_fence_kernel, descriptor(), WHERE="after") == {"missing fence"}


@gluon.jit
def fill_role(staging, ready, WHERE: gl.constexpr):
    staging.store(gl.full([16, 32], 1, gl.float32, BLOCKED))
    if WHERE == "writer":
        fence_async_shared()
    mbarrier.arrive(ready)
    if WHERE == "after":
        fence_async_shared()


@gluon.jit
def send_role(target, staging, ready, WHERE: gl.constexpr):
    mbarrier.wait(ready, 0)
    if WHERE == "reader":
        fence_async_shared()
    tma.async_store(target, [0, 0], staging)
    tma.store_wait(0)


@gluon.jit
def reader_fence_kernel(target, WHERE: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], FULL)
    ready = mbarrier.allocate_mbarrier()
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(fill_role, (staging, ready, WHERE)), (send_role, (target, staging, ready, WHERE))], [1])


@gluon.jit
def sum_kernel(target, TIMES: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], FULL)
    staging.store(gl.full([16, 32], 1, gl.float32, BLOCKED))
    fence_async_shared()
    for _ in gl.static_range(TIMES):
        tma.async_atomic_add(target, [0, 0], staging)
    tma.store_wait(0)


@gluon.jit
def twice_kernel(target, ADD: gl.constexpr):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], FULL)
    staging.store(gl.full([16, 32], 1, gl.float32, BLOCKED))
    fence_async_shared()
    if ADD:
        tma.async_atomic_add(target, [0, 0], staging)
    else:
        tma.async_store(target, [0, 0], staging)
    tma.store_wait(0)


def test_reductions_of_several_programs_add_up_but_stores_race():
    for order in ORDERS:
        out = torch.zeros(16, 32)
        desc = TensorDescriptor.from_tensor(out, [16, 32], FULL.value)
        emulate(twice_kernel, (3,), desc, num_warps=4, order=order, ADD=True).raise_if_bad()
        assert (out == 3).all()
        emulate(sum_kernel, (2,), desc, num_warps=4, order=order, TIMES=4).raise_if_bad()
        assert (out == 11).all()
        assert emulate(twice_kernel, (3,), desc, num_warps=4, order=order, ADD=False).status == "race"


@gluon.jit
def older_kernel(target, raw, out):
    staging = gl.allocate_shared_memory(gl.float32, [16, 32], FULL)
    staging.store(gl.full([16, 32], 1, gl.float32, BLOCKED))
    fence_async_shared()
    tma.async_store(target, [0, 0], staging)
    tma.async_store(target, [16, 0], staging)
    tma.store_wait(0)
    tma.store_wait(1, read_only=False)
    gl.store(out, gl.load(raw))
    tma.store_wait(0, read_only=False)


def test_of_two_stores_the_older_one_is_waited_for_even_if_the_newer_one_is_there():
    for order in ORDERS:
        for seed in range(8):
            target, out = torch.zeros(32, 32), torch.zeros(1)
            desc = TensorDescriptor.from_tensor(target, [16, 32], FULL.value)
            emulate(older_kernel, (1,), desc, target, out, num_warps=4, order=order, seed=seed).raise_if_bad()
            assert out == 1


# wgmma --------------------------------------------------------------------------------------------------------------


@gluon.jit
def product_kernel(a, b, out, WAIT: gl.constexpr, USE: gl.constexpr, FENCE: gl.constexpr = True):
    i = (
        gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))[:, None] * 64
        + gl.arange(0, 64, gl.SliceLayout(0, BLOCKED))[None, :]
    )
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALF, gl.load(a + i))
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALF, gl.load(b + i))
    if FENCE:
        fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, ACC)
    token = warpgroup_mma(left, right.permute((1, 0)), acc, is_async=True)
    token = warpgroup_mma(left, right, token, is_async=True)
    if USE:
        left.store(gl.zeros([64, 64], gl.bfloat16, BLOCKED))
    result = warpgroup_mma_wait(WAIT, deps=(token,))
    gl.store(out + i, gl.convert_layout(result, BLOCKED))
    warpgroup_mma_wait(0, deps=(token,))


def square(value=None):
    return torch.randn(64, 64).bfloat16() if value is None else torch.full((64, 64), value)


def test_products_chain_and_are_waited_for():
    a, b = square(), square()
    expected = a.float() @ b.float().T + a.float() @ b.float()
    for order in ORDERS:
        out = square(float("nan"))
        emulate(product_kernel, (1,), a, b, out, num_warps=4, order=order, WAIT=0, USE=False).raise_if_bad()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "kind"),
    [({"WAIT": 1}, "accumulator in flight"), ({"USE": True}, "race"), ({"FENCE": False}, "missing fence")],
)
def test_a_product_used_too_early_is_found_in_every_order(change, kind):
    assert statuses(product_kernel, square, square, square, **{"WAIT": 0, "USE": False, **change}) == {kind}


@gluon.jit
def shape_kernel(M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, DTYPE: gl.constexpr, TRANSPOSED: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(32, DTYPE.primitive_bitwidth, 2)
    zero_a = gl.zeros([M, K], DTYPE, BLOCKED)
    zero_b = gl.zeros([N, K] if TRANSPOSED else [K, N], DTYPE, BLOCKED)
    a = gl.allocate_shared_memory(DTYPE, [M, K], layout, zero_a)
    b = gl.allocate_shared_memory(DTYPE, [N, K] if TRANSPOSED else [K, N], layout, zero_b)
    fence_async_shared()
    right = b
    if TRANSPOSED:
        right = b.permute((1, 0))
    warpgroup_mma(a, right, gl.zeros([M, N], gl.float32, BLOCKED))


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "transposed", "fits"),
    [
        (64, 8, 16, gl.bfloat16, False, True),
        (64, 8, 16, gl.bfloat16, True, True),
        (32, 8, 16, gl.bfloat16, True, False),
        (64, 4, 16, gl.bfloat16, True, False),
        (64, 8, 8, gl.bfloat16, True, False),
        (64, 8, 8, gl.float32, True, True),
        (64, 8, 8, gl.float32, False, False),
        (64, 8, 32, gl.float8e4nv, True, True),
        (64, 8, 16, gl.float8e4nv, True, False),
        (64, 8, 32, gl.float8e4nv, False, False),
    ],
)
def test_what_wgmma_takes(m, n, k, dtype, transposed, fits):
    report = emulate(shape_kernel, (1,), num_warps=4, M=m, N=n, K=k, DTYPE=dtype, TRANSPOSED=transposed)
    assert report.status == ("ok" if fits else "bad operand"), str(report)


def test_each_target_has_its_own_tensor_cores():
    report = emulate(
        shape_kernel, (1,), num_warps=4, target="sm100", M=64, N=8, K=16, DTYPE=gl.bfloat16, TRANSPOSED=True
    )
    assert report.status == "bad operand"
    assert emulate(tensor_kernel, (1,), square(), num_warps=4, WAIT=True, COLUMNS=64).status == "bad operand"


@gluon.jit
def pair_kernel(desc, FLAT: gl.constexpr):
    """A block [16, 1, 32] whose rows two CTAs share, into a buffer with as many dimensions or with two."""
    buffer = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2, cga_layout=[[1, 0]])
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, desc.nbytes_per_cta)
    tma.async_load(desc, [0, 0, 0], full, buffer.reinterpret(gl.float32, [16, 32], flat) if FLAT else buffer)
    mbarrier.wait(full, 0)


def test_a_block_that_ctas_share_has_the_dimensions_of_its_buffer():
    """Triton adds a CTA's place to the last dimensions of the block, here to the second and the third."""
    layout = gl.NVMMASharedLayout(128, 32, 3, cga_layout=[[1, 0, 0]])
    desc = TensorDescriptor.from_tensor(torch.zeros(64, 4, 32), [16, 1, 32], layout)
    for flat, status in ((False, "ok"), (True, "bad operand")):
        assert emulate(pair_kernel, (1,), desc, num_warps=4, num_ctas=2, target="sm100", FLAT=flat).status == status


# tcgen05 ------------------------------------------------------------------------------------------------------------


@gluon.jit
def tensor_kernel(a, WAIT: gl.constexpr, COLUMNS: gl.constexpr):
    """S = a aᵀ, then P = bf16(S) over S, then O = P a: two products that only their queue orders."""
    layout: gl.constexpr = TensorMemoryLayout((64, 64), 1)
    i = (
        gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))[:, None] * 64
        + gl.arange(0, 64, gl.SliceLayout(0, BLOCKED))[None, :]
    )
    operand = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALF, gl.load(a + i))
    fence_async_shared()
    s = allocate_tensor_memory(gl.float32, [64, 64], layout)
    o = allocate_tensor_memory(gl.float32, [64, 64], layout)
    p = s._reinterpret(gl.bfloat16, [64, 64], layout)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(done, count=1)
    blackwell.tcgen05_mma(operand, operand.permute((1, 0)), s, use_acc=False)
    blackwell.tcgen05_commit(done)
    if WAIT:
        mbarrier.wait(done, 0)
    p.store(s.load(BLOCKED).to(gl.bfloat16))
    blackwell.tcgen05_mma(p, operand, o, use_acc=False)
    blackwell.tcgen05_mma(operand, operand, s, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 1 if WAIT else 0)
    gl.store(a + i, (o.load(BLOCKED) + s.load(BLOCKED)).to(gl.bfloat16))
    gl.static_assert(COLUMNS == 64)


def test_products_of_one_role_keep_their_order_and_a_commit_tells_of_their_end():
    for order in ORDERS:
        for seed in range(3):
            a = (torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 4).bfloat16()
            x = a.float()
            expected = (x @ x.T).bfloat16().float() @ x + x @ x
            emulate(
                tensor_kernel, (1,), a, num_warps=4, target="sm100", order=order, seed=seed, WAIT=True, COLUMNS=64
            ).raise_if_bad()
            torch.testing.assert_close(a.float(), expected.bfloat16().float(), rtol=2e-2, atol=2e-2)


def test_an_accumulator_read_before_its_commit_is_found_in_every_order():
    assert statuses(tensor_kernel, square, target="sm100", WAIT=False, COLUMNS=64) == {"race"}


@gluon.jit
def narrow_role(acc):
    acc.load()


@gluon.jit
def wide_role(acc):
    acc.store(gl.zeros([64, 64], gl.float32, BLOCKED))


@gluon.jit
def warps_kernel(WARPS: gl.constexpr):
    acc = allocate_tensor_memory(gl.float32, [64, 64], TensorMemoryLayout((64, 64), 1))
    acc.store(gl.zeros([64, 64], gl.float32, BLOCKED))
    gl.warp_specialize([(narrow_role, (acc,)), (narrow_role, (acc,))], [WARPS])


def test_tensor_memory_is_read_by_whole_groups_of_warps():
    assert emulate(warps_kernel, (1,), num_warps=4, target="sm100", WARPS=4).status == "ok"
    assert emulate(warps_kernel, (1,), num_warps=4, target="sm100", WARPS=1).status == "bad operand"


@gluon.jit
def idle_role():
    pass


@gluon.jit
def registers_kernel(WARPS: gl.constexpr, REGISTERS: gl.constexpr):
    gl.warp_specialize([(idle_role, ()), (idle_role, ()), (idle_role, ())], WARPS, REGISTERS)


@pytest.mark.parametrize(
    ("warps", "registers", "maxnreg", "fits"),
    [
        ([4, 1], [240, 24], 168, True),
        ([4, 4], [216, 216], None, True),
        ([4, 4], [240, 256], None, False),
        ([1, 1], [24, 400], None, False),
    ],
)
def test_registers_are_dealt_out(warps, registers, maxnreg, fits):
    report = emulate(registers_kernel, (1,), num_warps=4, maxnreg=maxnreg, WARPS=warps, REGISTERS=registers)
    assert report.status == ("ok" if fits else "budget"), str(report)


# Clusters -----------------------------------------------------------------------------------------------------------


@gluon.jit
def chain_kernel(out, done, NUMBER: gl.constexpr):
    """Each program but the last waits for the next one."""
    turn, me = NUMBER - 1 - gl.program_id(0), gl.program_id(0)
    so_far = 0
    while so_far < turn:
        so_far = gl.atomic_add(done, 0, sem="acquire", scope="gpu")
    gl.store(out + me, so_far)
    gl.atomic_add(done, 1, sem="release", scope="gpu")


@pytest.mark.parametrize("order", ORDERS)
def test_programs_that_wait_for_later_ones_end_if_they_run_together(order):
    out, done = torch.full((4,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    emulate(chain_kernel, (4,), out, done, 4, num_warps=4, order=order, together=4).raise_if_bad()
    assert out.tolist() == [3, 2, 1, 0]
    if order == "round_robin":
        report = emulate(chain_kernel, (4,), out, done.zero_(), 4, num_warps=4, order=order, max_steps=2000)
        assert report.status == "too long"
