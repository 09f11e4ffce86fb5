"""The language: scalars that wrap and divide as on the chip, masks, aggregates, and names that are not known."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaggedtensor.kernels.emulator import UnknownBuiltin, emulate
from jaggedtensor.kernels.emulator.errors import KernelRaised, OutOfBounds, Race
from jaggedtensor.kernels.emulator.language.values import Scalar, Tensor, binary

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


def run(kernel, *args, grid=(1,), **kwargs):
    return emulate(kernel, grid, *args, num_warps=4, **kwargs)


@gluon.jit
def integers_kernel(out, a, b, big):
    gl.store(out, a // b)
    gl.store(out + 1, a % b)
    gl.store(out + 2, big + big)
    gl.store(out + 3, a >> 1)
    gl.store(out + 4, (a.to(gl.int64) * big).to(gl.int32))
    gl.store(out + 5, gl.where(a < b, 1, 2))
    total = gl.to_tensor(0)
    for i in range(a, b, 3):
        total += i
    gl.store(out + 6, total)


def test_integers_wrap_and_divide_as_in_c():
    out = torch.zeros(7, dtype=torch.int32)
    run(integers_kernel, out, -7, 2, 2**30).raise_if_bad()
    assert out.tolist() == [-3, -1, -(2**31), -4, ((-7 * 2**30) + 2**31) % 2**32 - 2**31, 1, -7 - 4 - 1]


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        (tl.int32, tl.int64, "int64"),
        (tl.int32, tl.uint32, "uint32"),
        (tl.float16, tl.bfloat16, "fp16"),
        (tl.bfloat16, tl.float32, "fp32"),
        (tl.int64, tl.float16, "fp16"),
        (tl.int1, tl.int32, "int32"),
    ],
)
def test_types_are_promoted_as_triton_does(a, b, name):
    assert binary("or" if not b.is_floating() else "mul", Scalar(1, a), Scalar(1, b)).dtype.name == name


def test_a_literal_does_not_widen_a_block():
    half = Tensor(torch.ones(4, dtype=torch.float16), tl.float16)
    assert (half * 2.5).dtype == tl.float16
    assert (half / 2).dtype == tl.float32
    assert (Tensor(torch.ones(4, dtype=torch.int32), tl.int32) * 0.5).dtype == tl.float32


def test_unsigned_blocks_wrap_at_their_width():
    x = Tensor(torch.tensor([2**32 - 1]), tl.uint32)
    assert (x + 2).data.tolist() == [1]
    assert (x >> 4).data.tolist() == [2**28 - 1]


@gluon.jit
def blocks_kernel(x, out, n, N: gl.constexpr):
    i = gl.arange(0, N, LAYOUT)
    v = gl.load(x + i, mask=i < n, other=-1.0)
    low, high = v.reshape([2, N // 2]).permute((1, 0)).split()
    gl.store(out, gl.sum(v, 0))
    gl.store(out + 1, gl.max(v, 0))
    gl.store(out + 2, gl.sum(gl.maximum(low, high), 0))
    gl.store(out + 3, gl.reduce(v, 0, smaller))
    gl.store(out + 4, gl.sum(gl.associative_scan(v, 0, smaller), 0))
    gl.store(out + 5, tl.cdiv(n, 4).to(gl.float32))


@gluon.jit
def smaller(a, b):
    return gl.where(a < b, a, b)


def test_blocks_are_masked_reshaped_reduced_and_scanned():
    x, out = torch.tensor([3.0, 5, 2, 7, 1, 100]), torch.full((6,), float("nan"))
    run(blocks_kernel, x, out, 5, N=8).raise_if_bad()
    v = torch.tensor([3.0, 5, 2, 7, 1, -1, -1, -1])
    expected = [15, 7, torch.maximum(v[:4], v[4:]).sum(), -1, v.cummin(0).values.sum(), 2]
    assert out.tolist() == [float(e) for e in expected]


@gluon.jit
def masked_kernel(x, out, N: gl.constexpr):
    i = gl.arange(0, N, LAYOUT)
    gl.store(out + i, gl.load(x + i, mask=i < 2))


def test_masked_lanes_without_other_hold_poison():
    out = torch.zeros(4)
    run(masked_kernel, torch.ones(4), out, N=4).raise_if_bad()
    assert out[:2].tolist() == [1, 1]
    assert out[2:].isnan().all()


def test_an_access_past_the_end_is_found_with_its_line():
    with pytest.raises(OutOfBounds, match=r"reads elements 0..7 of x, which has 4[\s\S]*test_core_language.py:\d+ in"):
        run(masked_kernel_without_mask, torch.ones(4), torch.zeros(8), N=8).raise_if_bad()


@gluon.jit
def masked_kernel_without_mask(x, out, N: gl.constexpr):
    i = gl.arange(0, N, LAYOUT)
    gl.store(out + i, gl.load(x + i))


def test_rows_between_those_of_a_view_are_still_its_storage_but_not_what_is_behind():
    base = torch.zeros(10)
    with pytest.raises(OutOfBounds, match="which has 7"):
        run(masked_kernel_without_mask, base.view(5, 2)[:4, 0], torch.zeros(8), N=8).raise_if_bad()


@gluon.aggregate
class Pair:
    first: gl.tensor
    width: gl.constexpr

    @gluon.jit
    def moved(self, by):
        return Pair(self.first + by, self.width)

    @gluon.jit
    def wide(self):
        return self.first * self.width


@gluon.constexpr_function
def doubled(n):
    return [n * 2 for _ in range(2)][1]


@gluon.jit
def aggregate_kernel(out, n, WIDTH: gl.constexpr):
    pair = Pair(n, doubled(WIDTH))
    other = pair.moved(1)
    gl.store(out, pair.wide())
    gl.store(out + 1, other.wide())


@gluon.jit
def assigning_kernel(out, n):
    pair = Pair(n, 2)
    pair.first = n + 1
    gl.store(out, pair.first)


def test_aggregates_have_methods_and_cannot_change():
    out = torch.zeros(2, dtype=torch.int32)
    run(aggregate_kernel, out, 3, WIDTH=5).raise_if_bad()
    assert out.tolist() == [30, 40]
    with pytest.raises(KernelRaised, match="immutable aggregate Pair"):
        run(assigning_kernel, out, 3).raise_if_bad()


@gluon.jit
def unknown_kernel(out):
    gl.store(out, gl.nvidia.hopper.mma_v2(1, 2, 3))


@gluon.jit
def method_kernel(x, out):
    gl.store(out, gl.load(x).frobnicate())


def test_what_is_not_emulated_raises_by_name():
    with pytest.raises(UnknownBuiltin, match=r"gl\.nvidia\.ampere\.mma_v2: add it to jaggedtensor/kernels/emulator/"):
        run(unknown_kernel, torch.zeros(1))
    with pytest.raises(UnknownBuiltin, match=r"tensor\.frobnicate"):
        run(method_kernel, torch.zeros(1), torch.zeros(1))


@triton.jit
def shared_with_triton(x, factor):
    return tl.where(x > 0, x * factor, tl.zeros_like(x))


def make_kernel(factor):
    """A kernel that closes over a compile-time value."""

    @gluon.jit
    def kernel(x, out):
        i = gl.arange(0, 4, LAYOUT)
        gl.store(out + i, shared_with_triton(gl.load(x + i), factor))

    return kernel


def test_closures_and_functions_of_triton_run():
    out = torch.zeros(4)
    run(make_kernel(tl.constexpr(3)), torch.tensor([-1.0, 1, 2, -3]), out).raise_if_bad()
    assert out.tolist() == [0, 3, 6, 0]


@gluon.jit
def programs_kernel(out, scratch):
    gl.store(out + gl.program_id(0) * gl.num_programs(1) + gl.program_id(1), gl.atomic_add(scratch, 1))


@gluon.jit
def overlapping_kernel(out, N: gl.constexpr):
    gl.store(out + gl.program_id(0) + gl.arange(0, N, LAYOUT), gl.full([N], 1.0, gl.float32, LAYOUT))


def test_every_program_runs_once_in_any_order():
    for order in ("round_robin", "random"):
        out, scratch = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        report = run(programs_kernel, out, scratch, grid=(2, 3), order=order, seed=5).raise_if_bad()
        assert sorted(out.tolist()) == list(range(6))
        assert report.programs == 6
    assert out.tolist() != list(range(6))


@gluon.jit
def first_role(out):
    gl.store(out, 1)


@gluon.jit
def second_role(out, PLACE: gl.constexpr):
    gl.store(out + PLACE, 2)


@gluon.jit
def two_roles_kernel(out, PLACE: gl.constexpr):
    gl.warp_specialize([(first_role, (out,)), (second_role, (out, PLACE))], [1])
    gl.store(out, 3)


def test_roles_that_write_the_same_element_race_unless_something_orders_them():
    run(two_roles_kernel, torch.zeros(2), PLACE=1).raise_if_bad()
    with pytest.raises(Race, match=r"uses elements of out that (first|second)_role writes"):
        run(two_roles_kernel, torch.zeros(2), PLACE=0).raise_if_bad()


@gluon.jit
def spin_role(flag, out):
    while gl.load(flag, volatile=True) == 0:
        pass
    gl.store(out, 1)


@gluon.jit
def flag_role(flag, SET: gl.constexpr):
    if SET:
        gl.atomic_xchg(flag, 1)


@gluon.jit
def flag_kernel(flag, out, SET: gl.constexpr):
    gl.warp_specialize([(spin_role, (flag, out)), (flag_role, (flag, SET))], [1])


def test_a_role_that_spins_lets_the_others_go_on_and_is_stopped_in_the_end():
    for order in ("round_robin", "random", "late"):
        out = torch.zeros(1)
        run(flag_kernel, torch.zeros(1, dtype=torch.int32), out, SET=True, order=order)
        assert out.item() == 1
        report = run(flag_kernel, torch.zeros(1, dtype=torch.int32), out, SET=False, order=order, max_steps=500)
        assert report.status == "too long"


def test_programs_that_write_the_same_element_race():
    with pytest.raises(Race, match="uses elements of out that another program writes"):
        run(overlapping_kernel, torch.zeros(8), N=4, grid=(2,)).raise_if_bad()


@gluon.jit
def asserting_kernel(out, n):
    gl.static_assert(n is not None)
    gl.device_assert(n > 3, "n is small")


def test_assertions_of_the_kernel_are_findings():
    run(asserting_kernel, torch.zeros(1), 4).raise_if_bad()
    report = run(asserting_kernel, torch.zeros(1), 3)
    assert report.status == "kernel raised"
    assert "n is small" in str(report)
    assert "test_core_language.py" in str(report)


@gluon.jit
def failing_kernel(out):
    gl.store(out, gl.zeros([4], gl.float32, LAYOUT).to(gl.int32).gather(gl.full([4], 9, gl.int32, LAYOUT), 0))


def test_a_fault_of_the_emulator_is_not_blamed_on_the_kernel():
    report = run(failing_kernel, torch.zeros(4, dtype=torch.int32))
    assert report.status == "emulator failed"
    assert "language/arithmetic.py:" in str(report)
