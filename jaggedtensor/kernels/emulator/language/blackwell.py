"""Tensor memory, tcgen05 and cluster launch control, as a kernel sees them."""

import atexit
import functools
import math
from typing import NamedTuple

import torch
import triton.language as tl
from triton._C.libtriton import ir, nvidia
from triton._C.libtriton.gluon_ir import GluonOpBuilder
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from jaggedtensor.kernels.emulator import checks
from jaggedtensor.kernels.emulator.checks import call_chain
from jaggedtensor.kernels.emulator.engines import Commit, TensorCore, TryCancel, multiply
from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language.hopper import check_shared_operand
from jaggedtensor.kernels.emulator.language.registry import emulates
from jaggedtensor.kernels.emulator.language.shared import (
    SharedDescriptor,
    Sizes,
    barrier_at,
    check_value,
    checked_index,
    home,
    name_of,
    spread,
)
from jaggedtensor.kernels.emulator.language.splits import split_bases, split_shape, split_slices
from jaggedtensor.kernels.emulator.language.values import OPAQUE, STORAGE, Scalar, number, torch_dtype
from jaggedtensor.kernels.emulator.memory import LANE_BYTES, TENSOR_COLUMNS, Holder, IndexedView, View, nbytes
from jaggedtensor.kernels.emulator.roles import Cta, Role, current, settle_inits

# Layouts of tensor memory -------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where elements of a share [M, N] lie: lanes [M, N] and columns [M, N], in elements of the dtype's size."""

    lanes: torch.Tensor
    columns: torch.Tensor
    width: int  # columns that it takes, in elements
    half: bool  # whether it takes half of the lanes only, so that two fit in the same columns


@functools.lru_cache(maxsize=1)
def _builder() -> tuple[GluonOpBuilder, ir.context]:
    """With its context, which must live as long."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    return GluonOpBuilder(context), context


atexit.register(_builder.cache_clear)  # or nanobind reports it as leaked


@functools.lru_cache(maxsize=1000)
def places(layout: TensorMemoryLayout, shape: tuple) -> Places:
    """What Triton's own linear layout says; a zero basis is a bit that names nothing."""
    builder, _ = _builder()
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    share = split_shape(shape, split_bases(layout, 2))
    rows, columns = torch.arange(share[0])[:, None], torch.arange(share[1])[None, :]

    def coordinate(bases):
        result = torch.zeros(share, dtype=torch.int64)
        for bit, (row, column) in enumerate(bases):
            source, value = (rows, row) if row else (columns, column)
            if value:
                result = result + (((source & value) != 0).to(torch.int64) << bit)
        return result

    half = any(not any(basis) for basis in linear.rows)
    return Places(coordinate(linear.rows), coordinate(linear.cols), 2 ** len(linear.cols), half)


@functools.lru_cache(maxsize=5000)
def _geometry(itemsize: int, origin: int, layout: TensorMemoryLayout, shape: tuple):
    """Elements of a buffer from column byte `origin`: (offset in bytes, shape, strides), or an index of each."""
    where = places(layout, shape)
    per_lane = LANE_BYTES // itemsize
    index = where.lanes * per_lane + where.columns + origin // itemsize
    m, n = index.shape
    step = int(index[0, 1] - index[0, 0]) if n > 1 else 1
    pitch = int(index[1, 0] - index[0, 0]) if m > 1 else per_lane
    straight = index[0, 0] + torch.arange(m)[:, None] * pitch + torch.arange(n)[None, :] * step
    if bool((straight == index).all()):
        return int(index[0, 0]) * itemsize, (m, n), (pitch, step)
    return index


def tensor_view(holder: Holder, dtype, origin: int, layout, shape) -> View:
    """A view from column byte `origin`: by strides where lanes and columns go one by one."""
    itemsize = STORAGE[dtype.name].itemsize
    geometry = _geometry(itemsize, origin, layout, tuple(shape))
    if isinstance(geometry, torch.Tensor):
        return IndexedView(holder, dtype, geometry, (itemsize, origin, layout, tuple(shape)))
    return View(holder, dtype, *geometry)


# Descriptors --------------------------------------------------------------------------------------------------------


class TensorMemoryDescriptor:
    """A buffer in tensor memory, or a part of one; `shape` is that of the cluster, with a leading one of stages."""

    def __init__(self, cta: Cta, holder: Holder, dtype, shape, layout, origin: int, view=None, label=""):
        self.cta, self.holder, self.dtype, self.layout, self.origin = cta, holder, dtype, layout, origin
        self.shape = Sizes(shape)
        self.label = label or holder.allocation.name
        self.bases = split_bases(layout, 2)
        if view is None and len(self.shape) == 2:
            view = tensor_view(holder, dtype, origin, layout, self.shape)
        self.view = view

    @property
    def type(self):
        return self

    @property
    def rank(self):
        return len(self.shape)

    def __repr__(self):
        return f"{self.label}: {list(self.shape)} of {self.dtype} in tensor memory"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownBuiltin(f"tensor_memory_descriptor.{name}", "language/blackwell.py")

    def stage_bytes(self) -> int:
        return places(self.layout, tuple(self.shape[-2:])).width * STORAGE[self.dtype.name].itemsize

    def index(self, index):
        at = checked_index(current(), index, self.shape[0], self.label)
        label = f"{self.label}[{at}]" if self.shape[0] > 1 else self.label
        origin = self.origin + at * self.stage_bytes()
        return TensorMemoryDescriptor(
            self.cta, self.holder, self.dtype, self.shape[1:], self.layout, origin, label=label
        )

    def slice(self, start, length, dim=None):
        dim = len(self.shape) - 1 if dim is None else dim
        if start < 0 or start + length > self.shape[dim]:
            current().machine.fatal("out of bounds", f"slice {start}:{start + length} of {self!r}", current())
        shape = list(self.shape)
        shape[dim] = length
        label = f"{self.label}[{start}:{start + length}]"
        if len(self.shape) == 3:
            if dim:
                raise UnknownBuiltin("a column slice of a ring in tensor memory", "language/blackwell.py")
            origin = self.origin + start * self.stage_bytes()
            return TensorMemoryDescriptor(self.cta, self.holder, self.dtype, shape, self.layout, origin, label=label)
        if any(basis[dim] for basis in self.bases):
            raise UnknownBuiltin("a slice of a dimension that is split over CTAs", "language/blackwell.py")
        if dim == 1 and self.layout.two_ctas and self.layout.block[0] == 64:
            current().machine.find(
                "bad operand",
                f"a column slice of {self!r}, a two-CTA buffer of M = 64",
                current(),
                advice="Triton 3.8 rejects it, and 3.9 addresses the wrong lanes",
            )
        view = self.view.sliced(dim, start, length)
        first = view.index[0, 0] * STORAGE[self.dtype.name].itemsize if isinstance(view, IndexedView) else view.offset
        return TensorMemoryDescriptor(
            self.cta, self.holder, self.dtype, shape, self.layout, int(first) % LANE_BYTES, view, label
        )

    def reinterpret(self, dtype=None, shape=None, layout=None):
        dtype, shape, layout = dtype or self.dtype, tuple(shape or self.shape), layout or self.layout
        new = TensorMemoryDescriptor(self.cta, self.holder, dtype, shape, layout, self.origin, label=self.label)
        own = self.holder.allocation
        end = self.origin + math.prod(shape[:-2]) * new.stage_bytes()
        if end > (own.start + own.nbytes) * 4:
            current().machine.fatal(
                "out of bounds",
                f"{self.label} ({own.nbytes} columns) is reinterpreted as {list(shape)} of {dtype}, which ends "
                f"{end // 4 - own.start} columns from its start",
                current(),
            )
        return new

    _reinterpret = reinterpret  # 3.8

    def get_reg_layout(self, num_warps=None, instr_variant="32x32b"):
        return OPAQUE

    def load(self, layout=None):
        """tcgen05.ld and tcgen05.wait::ld: a warp sees the quarter of the lanes that is its own."""
        role = current()
        role.pause()
        self._warps(role, "reads")
        data = checks.load(role, self.view, self.cta.tensor)
        self._event(role, "tmem load")
        return spread(data, self.shape, self.bases, self.cta.rank, self.dtype, layout or OPAQUE)

    def store(self, value, pred=True):
        """tcgen05.st and tcgen05.wait::st."""
        role = current()
        role.pause()
        self._warps(role, "writes")
        check_value(role, value, self)
        if bool(number(pred)):
            data = value.data[split_slices(self.shape, self.bases, self.cta.rank)] if self.bases else value.data
            checks.store(role, self.view, self.cta.tensor, data)
            self._event(role, "tmem store")

    def _event(self, role: Role, kind: str) -> None:
        size = nbytes(self.view.shape, self.dtype)
        role.cluster.event(role, kind, size, tuple(self.view.shape), (), role.chain()).name = self.label

    def _warps(self, role: Role, doing: str) -> None:
        if role.num_warps % 4:
            role.machine.fatal(
                "bad operand",
                f"{role.label} {doing} tensor memory with {role.num_warps} warps",
                role,
                advice="4 or 8 warps, each of which sees 32 lanes",
            )


@emulates("blackwell.get_tmem_reg_layout")
def get_tmem_reg_layout(*args, **kwargs):
    """3.8's way to ask."""
    return OPAQUE


@emulates("blackwell.allocate_tensor_memory")
def allocate_tensor_memory(element_ty, shape, layout, value=None):
    """Columns of the CTA's 512 (tcgen05.alloc), poisoned."""
    role = current()
    if role.cluster.launch.target != "sm100":
        role.machine.fatal("bad operand", f"tensor memory on {role.cluster.launch.target}", role)
    if not isinstance(layout, TensorMemoryLayout):
        raise UnknownBuiltin(f"tensor memory in {layout}", "language/blackwell.py")
    shape = [int(n) for n in shape]
    where = places(layout, tuple(shape[-2:]))
    columns = -(-math.prod(shape[:-2]) * where.width * STORAGE[element_ty.name].itemsize // 4)
    chain = call_chain()
    name = name_of(chain, f"tensor memory of line {chain[0][1] if chain else '?'}")
    memory = role.cta.tensor
    allocation = memory.allocate(name, columns, 1, chain, role.site())
    if allocation is not None:
        allocation.half = where.half
    taken = sum(a.nbytes / (2 if a.half else 1) for a in memory.allocations)
    if allocation is None or taken > TENSOR_COLUMNS:
        role.machine.fatal(
            "budget",
            f"{name} needs {columns} columns of tensor memory; of {TENSOR_COLUMNS}, taken are "
            + ", ".join(f"{a.name} {a.nbytes}" for a in memory.allocations),
            role,
            advice="buffers that may share columns: reinterpret one as the other",
        )
        raise AssertionError
    role.cluster.two_ctas |= layout.two_ctas
    memory.peak_columns = max(memory.peak_columns, int(taken))
    role.cluster.report.buffers[name] = columns
    descriptor = TensorMemoryDescriptor(role.cta, Holder(allocation), element_ty, shape, layout, allocation.start * 4)
    if value is not None:
        descriptor.store(value)
    return descriptor


# tcgen05 ------------------------------------------------------------------------------------------------------------


def _pair(role: Role, two_ctas: bool) -> list[Cta] | None:
    """The CTAs that a tensor-core instruction of this role works on, or None if its partner issues it."""
    if not two_ctas:
        return [role.cta]
    if role.cta.rank & 1:
        return None
    return [role.cluster.ctas[role.cta.rank], role.cluster.ctas[role.cta.rank + 1]]


def _memory(descriptor, cta: Cta):
    return cta.shared if isinstance(descriptor, SharedDescriptor) else cta.tensor


def _gathered(actor, descriptor, ctas: list[Cta]) -> torch.Tensor:
    """An operand: one CTA's share, or for a pair the whole of both."""
    if len(ctas) == 1:
        return checks.load(actor, descriptor.view, _memory(descriptor, ctas[0]))
    whole = torch.empty(list(descriptor.shape), dtype=torch_dtype(descriptor.dtype))
    for cta in ctas:
        share = checks.load(actor, descriptor.view, _memory(descriptor, cta))
        whole[split_slices(descriptor.shape, descriptor.bases, cta.rank)] = share
    return whole


def _check_product(role: Role, a, b, acc) -> None:
    """Shapes, types and places that tcgen05.mma takes (PTX ISA, "tcgen05.mma", "Matrix shape", "Data types")."""
    if not isinstance(b, SharedDescriptor):
        raise TypeError(f"operand B of tcgen05_mma must be in shared memory, got {b!r}")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or tuple(acc.shape) != (m, n):
        raise ValueError(f"product of {list(a.shape)} and {list(b.shape)} into {list(acc.shape)}")
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        role.machine.fatal("bad operand", f"product of {a.dtype} and {b.dtype}", role)
    block_m, block_n = acc.layout.block
    step = 32 * 8 // a.dtype.primitive_bitwidth
    if block_m not in (64, 128) or block_n % (8 if block_m == 64 else 16) or block_n > 256 or k % step:
        role.machine.find(
            "bad operand",
            f"tcgen05_mma of {m} x {n} x {k} in {a.dtype} in blocks of {block_m} x {block_n}",
            role,
            advice=f"M of 64 or 128 a CTA, N a multiple of 16 up to 256, K of {step}",
        )
    if acc.dtype.name == "fp32" and acc.layout.col_stride != 1:
        role.machine.find("bad operand", f"an fp32 accumulator with col_stride {acc.layout.col_stride}", role)
    check_shared_operand(role, b, 0, "B")
    if isinstance(a, SharedDescriptor):
        check_shared_operand(role, a, 1, "A")
    elif a.dtype.primitive_bitwidth == 16 and a.layout.col_stride != 1:
        role.machine.find(
            "bad operand",
            f"operand A in tensor memory with col_stride {a.layout.col_stride}",
            role,
            advice="16-bit operands are packed in pairs: col_stride=1",
        )


@emulates("blackwell.tcgen05_mma")
def tcgen05_mma(a, b, acc, *, use_acc=True, pred=True, multicast=False, mbarriers=None, mbarrier_preds=None):
    """tcgen05.mma, and a commit to each barrier. Without barriers nothing waits for it."""
    role = current()
    settle_inits(role)
    role.pause()
    if role.cluster.launch.target != "sm100":
        role.machine.fatal("bad operand", f"tcgen05_mma on {role.cluster.launch.target}", role, advice="warpgroup_mma")
    if not bool(number(pred)):
        return
    _check_product(role, a, b, acc)
    ctas = _pair(role, acc.layout.two_ctas)
    if ctas is None:
        return
    add = bool(number(use_acc))

    def work(operation):
        left, right = _gathered(operation, a, ctas), _gathered(operation, b, ctas)
        result = multiply(left, right, "tf32" if a.dtype.name == "fp32" else None)
        if add:
            result = result + _gathered(operation, acc, ctas).to(result.dtype)
        result = result.to(torch_dtype(acc.dtype))
        for cta in ctas:
            share = result[split_slices(acc.shape, acc.bases, cta.rank)] if len(ctas) > 1 else result
            checks.store(operation, acc.view, cta.tensor, share)

    size = nbytes(b.view.shape, b.dtype)
    if isinstance(a, SharedDescriptor):
        size += nbytes(a.view.shape, a.dtype)
    operation = TensorCore(role, "mma", size, (a.shape[0], b.shape[1], a.shape[1]), work)
    operation.event.name = acc.label
    operation.targets_of = [(cta.tensor, acc.view) for cta in ctas]
    preds = mbarrier_preds if mbarrier_preds is not None else [True] * len(mbarriers or ())
    operands = [d for d in (a, b) if isinstance(d, SharedDescriptor)] if multicast else ()
    for barrier, wanted in zip(mbarriers or (), preds, strict=True):
        if bool(number(wanted)):
            _commit(role, barrier, operands)


def _commit(role: Role, barrier: SharedDescriptor, operands) -> None:
    """An arrival on the barriers of this CTA, of its partner where products are of pairs, and of all CTAs that were
    sent one of `operands` together with them: theirs must not be overwritten either (Gluon tutorial 14)."""
    own, pairs = role.cta.rank, role.cluster.two_ctas
    ranks = {own}
    for cta in role.cluster.ctas:
        if pairs and cta.rank & 1:
            continue
        if any(home(operand, cta.rank) == home(operand, own) for operand in operands):
            ranks.add(cta.rank)
    if pairs:
        ranks |= {rank | 1 for rank in ranks}
    targets = dict.fromkeys(barrier_at(barrier, rank)[:2] for rank in sorted(ranks))
    Commit(role, [(cta, address, barrier.label) for cta, address in targets])


@emulates("blackwell.tcgen05_commit")
def tcgen05_commit(barrier, pred=True, descs=()):
    """Arrives when all tensor-core work that this role has issued so far is complete; of a pair, the lead commits."""
    role = current()
    settle_inits(role)
    role.pause()
    if bool(number(pred)) and not (role.cluster.two_ctas and role.cta.rank & 1):
        _commit(role, barrier, descs)


@emulates("blackwell.tcgen05_copy")
def tcgen05_copy(src, dst):
    """tcgen05.cp: shared to tensor memory, in the queue of tensor-core work."""
    role = current()
    role.pause()
    if not isinstance(dst, TensorMemoryDescriptor) or tuple(src.shape) != tuple(dst.shape):
        raise UnknownBuiltin("tcgen05_copy that changes the shape", "language/blackwell.py")
    cta = role.cta

    def work(operation):
        checks.store(operation, dst.view, cta.tensor, checks.load(operation, src.view, cta.shared))

    TensorCore(
        role, "tcgen05.cp", nbytes(src.view.shape, src.dtype), tuple(src.view.shape), work
    ).event.name = dst.label


# Cluster launch control ---------------------------------------------------------------------------------------------


@emulates("blackwell.clc.try_cancel")
def try_cancel(result, barrier, *options, **more):
    """One CTA of the cluster asks, and all get the answer."""
    role = current()
    settle_inits(role)
    role.pause()
    if role.cta.rank:
        return
    targets = []
    for cta in role.cluster.ctas:
        owner, address, _ = barrier_at(barrier, cta.rank)
        targets.append((cta, result.view, (owner, address, barrier.label)))
    TryCancel(role, targets).event.name = result.label


class LaunchAnswer:
    """The answer of try_cancel in registers."""

    def __init__(self, words):
        self.taken, self.packed = (int(w) for w in words)

    def is_canceled(self):
        return Scalar(bool(self.taken), tl.int1)

    def program_id(self, dim):
        """Undefined unless is_canceled: poison."""
        return Scalar((self.packed >> 20 * number(dim)) & 0xFFFFF if self.taken else -1, tl.int32)


@emulates("blackwell.clc.load_result")
def load_result(src):
    role = current()
    role.pause()
    words = checks.load(role, src.view, src.cta.shared).reshape(-1)
    role.cluster.event(role, "load", 16, (2,), (), role.chain()).name = src.label
    return LaunchAnswer(words.tolist())


emulates("blackwell.tensor_memory_descriptor")(TensorMemoryDescriptor)
