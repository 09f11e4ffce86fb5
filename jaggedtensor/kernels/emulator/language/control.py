"""Programs, loops, assertions, global loads and stores, atomics, and warp_specialize."""

import builtins
import functools
from functools import reduce as fold
from typing import Any

import torch
import triton.language as tl

from jaggedtensor.kernels.emulator.checks import Picked, join, on_global
from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language.arithmetic import maximum, minimum
from jaggedtensor.kernels.emulator.language.registry import emulates
from jaggedtensor.kernels.emulator.language.splits import split_slices
from jaggedtensor.kernels.emulator.language.values import (
    OPAQUE,
    REGISTER,
    Pointer,
    Scalar,
    Tensor,
    Value,
    as_torch,
    from_storage,
    number,
    promote,
    to_storage,
    torch_dtype,
    type_of,
    wrap,
)
from jaggedtensor.kernels.emulator.roles import Role, current, meet_twins, settle_inits
from jaggedtensor.kernels.shared.softmax import LOG2, SETTLE

# Programs and loops -------------------------------------------------------------------------------------------------


@emulates("both.program_id")
def program_id(axis):
    """The same in every CTA of a cluster."""
    return Scalar(current().cluster.program[axis], tl.int32)


@emulates("both.num_programs")
def num_programs(axis):
    return Scalar(current().cluster.launch.grid[axis], tl.int32)


@emulates("gl.num_warps")
def num_warps():
    return current().num_warps


@emulates("gl.num_ctas")
def num_ctas():
    return len(current().cluster.ctas)


def loop(*bounds, **hints):
    """`range` in a kernel: its variable is a run-time int32 (or wider, as its bounds are)."""
    dtype = fold(lambda t, b: promote(t, False, type_of(b), False), bounds, tl.int32)
    for i in builtins.range(*(number(b) for b in bounds)):
        yield Scalar(i, dtype)


emulates("tl.range")(loop)


@emulates("both.static_range")
def static_range(*bounds, **hints):
    """Unrolled: each step is a place of its own."""
    unrolled = current().unrolled
    for i in builtins.range(*bounds):
        unrolled.append(i)
        try:
            yield i
        finally:
            unrolled.pop()


def least(*values):
    """Python's min in a kernel."""
    values = values[0] if len(values) == 1 else values
    return fold(minimum, values) if any(isinstance(v, Value) for v in values) else builtins.min(values)


def greatest(*values):
    """Python's max in a kernel."""
    values = values[0] if len(values) == 1 else values
    return fold(maximum, values) if any(isinstance(v, Value) for v in values) else builtins.max(values)


@emulates("both.static_assert")
def static_assert(condition, message=""):
    if not condition:
        raise AssertionError(message)


@emulates("both.device_assert")
def device_assert(condition, message="", mask=None):
    holds = condition.data if isinstance(condition, Tensor) else torch.tensor(bool(number(condition)))
    if mask is not None:
        holds = holds | ~(mask.data if isinstance(mask, Tensor) else torch.tensor(bool(number(mask))))
    if not bool(holds.all()):
        raise AssertionError(f"device_assert: {message}")


@emulates("both.static_print", "both.device_print")
def device_print(*values, **options):
    print(*values)


@emulates("both.assume")
def assume(condition):
    """The compiler believes it, so it must hold."""
    device_assert(condition, "gl.assume of what is not so")


def _same(x, *hints, **options):
    return x


emulates("both.multiple_of", "both.max_contiguous", "both.max_constancy", "both.expect_zero")(_same)


@emulates("gl.bank_conflicts")
def bank_conflicts(*types):
    return 0


@emulates("gl.to_linear_layout")
def to_linear_layout(layout, shape):
    return OPAQUE


@emulates("gl.barrier", "tl.debug_barrier", "gl.thread_barrier")
def barrier(*, cluster=False):
    """Threads of a role, which is one thread here; with `cluster`, all its twins in the other CTAs."""
    if cluster:
        cluster_barrier()


@emulates("hopper.cluster.barrier", "blackwell.cluster.barrier")
def cluster_barrier(relaxed=False):
    """barrier.cluster.arrive and .wait by the twins of this role in all CTAs (release and acquire unless relaxed)."""
    meet_twins(current(), not relaxed)


# warp_specialize ----------------------------------------------------------------------------------------------------


def _check_registers(role: Role, warps, registers) -> None:
    """Whether an SM's 64K registers can be dealt out so: single warps are grouped by four, and a group gets its largest
    request; the default partition gets what is left (Triton, AllocateWarpGroups)."""
    groups: list[list[int]] = []
    fill = 4
    for count, wanted in sorted(zip(warps, registers, strict=True), key=lambda p: -p[0]):
        if count >= 4:
            groups.append([count, wanted])
            fill = 4
        else:
            if fill + count > 4:
                groups.append([4, wanted])
                fill = 0
            fill += count
            groups[-1][1] = max(groups[-1][1], wanted)
    total = role.num_warps + sum(count for count, _ in groups)
    pool = role.cluster.launch.maxnreg or 65536 // 32 // total // 8 * 8
    left = (pool * total - sum(count * -(-wanted // 8) * 8 for count, wanted in groups)) // role.num_warps // 8 * 8
    if left < 24 or max(registers, default=0) > 256:
        role.machine.find(
            "budget",
            f"the workers ask for {registers} registers with {warps} warps, which leaves {left} to each thread of the "
            f"default partition's {role.num_warps} warps; a thread has 24 to 256 (setmaxnreg)",
            role,
            advice="worker_num_regs; an over-request is silently dropped by the compiler, and the workers spill",
        )


@emulates("gl.warp_specialize")
def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """The default partition runs in the caller's warps; each worker is a role of its own. Returns when all are done."""
    role = current()
    settle_inits(role)
    (default, default_args), *workers = functions_and_args
    if len(workers) != len(worker_num_warps):
        raise ValueError(f"{len(workers)} workers, but {len(worker_num_warps)} warp counts")
    if worker_num_regs is not None:
        if len(workers) != len(worker_num_regs):
            raise ValueError(f"{len(workers)} workers, but {len(worker_num_regs)} register counts")
        _check_registers(role, worker_num_warps, worker_num_regs)
    names: list[str] = [default.__name__]
    started = []
    for (function, args), warps in zip(workers, worker_num_warps, strict=True):
        name = function.__name__
        if name in names:
            name = f"{name}#{sum(n.split('#')[0] == name for n in names) + 1}"
        names.append(name)
        worker = Role(role.cluster, role.cta, name, warps, role.cluster.launch.worker_body(function, args))
        join(worker.clock, role.clock)
        join(worker.fenced, role.fenced)
        started.append(worker)
    role.tick()
    outer, role.label = role.label, names[0]
    role.stats.role = names[0]
    result = default(*default_args)
    role.label = outer
    for worker in started:
        role.wait_until(functools.partial(getattr, worker, "done"), f"the end of {worker.name}")
        join(role.clock, worker.clock)
        join(role.fenced, worker.fenced)
    return result


# Global memory ------------------------------------------------------------------------------------------------------


def within_bounds(pointer: Pointer, mask, doing: str) -> tuple[Any, Any]:
    """(offsets, mask) as blocks of one shape or scalars, with every selected offset inside of its tensor."""
    buffer, offsets = pointer.buffer, pointer.offset
    if not pointer.is_block:
        chosen = mask is None or bool(number(mask))
        if chosen and not buffer.inside(offsets, offsets):
            _outside(pointer, offsets, offsets, doing)
        return offsets, chosen
    selected = None
    picked = offsets
    if mask is not None:
        selected = mask.data if isinstance(mask, Tensor) else torch.tensor(bool(number(mask)))
        if selected.dim() and selected.dim() != offsets.dim():
            raise ValueError(f"cannot broadcast, rank mismatch: {list(selected.shape)}, {list(offsets.shape)}")
        offsets, selected = torch.broadcast_tensors(offsets, selected)
        picked = offsets[selected]
    if picked.numel():
        low, high = int(picked.min()), int(picked.max())
        if not buffer.inside(low, high):
            _outside(pointer, low, high, doing)
    return offsets, selected


def _outside(pointer: Pointer, low: int, high: int, doing: str) -> None:
    role = current()
    role.machine.fatal(
        "out of bounds",
        f"{role.label} {doing} elements {low}..{high} of {pointer.buffer.name}, which has {pointer.buffer.extent}",
        role,
        advice="the mask, and the strides",
    )


def _logged(pointer: Pointer, offsets, selected, write: bool, atomic: bool = False) -> None:
    """The access as the checks see it."""
    role = current()
    if write:
        role.pause()
    if not pointer.is_block:
        cells = Picked(offsets if selected else torch.empty(0, dtype=torch.int64))
    else:
        cells = Picked(offsets, None if selected is None else selected.expand(offsets.shape))
    on_global(role, pointer.buffer, cells, write, atomic)


def owned(role: Role, value: Tensor, selected):
    """The mask, and only what this CTA has of a block that is split."""
    mine = torch.zeros(value.shape, dtype=torch.bool)
    mine[split_slices(value.shape, value.part, role.cta.rank)] = True
    return mine if selected is None else mine & selected


def _element_poison(dtype):
    return float("nan") if dtype.is_floating() else -1 if dtype.name != "int1" else True


def _flat(pointer: Pointer) -> torch.Tensor:
    """The tensor's elements, as the pointer's type has them."""
    flat = pointer.buffer.flat
    wanted = pointer.element
    if wanted.is_floating() and flat.dtype != REGISTER[wanted.name]:
        raise UnknownBuiltin(f"a pointer to {wanted} into a tensor of {flat.dtype}", "language/control.py")
    return flat


@emulates("both.load")
def load(pointer, mask=None, other=None, boundary_check=(), padding_option="", **policies):
    """Masked lanes without `other` hold anything: they are poisoned."""
    dtype = pointer.element
    offsets, selected = within_bounds(pointer, mask, "reads")
    flat = _flat(pointer)
    current().pause()  # another may be about to write it, and a loop that waits for that must not stop the world
    if pointer.buffer.log is not None:
        _logged(pointer, offsets, selected, False)
    if not pointer.is_block:
        if not selected:
            return Scalar(wrap(number(other), dtype) if other is not None else _element_poison(dtype), dtype)
        return Scalar(wrap(flat[offsets].item(), dtype), dtype)
    event = _on_its_way("global load", offsets, dtype)
    if selected is None:
        block = Tensor(from_storage(flat[offsets], dtype), dtype)
        block.origin = event.number
        return block
    data = from_storage(
        flat[torch.where(selected, offsets, 0)] if flat.numel() else flat.new_zeros(offsets.shape), dtype
    )
    if other is None:
        fill = torch.tensor(_element_poison(dtype), dtype=torch_dtype(dtype))
    else:
        fill = as_torch(other, dtype)
        fill = fill if isinstance(fill, torch.Tensor) else torch.tensor(fill, dtype=torch_dtype(dtype))
    block = Tensor(torch.where(selected, data, fill), dtype)
    block.origin = event.number
    return block


def _on_its_way(kind: str, offsets: torch.Tensor, dtype) -> Any:
    """The event of ordinary loads and stores of a block."""
    role = current()
    size = offsets.numel() * dtype.primitive_bitwidth // 8
    return role.cluster.event(role, kind, size, tuple(offsets.shape), (), role.chain())


@emulates("both.store")
def store(pointer, value, mask=None, boundary_check=(), **policies):
    dtype = pointer.element
    offsets, selected = within_bounds(pointer, mask, "writes")
    flat = _flat(pointer)
    if not pointer.is_block:
        if isinstance(value, Tensor):
            raise TypeError("a block cannot be stored through a scalar pointer")
        if selected:
            _logged(pointer, offsets, True, True)
            flat[offsets] = wrap(number(value), dtype)
        return
    data = as_torch(value, dtype)
    data = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=torch_dtype(dtype))
    if data.dim() and data.dim() != offsets.dim():
        raise ValueError(f"cannot broadcast, rank mismatch: {list(data.shape)}, {list(offsets.shape)}")
    offsets, data = torch.broadcast_tensors(offsets, to_storage(data, dtype))
    if isinstance(value, Tensor) and value.part is not None:
        selected = owned(current(), value, selected)
    if selected is not None:
        selected = selected.expand(offsets.shape)
        offsets, data = offsets[selected], data[selected]
    _logged(pointer, offsets, None, True)
    _on_its_way("global store", offsets, dtype)
    flat[offsets] = data.to(flat.dtype)


_ATOMICS: dict[str, Any] = {
    "add": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "xchg": lambda old, new: new,
}


def _atomic(name):
    def operation(pointer, value, mask=None, sem=None, scope=None, **options):
        """One element after the other, in random order; the scalar form also orders roles (acquire and release)."""
        role = current()
        role.pause()
        dtype = pointer.element
        offsets, selected = within_bounds(pointer, mask, "updates")
        flat = _flat(pointer)
        combine = _ATOMICS[name]
        if not pointer.is_block:
            if not selected:
                return Scalar(wrap(_element_poison(dtype), dtype), dtype)
            role.cluster.synchronise(role, pointer.buffer, offsets, sem)
            _logged(pointer, offsets, True, True, True)
            old = flat[offsets].clone()
            flat[offsets] = combine(old, torch.tensor(wrap(number(value), dtype), dtype=flat.dtype))
            return Scalar(wrap(old.item(), dtype), dtype)
        data = as_torch(value, dtype)
        data = data if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=torch_dtype(dtype))
        offsets, data = torch.broadcast_tensors(offsets, to_storage(data, dtype))
        if isinstance(value, Tensor) and value.part is not None:
            selected = owned(role, value, selected)
        _logged(pointer, offsets, selected, True, True)
        old = torch.zeros(offsets.shape, dtype=flat.dtype)
        chosen = (
            range(offsets.numel()) if selected is None else selected.expand(offsets.shape).reshape(-1).nonzero()[:, 0]
        )
        at, values, olds = offsets.reshape(-1), data.reshape(-1).to(flat.dtype), old.view(-1)
        picked = torch.as_tensor(list(chosen) if isinstance(chosen, range) else chosen)
        if picked.numel() and at[picked].unique().numel() == picked.numel():
            olds[picked] = flat[at[picked]]
            flat[at[picked]] = combine(olds[picked], values[picked])
        else:
            order = picked.tolist()
            role.cluster.random.shuffle(order)
            for i in order:
                olds[i] = flat[at[i]]
                flat[at[i]] = combine(olds[i], values[i])
        return Tensor(from_storage(old, dtype), dtype)

    return operation


for _name in _ATOMICS:
    emulates(f"both.atomic_{_name}")(_atomic(_name))


@emulates("both.atomic_cas")
def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    role = current()
    role.pause()
    if pointer.is_block:
        raise UnknownBuiltin("atomic_cas of a block", "language/control.py")
    offset, _ = within_bounds(pointer, None, "updates")
    role.cluster.synchronise(role, pointer.buffer, offset, sem)
    _logged(pointer, offset, True, True, True)
    flat = _flat(pointer)
    old = flat[offset].item()
    if old == number(cmp):
        flat[offset] = number(val)
    return Scalar(old, pointer.element)


# Inline assembly ----------------------------------------------------------------------------------------------------

ASSEMBLY: dict[str, Any] = {}  # text of the assembly without white space: function of its arguments


def teach_assembly(asm: str, function) -> None:
    """Says what a piece of inline assembly does, as a function of its (emulated) arguments."""
    ASSEMBLY["".join(asm.split())] = function


# What the library's own kernels use.
teach_assembly(SETTLE.value, lambda sums: sums)
teach_assembly(LOG2.value, lambda x: Tensor(x.data.log2(), x.dtype, x.layout, x.part))


@emulates("both.inline_asm_elementwise")
def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    function = ASSEMBLY.get("".join(asm.split()))
    if function is None:
        raise UnknownBuiltin(f"the inline assembly {asm!r} (teach_assembly says what it does)", "language/control.py")
    return function(*args)


teach_assembly("max.f32 $0, $1, $2, $3;", lambda a, b, c: maximum(maximum(a, b), c))
