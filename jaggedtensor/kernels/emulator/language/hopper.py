"""TMA, wgmma, cp.async and fences, as a kernel sees them."""

import math
from typing import Any, NamedTuple

from triton.experimental.gluon.language._layouts import DotOperandLayout, NVMMADistributedLayout, NVMMASharedLayout

from jaggedtensor.kernels.emulator.checks import join
from jaggedtensor.kernels.emulator.engines import Copy, Product, RemoteStore, TmaLoad, TmaStore, reduction
from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language.control import load, within_bounds
from jaggedtensor.kernels.emulator.language.registry import emulates
from jaggedtensor.kernels.emulator.language.shared import (
    SharedDescriptor,
    Sizes,
    barrier_at,
    check_value,
    home,
)
from jaggedtensor.kernels.emulator.language.splits import split_bases, split_place, split_shape, split_slices
from jaggedtensor.kernels.emulator.language.values import InFlight, Tensor, as_scalar, number
from jaggedtensor.kernels.emulator.memory import GlobalDescriptor, View, nbytes
from jaggedtensor.kernels.emulator.roles import Role, current, settle_inits

# Fences -------------------------------------------------------------------------------------------------------------


@emulates("hopper.fence_async_shared", "blackwell.fence_async_shared")
def fence_async_shared(cluster=False):
    """fence.proxy.async: ordinary stores that this role has seen become visible to TMA and tensor cores."""
    role = current()
    role.pause()
    role.fenced = list(role.clock)
    role.tick()
    role.cluster.event(role, "fence", 0, (), (), role.chain())


# TMA ----------------------------------------------------------------------------------------------------------------


class BoxType(NamedTuple):
    """`desc.block_type`: what one box holds."""

    shape: Sizes
    element_ty: Any

    @property
    def scalar(self):
        return self.element_ty

    @property
    def nbytes(self):
        return nbytes(self.shape, self.element_ty)


class TensorMap:
    """A TMA descriptor in a kernel: `desc.shape`, `desc.block_shape`, `desc.dtype`, `desc.layout`."""

    def __init__(self, target: GlobalDescriptor):
        self.target = target
        self.block_shape = Sizes(target.block_shape)
        self.dtype = target.dtype
        self.layout = target.layout
        self.bases = split_bases(target.layout, len(self.block_shape))

    @property
    def shape(self):
        return tuple(as_scalar(int(n)) for n in self.target.sizes)

    @property
    def strides(self):
        return tuple(as_scalar(int(n)) for n in self.target.steps)

    @property
    def nbytes_per_cta(self):
        return nbytes(split_shape(self.block_shape, self.bases), self.dtype)

    @property
    def block_type(self):
        return BoxType(self.block_shape, self.dtype)

    @property
    def type(self):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownBuiltin(f"tensor_descriptor.{name}", "language/hopper.py")


def _check_box(role: Role, descriptor: TensorMap, buffer: SharedDescriptor, coordinates) -> None:
    """The buffer holds the block, in the descriptor's layout."""
    place = f"{buffer!r} and a descriptor of {list(descriptor.block_shape)} of {descriptor.dtype}"
    if len(coordinates) != len(descriptor.block_shape):
        raise ValueError(f"{len(coordinates)} coordinates for a block of {list(descriptor.block_shape)}")
    if buffer.numel != math.prod(descriptor.block_shape) or buffer.shape[-1] != descriptor.block_shape[-1]:
        role.machine.fatal("bad operand", f"TMA between {place}: the shapes differ", role)
    if len(buffer.shape) != len(descriptor.block_shape) and any(any(basis) for basis in descriptor.bases):
        role.machine.find(
            "bad operand",
            f"TMA between {place}: the block is shared by CTAs, and has other dimensions than the buffer",
            role,
            advice="the block's dimensions for the buffer: Triton adds a CTA's place to the last ones of the block",
        )
    if buffer.dtype.primitive_bitwidth != descriptor.dtype.primitive_bitwidth:
        role.machine.fatal("bad operand", f"TMA between {place}: the types differ in size", role)
    ours, theirs = buffer.layout, descriptor.layout
    if isinstance(ours, NVMMASharedLayout) and isinstance(theirs, NVMMASharedLayout):
        if (ours.swizzle_byte_width, ours.transposed) != (theirs.swizzle_byte_width, theirs.transposed):
            role.machine.find(
                "bad operand",
                f"TMA between {place}: the buffer is swizzled by {ours.swizzle_byte_width} bytes, the descriptor's "
                f"block by {theirs.swizzle_byte_width}",
                role,
                advice="give both the same NVMMASharedLayout",
            )
    elif not isinstance(ours, NVMMASharedLayout):
        role.machine.find("bad operand", f"TMA between {place}: the buffer's layout is {ours}", role)


def _own_coordinates(descriptor: TensorMap, coordinates, rank: int):
    """(coordinates, block shape) of one CTA's share of a block."""
    shape, bases = descriptor.block_shape, descriptor.bases
    place = split_place(shape, bases, rank)
    return [int(number(c)) + p for c, p in zip(coordinates, place, strict=True)], split_shape(shape, bases)


@emulates(
    "nvidia.tma.async_load", "hopper.tma.async_copy_global_to_shared", "blackwell.tma.async_copy_global_to_shared"
)
def tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False, cache_policy=None):
    """Each CTA loads its share; with `multicast`, one of those that hold the same share loads it for all of them."""
    role = current()
    settle_inits(role)
    role.pause()
    if not bool(number(pred)):
        return
    _check_box(role, tensor_desc, result, coord)
    rank = role.cta.rank
    receivers = [rank]
    if multicast:
        receivers = [c.rank for c in role.cluster.ctas if home(result, c.rank) == home(result, rank)]
        if rank != receivers[0]:
            return
    coordinates, block = _own_coordinates(tensor_desc, coord, rank)
    targets = []
    for receiver in receivers:
        cta, address, _ = barrier_at(barrier, receiver)
        targets.append((role.cluster.ctas[receiver], result.view, (cta, address, barrier.label)))
    operation = TmaLoad(role, tensor_desc.target, coordinates, block, targets)
    operation.event.name = result.label


@emulates(
    "nvidia.tma.async_store", "hopper.tma.async_copy_shared_to_global", "blackwell.tma.async_copy_shared_to_global"
)
def tma_store(tensor_desc, coord, src, cache_policy=None):
    """A bulk group of its own for each store."""
    _store(tensor_desc, coord, src, None)


def _store(descriptor, coord, src, combine):
    role = current()
    role.pause()
    _check_box(role, descriptor, src, coord)
    if home(src, role.cta.rank) != role.cta.rank:
        return  # another CTA holds the same share, and stores it
    coordinates, block = _own_coordinates(descriptor, coord, role.cta.rank)
    operation = TmaStore(role, descriptor.target, coordinates, src.view, block, combine)
    operation.event.name = src.label
    role.stores.append(operation)


def _reduce(name):
    def tma_reduce(tensor_desc, coord, src):
        _store(tensor_desc, coord, src, reduction(name))

    return tma_reduce


for _name in ("add", "min", "max", "and", "or", "xor"):
    emulates(f"nvidia.tma.async_atomic_{_name}")(_reduce(_name))


@emulates("nvidia.tma.store_wait")
def tma_store_wait(pendings, read_only=True):
    """cp.async.bulk.wait_group(.read): all but the last `pendings` stores of this role have read their sources; with
    read_only=False, their results are visible too."""
    role = current()
    steps = 1 if read_only else 2
    must = role.stores[: max(len(role.stores) - pendings, 0)]
    role.stats.waits += 1
    role.wait_until(lambda: all(op.done >= steps for op in must), f"its stores, all but {pendings}")
    for operation in must:
        join(role.clock, operation.clock)
    for operation in must:  # those behind one that is not done stay: `pendings` counts them in the order of issue
        if operation.done < 2:
            break
        role.stores.pop(0)
    after = tuple(op.event.number for op in must)
    role.cluster.event(role, "store wait", 0, (), after, role.chain()).name = "" if read_only else "written"


@emulates("nvidia.tma.make_tensor_descriptor")
def make_tensor_descriptor(base, shape, strides, block_shape, layout, padding_option="zero"):
    """A descriptor made on the device."""
    return TensorMap(
        GlobalDescriptor(
            base.buffer,
            [int(number(n)) for n in shape],
            [int(number(n)) for n in strides],
            [int(n) for n in block_shape],
            layout,
            base.element,
            padding_option,
            base.offset,
        )
    )


@emulates("hopper.async_store", "blackwell.async_store")
def async_store(dst, value, mbarrier):
    """st.async to whichever CTA holds each part of `dst`, from the CTA that has that part of the block."""
    role = current()
    settle_inits(role)
    role.pause()
    if len(role.cluster.ctas) < 2:
        raise ValueError("async_store needs a cluster of at least two CTAs")
    if list(value.shape) != list(dst.shape) or value.dtype != dst.dtype:
        check_value(role, value, dst)
    mine = split_slices(value.shape, value.part or (), role.cta.rank)
    for cta in role.cluster.ctas:
        theirs = split_slices(dst.shape, dst.bases, cta.rank)
        common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(mine, theirs, strict=True))
        if any(s.start >= s.stop for s in common):
            continue
        view = dst.view
        for dim, (part, whole) in enumerate(zip(common, theirs, strict=True)):
            view = view.sliced(dim, part.start - whole.start, part.stop - part.start)
        owner, address, _ = barrier_at(mbarrier, cta.rank)
        operation = RemoteStore(role, cta, view, value.data[common].clone(), (owner, address, mbarrier.label))
        operation.event.name = dst.label


# wgmma --------------------------------------------------------------------------------------------------------------


class Accumulator(InFlight):
    """The result of a product that is not waited for: only another product, or a wait, may take it."""

    def __init__(self, operation: Product, shape, dtype, layout):
        self.operation, self.shape, self.dtype, self.layout = operation, Sizes(shape), dtype, layout

    def used(self, *args):
        role = current()
        role.machine.fatal(
            "accumulator in flight",
            f"{role.label} uses the result of a warpgroup_mma that is not waited for",
            role,
            advice=f"warpgroup_mma_wait after {self.operation.event.line}, with it among deps",
        )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self.used()

    def __repr__(self):
        return "a warpgroup_mma accumulator in flight"


for _name in "add radd sub rsub mul rmul truediv rtruediv lt le gt ge neg getitem".split():
    setattr(Accumulator, f"__{_name}__", Accumulator.used)


def _major(view: View) -> int:
    """The dimension whose elements are neighbours in memory."""
    return min(range(len(view.strides)), key=lambda d: (view.strides[d], -d))


def check_shared_operand(role: Role, operand: SharedDescriptor, k_dim: int, what: str) -> None:
    """In a layout that tensor cores read (PTX ISA, "wgmma", "Strides"; "tcgen05", "Canonical layouts"). Operands other
    than 16-bit ones must be K-major but for 8-bit ones of tcgen05 (CUTLASS, "Blackwell SM100 GEMMs", tables of
    layouts)."""
    either = (16, 8) if role.cluster.launch.target == "sm100" else (16,)
    if not isinstance(operand.layout, NVMMASharedLayout):
        role.machine.find(
            "bad operand",
            f"operand {what} of a product is {operand!r} in layout {operand.layout}",
            role,
            advice="NVMMASharedLayout",
        )
    elif (
        operand.dtype.primitive_bitwidth not in either and min(operand.view.shape) > 1 and _major(operand.view) != k_dim
    ):
        role.machine.find(
            "bad operand",
            f"operand {what} of a product is {operand!r}, whose K dimension is not contiguous",
            role,
            advice="types other than fp16 and bf16, and of tcgen05 those of 8 bits, must be K-major",
        )


_WGMMA_K = {8: 32, 16: 16, 32: 8}


@emulates("hopper.warpgroup_mma")
def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    """wgmma.mma_async m64nNkK: M a multiple of 64 for each warp group, N a multiple of 8, K of 32 bytes."""
    role = current()
    role.pause()
    target = role.cluster.launch.target
    if target != "sm90":
        role.machine.fatal("bad operand", f"warpgroup_mma on {target}", role, advice="tcgen05_mma")
    if not isinstance(b, SharedDescriptor):
        raise TypeError(f"operand B of warpgroup_mma must be in shared memory, got {b!r}")
    if isinstance(a, Accumulator):
        a.used()
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or list(acc.shape) != [m, n]:
        raise ValueError(f"product of {list(a.shape)} and {list(b.shape)} into {list(acc.shape)}")
    step = _WGMMA_K.get(a.dtype.primitive_bitwidth, 16)
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        role.machine.fatal("bad operand", f"product of {a.dtype} and {b.dtype}", role)
    if m % 64 or n % 8 or k % step or role.num_warps % 4:
        role.machine.fatal(
            "bad operand",
            f"warpgroup_mma of {m} x {n} x {k} in {a.dtype} by {role.num_warps} warps",
            role,
            advice=f"M a multiple of 64, N of 8, K of {step}; whole warp groups",
        )
    check_shared_operand(role, b, 0, "B")
    if isinstance(a, SharedDescriptor):
        check_shared_operand(role, a, 1, "A")
    elif isinstance(a.layout, NVMMADistributedLayout):
        role.machine.find(
            "bad operand",
            "operand A of warpgroup_mma in registers needs a DotOperandLayout",
            role,
            advice="convert_layout(a, DotOperandLayout(0, parent=layout, k_width=2))",
        )
    _check_layouts(role, a, acc, n)
    precision = precision or ("tf32" if a.dtype.name == "fp32" else None)
    operation = Product(
        role,
        a if isinstance(a, Tensor) else a.view,
        b.view,
        acc,
        bool(number(use_acc)),
        precision,
        (m, n, k),
        acc.dtype,
        acc.layout,
    )
    role.products.append(operation)
    result = Accumulator(operation, (m, n), acc.dtype, acc.layout)
    return result if is_async else warpgroup_mma_wait(0, (result,))


def _check_layouts(role: Role, a, acc, n: int) -> None:
    """What is known of the register layouts: version 3 accumulators of at most 256 columns, and a matching A."""
    layout = acc.layout
    if isinstance(layout, NVMMADistributedLayout):
        columns = layout.instr_shape[1]
        if layout.version[0] != 3 or columns > 256 or columns % 8 or n % columns:
            role.machine.find("bad operand", f"an accumulator of warpgroup_mma with {n} columns in {layout}", role)
    in_registers = isinstance(a, Tensor) and isinstance(a.layout, DotOperandLayout)
    known = in_registers and isinstance(layout, NVMMADistributedLayout)
    if known and (a.layout.operand_index != 0 or a.layout.parent != layout):
        role.machine.find("bad operand", f"operand A in {a.layout} for an accumulator in {layout}", role)


@emulates("hopper.warpgroup_mma_init")
def warpgroup_mma_init(value):
    return value


@emulates("hopper.warpgroup_mma_wait")
def warpgroup_mma_wait(num_outstanding=0, deps=None):
    """wgmma.wait_group: all but the last `num_outstanding` products of this role are complete; their results can be
    used, and their operands overwritten."""
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    role = current()
    count = len(role.products) - num_outstanding
    must = role.products[:count] if count > 0 else []
    role.stats.waits += 1
    role.wait_until(lambda: all(op.done for op in must), f"its products, all but {num_outstanding}")
    for operation in must:
        join(role.clock, operation.clock)
        operation.known = True
    role.products = role.products[len(must) :]
    role.cluster.event(role, "mma wait", 0, (), tuple(op.event.number for op in must), role.chain())
    results = tuple(_settled(dep) for dep in deps)
    return results[0] if len(results) == 1 else results


def _settled(dep):
    if isinstance(dep, Accumulator) and getattr(dep.operation, "known", False):
        return Tensor(dep.operation.result, dep.dtype, dep.layout)
    return dep


# cp.async -----------------------------------------------------------------------------------------------------------


@emulates("nvidia.async_copy.async_load", "nvidia.async_copy.async_copy_global_to_shared")
def copy_load(smem, pointer, mask=None, **options):
    """Masked elements are filled with zero, as cp.async does with a source size of 0."""
    role = current()
    role.pause()
    other = None if mask is None else 0
    within_bounds(pointer, mask, "reads")
    data = load(pointer, mask, other).data
    operation = Copy(role, smem.view, data)
    operation.event.name = smem.label
    role.copies.append(operation)


@emulates("nvidia.async_copy.commit_group")
def copy_commit():
    role = current()
    role.copy_groups.append(role.copies)
    role.copies = []


@emulates("nvidia.async_copy.wait_group")
def copy_wait(num_outstanding=0):
    role = current()
    count = len(role.copy_groups) - num_outstanding
    must = [op for group in role.copy_groups[: max(count, 0)] for op in group]
    role.wait_until(lambda: all(op.done for op in must), f"its copies, all but {num_outstanding} groups")
    for operation in must:
        join(role.clock, operation.clock)
    role.copy_groups = role.copy_groups[max(count, 0) :]
