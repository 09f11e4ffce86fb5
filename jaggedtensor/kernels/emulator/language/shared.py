"""Shared and tensor memory descriptors, and mbarriers, as a kernel sees them."""

import math
import re
from linecache import getline
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout

from jaggedtensor.kernels.emulator import barriers, checks
from jaggedtensor.kernels.emulator.checks import call_chain
from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language.registry import emulates
from jaggedtensor.kernels.emulator.language.splits import split_bases, split_shape, split_slices
from jaggedtensor.kernels.emulator.language.values import (
    STORAGE,
    InFlight,
    Tensor,
    as_torch,
    from_storage,
    number,
    to_storage,
)
from jaggedtensor.kernels.emulator.memory import Holder, IndexedView, View, row_major
from jaggedtensor.kernels.emulator.roles import Cta, Role, current, settle_inits


class Sizes(tuple):
    """A shape: a tuple that also adds to lists, as Triton's do."""

    def __add__(self, other):
        return Sizes(tuple(self) + tuple(other))

    def __radd__(self, other):
        return Sizes(tuple(other) + tuple(self))


_TARGET = re.compile(r"^\s*(?:self\.)?([A-Za-z_][\w., ]*?)\s*(?::[^=]+)?=[^=]")
_KEYWORD = re.compile(r"^\s*([A-Za-z_]\w*)\s*=[^=]")


def name_of(chain: tuple, fallback: str) -> str:
    """What the kernel calls a buffer: the target of the assignment, with that of its caller in a helper."""
    names = []
    for code, line in chain[:3]:
        text = getline(code.co_filename, line)
        match = _TARGET.match(text) or _KEYWORD.match(text)
        if match:
            names.append(match.group(1).replace(" ", ""))
        elif not names and "return" not in text:
            continue
    return ".".join(reversed(names)) or fallback


def checked_index(role: Role, index, size: int, name: str) -> int:
    at = number(index)
    if not 0 <= at < size:
        role.machine.fatal(
            "out of bounds",
            f"{role.label} takes {name}[{at}], of {size}",
            role,
            advice="how the ring's counter wraps",
        )
    return at


def check_bytes(role: Role, view: View, name: str) -> None:
    """A reinterpreted view must stay within its allocation."""
    own = view.allocation
    itemsize = STORAGE[view.dtype.name].itemsize
    last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)) * itemsize + itemsize
    if view.offset < own.start or last > own.start + own.nbytes:
        role.machine.fatal(
            "out of bounds",
            f"{role.label} reinterprets {name} ({own.nbytes} bytes) as {list(view.shape)} of {view.dtype}, "
            f"{last - view.offset} bytes from byte {view.offset - own.start}",
            role,
            advice="the shape and dtype of reinterpret",
        )


def form_of(layout, share, dtype):
    """How a layout for the tensor cores permutes bytes: panels as wide as its swizzle, one after the other, and chunks
    of 16 bytes within (PTX ISA, "Swizzling modes"). With one panel, how many rows there are does not matter. None for
    layouts of other kinds."""
    if not isinstance(layout, NVMMASharedLayout) or len(share) < 2:
        return None
    block = list(share[-layout.rank :])
    if layout.transposed:
        block.append(block.pop(0))
    rows, row_bytes = math.prod(block[:-1]), block[-1] * STORAGE[dtype.name].itemsize
    width = layout.swizzle_byte_width
    return (width, row_bytes) if row_bytes <= max(width, 16) else (width, row_bytes, rows)


def panels_of(view: View, dtype, share) -> View:
    """A block of several panels over buffers of one each, which lie one after the other as its panels do."""
    itemsize = STORAGE[dtype.name].itemsize
    *lead, rows, columns = share
    width = view.form[0] // itemsize
    index = torch.arange(math.prod(share)).view(*lead, columns // width, rows, width) + view.offset // itemsize
    index = index.transpose(-3, -2).reshape(share)
    return IndexedView(view.holder, dtype, index, (view.offset, dtype.name, tuple(share), width), view.form)


class SharedDescriptor:
    """A buffer in shared memory, or a part of one. `shape` is that of the whole cluster, `view` one CTA's share."""

    def __init__(self, cta: Cta, view: View, shape, layout, alloc_shape=None, label: str = "", bases=None):
        self.cta = cta
        self.view = view
        self.shape = Sizes(shape)
        self.layout = layout
        self.alloc_shape = Sizes(alloc_shape or shape)
        self.label = label or view.allocation.name
        self.bases = split_bases(layout, len(self.shape)) if bases is None else bases

    @property
    def dtype(self):
        return self.view.dtype

    @property
    def rank(self):
        return len(self.shape)

    @property
    def numel(self):
        return math.prod(self.shape)

    @property
    def type(self):
        return self

    element_ty = dtype

    @property
    def nbytes_per_cta(self):
        return math.prod(self.view.shape) * self.dtype.primitive_bitwidth // 8

    def __repr__(self):
        return f"{self.label}: {list(self.shape)} of {self.dtype} in shared memory"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownBuiltin(f"shared_memory_descriptor.{name}", "language/shared.py")

    def _like(self, view, shape, layout=None, label="", bases=None):
        return SharedDescriptor(
            self.cta,
            view,
            shape,
            layout or self.layout,
            self.alloc_shape,
            label or self.label,
            self.bases if bases is None else bases,
        )

    # Views

    def index(self, index):
        role = current()
        at = checked_index(role, index, self.shape[0], self.label)
        view = self.view.sliced(0, at, 1, squeeze=True)
        label = f"{self.label}[{at}]" if self.shape[0] > 1 or self.label == view.allocation.name else self.label
        return self._like(view, self.shape[1:], label=label, bases=tuple(b[1:] for b in self.bases))

    def slice(self, start, length, dim=0):
        if start < 0 or start + length > self.shape[dim]:
            current().machine.fatal("out of bounds", f"slice {start}:{start + length} of {self!r}", current())
        if any(basis[dim] for basis in self.bases):
            raise UnknownBuiltin("a slice of a dimension that is split over CTAs", "language/shared.py")
        shape = list(self.shape)
        shape[dim] = length
        return self._like(self.view.sliced(dim, start, length), shape, label=f"{self.label}[{start}:{start + length}]")

    def permute(self, order):
        order = list(order)
        bases = tuple(tuple(b[i] for i in order) for b in self.bases)
        return self._like(self.view.permuted(order), [self.shape[i] for i in order], bases=bases)

    def reshape(self, shape):
        if self.bases and any(any(b) for b in self.bases):
            raise UnknownBuiltin("reshape of a buffer that is split over CTAs", "language/shared.py")
        return self._like(self.view.reshaped(shape), shape)

    def reinterpret(self, dtype=None, shape=None, layout=None):
        dtype, shape, layout = dtype or self.dtype, shape or self.shape, layout or self.layout
        bases = split_bases(layout, len(shape))
        share = split_shape(shape, bases)
        form = form_of(layout, share, dtype)
        view = View(self.view.holder, dtype, self.view.offset, share, row_major(share), form)
        check_bytes(current(), view, self.label)
        if form is not None and len(form) == 3 and self.view.form == form[:1] * 2:
            view = panels_of(self.view, dtype, share)
        return SharedDescriptor(self.cta, view, shape, layout, shape, self.label)

    _reinterpret = reinterpret  # 3.8

    # Ordinary loads and stores

    def load(self, layout=None):
        role = current()
        role.pause()
        data = checks.load(role, self.view, self.cta.shared)
        role.cluster.event(
            role, "load", self.nbytes_per_cta, tuple(self.view.shape), (), role.chain()
        ).name = self.label
        return spread(data, self.shape, self.bases, self.cta.rank, self.dtype, layout)

    def store(self, value):
        role = current()
        role.pause()
        check_value(role, value, self)
        data = value.data[split_slices(self.shape, self.bases, self.cta.rank)] if self.bases else value.data
        checks.store(role, self.view, self.cta.shared, data)
        role.cluster.event(
            role, "store", self.nbytes_per_cta, tuple(self.view.shape), (), role.chain()
        ).name = self.label

    def gather(self, indices, axis):
        """result[I] = this[.. indices[I] at axis ..]"""
        role = current()
        role.pause()
        self._within(role, indices, axis)
        data = checks.load(role, self.view, self.cta.shared)
        return Tensor(torch.gather(data, axis, indices.data.to(torch.int64)), self.dtype, indices.layout)

    def scatter(self, values, indices, axis):
        role = current()
        role.pause()
        self._within(role, indices, axis)
        at, new = torch.broadcast_tensors(indices.data.to(torch.int64), as_torch(values, self.dtype))
        data = from_storage(self.view.on(self.cta.shared), self.dtype).clone()
        view = self._touched(at, axis)
        checks.on_write(role, self.view.allocation, view.footprint())
        self.view.on(self.cta.shared).copy_(to_storage(data.scatter(axis, at, new), self.dtype))

    def _touched(self, at, axis) -> IndexedView:
        base = self.view.offset // STORAGE[self.dtype.name].itemsize
        index = torch.full(at.shape, base)
        for dim, stride in enumerate(self.view.strides):
            places = (
                at
                if dim == axis
                else torch.arange(at.shape[dim]).view([-1 if d == dim else 1 for d in range(at.dim())])
            )
            index = index + places * stride
        return IndexedView(self.view.holder, self.dtype, index, (index.numpy().tobytes(), self.view.offset))

    def _within(self, role, indices, axis):
        low, high = int(indices.data.min()), int(indices.data.max())
        if low < 0 or high >= self.shape[axis]:
            role.machine.fatal("out of bounds", f"{role.label} takes elements {low}..{high} of {self!r}", role)

    def _keep_alive(self):
        return None


def check_value(role: Role, value, target) -> None:
    """What is stored has the shape and type of where it goes."""
    if isinstance(value, InFlight):
        value.used()
    if not isinstance(value, Tensor):
        raise TypeError(f"a block is needed, got {type(value).__name__}")
    if list(value.shape) != list(target.shape):
        raise ValueError(f"source shape {value.shape} and destination shape {list(target.shape)} must match")
    if value.dtype != target.dtype:
        raise ValueError(f"source dtype {value.dtype} and destination dtype {target.dtype} must match")
    if value.part is not None and target.bases and tuple(value.part) != tuple(target.bases):
        role.machine.find(
            "bad operand",
            f"a block that is split over CTAs as {value.part} is stored to {target.label}, split as {target.bases}",
            role,
            advice="cga_layout of both; async_store reaches the other CTA",
        )


def spread(data, shape, bases, rank, dtype, layout):
    """One CTA's share as a block of the whole shape, poison elsewhere."""
    if not any(any(basis) for basis in bases):
        return Tensor(data, dtype, layout)
    fill = float("nan") if dtype.is_floating() else -1
    whole = torch.full(list(shape), fill, dtype=data.dtype)
    whole[split_slices(shape, bases, rank)] = data
    return Tensor(whole, dtype, layout, bases)


@emulates("gl.allocate_shared_memory")
def allocate_shared_memory(element_ty, shape, layout, value=None):
    """Poisoned bytes, until the last descriptor of them is dropped."""
    role = current()
    shape = [int(n) for n in shape]
    bases = split_bases(layout, len(shape))
    share = split_shape(shape, bases)
    itemsize = STORAGE[element_ty.name].itemsize
    size = math.prod(share) * itemsize
    chain = call_chain()
    name = name_of(chain, f"shared memory of line {chain[0][1] if chain else '?'}")
    memory = role.cta.shared
    # TMA needs 128 bytes, and swizzled buffers 8 rows of their pattern: 1024 bytes at 128-byte swizzling.
    swizzle = layout.swizzle_byte_width if isinstance(layout, NVMMASharedLayout) else 0
    allocation = memory.allocate(name, size, max(16, 8 * swizzle) if size > 16 else 8, chain, role.site())
    if allocation is None:
        role.machine.fatal(
            "budget",
            f"{name} needs {size} bytes of shared memory; {sum(a.nbytes for a in memory.allocations)} of "
            f"{memory.capacity} are taken by " + ", ".join(f"{a.name} {a.nbytes}" for a in memory.allocations),
            role,
            advice="fewer stages, or smaller blocks",
        )
        raise AssertionError
    for address in [a for a in role.cta.barriers if allocation.start <= a < allocation.start + size]:
        del role.cta.barriers[address]  # words of a buffer that is gone
    role.cluster.report.buffers[name] = max(size, role.cluster.report.buffers.get(name, 0))
    form = form_of(layout, share, element_ty)
    view = View(Holder(allocation), element_ty, allocation.start, share, row_major(share), form)
    descriptor = SharedDescriptor(role.cta, view, shape, layout)
    if value is not None:
        descriptor.store(value)
    return descriptor


# mbarriers ----------------------------------------------------------------------------------------------------------


@emulates("nvidia.mbarrier.allocate_mbarrier")
def allocate_mbarrier(batch=None, two_ctas=False):
    ctas = len(current().cluster.ctas)
    count = ctas // 2 if two_ctas else ctas
    layout = gl.nvidia.hopper.mbarrier.MBarrierLayout.multicta(ctas, two_ctas)
    return allocate_shared_memory(tl.int64, [count] if batch is None else [batch, count], layout)


def home(descriptor: SharedDescriptor, rank: int) -> int:
    """The CTA whose word a barrier is for CTA `rank`: with a zero basis, CTAs that differ in that bit share one."""
    for bit, basis in enumerate(descriptor.bases):
        if not any(basis):
            rank &= ~(1 << bit)
    return rank


def barrier_at(descriptor: SharedDescriptor, rank: int | None = None) -> tuple[Cta, int, barriers.Mbarrier | None]:
    """(CTA, address, barrier) of a descriptor for CTA `rank`, by default the one that asks."""
    role = current()
    cta = role.cluster.ctas[home(descriptor, role.cta.rank if rank is None else rank)]
    if math.prod(descriptor.view.shape) != 1:
        raise ValueError(f"{descriptor!r} is {descriptor.numel} barriers: index it")
    return cta, descriptor.view.offset, cta.barriers.get(descriptor.view.offset)


def group_size(descriptor: SharedDescriptor) -> int:
    """How many CTAs share a barrier's word."""
    return 2 ** sum(not any(basis) for basis in descriptor.bases)


def is_lead(descriptor: SharedDescriptor, rank: int) -> bool:
    """Whether the word is in this CTA's memory."""
    return home(descriptor, rank) == rank


def barrier_event(role: Role, kind: str, descriptor, after=()) -> Any:
    event = role.cluster.event(role, kind, 0, (), after, role.chain())
    event.name = descriptor.label
    return event


@emulates("nvidia.mbarrier.init")
def mbarrier_init(mbarrier, count):
    """By the lead of the CTAs that share the word, with a count for each of them (Gluon tutorial 14, multi-CTA)."""
    role = current()
    role.pause()
    cta, address, known = barrier_at(mbarrier)
    role.has_initialised = len(role.cluster.ctas) > 1
    if not is_lead(mbarrier, role.cta.rank):
        return
    count *= group_size(mbarrier)
    if known is not None:
        role.machine.find(
            "barrier misuse",
            f"{role.label} initialises {mbarrier.label} again without invalidating it: {known.describe()}",
            role,
            advice="initialise barriers once, before the roles start",
        )
    if not 1 <= count < 2**20:
        role.machine.find("bad operand", f"{mbarrier.label} is initialised with a count of {count}", role)
    cta.barriers[address] = barriers.Mbarrier(mbarrier.label, count, count, role.timeline, role.time())
    barrier_event(role, "init", mbarrier)


@emulates("nvidia.mbarrier.invalidate")
def mbarrier_invalidate(mbarrier):
    role = current()
    role.pause()
    cta, address, barrier = barrier_at(mbarrier)
    if not is_lead(mbarrier, role.cta.rank):
        return
    if barrier is None or barrier.blocked or barrier.bytes or barrier.pending != barrier.count:
        state = "is not initialised" if barrier is None else f"is in use: {barrier.describe()}"
        role.machine.find("barrier misuse", f"{role.label} invalidates {mbarrier.label}, which {state}", role)
    elif any(not checks.seen(role.clock, t, w.time) for t, w in barrier.waiters.items()):
        role.machine.find("race", f"{role.label} invalidates {mbarrier.label} while others may still wait on it", role)
    cta.barriers.pop(address, None)
    barrier_event(role, "invalidate", mbarrier)


def _routed(mbarrier, from_cta) -> list[int]:
    """The CTAs on whose barrier this CTA arrives: itself, or with `from_cta` as a mask, those it is routed to."""
    role = current()
    ctas = len(role.cluster.ctas)
    if from_cta is None or from_cta == ctas - 1:
        return [role.cta.rank]
    return [target for target in range(ctas) if target & from_cta == role.cta.rank]


@emulates("nvidia.mbarrier.arrive")
def mbarrier_arrive(mbarrier, *, count=1, pred=True, from_cta=None):
    """mbarrier.arrive: release, in the CTA or the cluster; CTAs that share a word all arrive on it."""
    role = current()
    settle_inits(role)
    role.pause()
    if not bool(number(pred)):
        return
    event = barrier_event(role, "arrive", mbarrier)
    for rank in _routed(mbarrier, from_cta):
        _, _, barrier = barrier_at(mbarrier, rank)
        barriers.arrive(role, barrier, mbarrier.label, count, event.number)


@emulates("nvidia.mbarrier.expect")
def mbarrier_expect(mbarrier, bytes_per_cta=None, pred=True, *, from_cta=None, bytes=None):
    """mbarrier.arrive.expect_tx: one arrival, and bytes that the phase waits for; for CTAs that share a word, the lead
    expects the bytes of all, and each arrives (Gluon tutorial 14)."""
    role = current()
    settle_inits(role)
    role.pause()
    if not bool(number(pred)):
        return
    size = number(bytes_per_cta if bytes_per_cta is not None else bytes)
    event = barrier_event(role, "expect", mbarrier)
    for rank in _routed(mbarrier, from_cta):
        _, _, barrier = barrier_at(mbarrier, rank)
        share = size * group_size(mbarrier) if is_lead(mbarrier, role.cta.rank) else 0
        barriers.expect(role, barrier, mbarrier.label, share, event.number)


@emulates("nvidia.mbarrier.wait")
def mbarrier_wait(mbarrier, phase, pred=True, deps=()):
    """mbarrier.try_wait.parity in a loop: acquire. Of CTAs that share a word, the lead waits, and the others go on
    (Gluon tutorial 14)."""
    role = current()
    settle_inits(role)
    if not bool(number(pred)) or not is_lead(mbarrier, role.cta.rank):
        role.pause()
        return
    _, _, barrier = barrier_at(mbarrier)
    parity = int(number(phase))
    if barrier is None:
        role.machine.fatal(
            "barrier misuse",
            f"{role.label} waits on {mbarrier.label}, which is not initialised",
            role,
            advice="mbarrier.init before the roles start",
        )
        return
    barriers.usable(role, barrier, mbarrier.label, "waits on")
    role.stats.waits += 1
    role.stats.blocked += not barrier.passes(parity)
    barrier.blocked += 1
    role.wait_until(lambda: barrier.passes(parity), (barrier, parity))
    barrier.blocked -= 1
    barriers.pass_through(role, barrier)
    barrier_event(role, "wait", mbarrier, barrier.completed_by)
