"""Engines: TMA, tensor cores, cluster launch control. Each operation lands when the scheduler says so."""

import torch

from jaggedtensor.kernels.emulator import barriers, checks
from jaggedtensor.kernels.emulator.language.values import Tensor, torch_dtype
from jaggedtensor.kernels.emulator.memory import GlobalDescriptor, View, nbytes
from jaggedtensor.kernels.emulator.roles import Cta, Operation, Role


class TmaLoad(Operation):
    """cp.async.bulk.tensor, global to shared: bytes land late, then the barrier's tx-count falls by all of the box.

    What lies outside the tensor is filled, and counts as bytes (PTX ISA, "cp.async.bulk.tensor", "out-of-boundary
    access"). `targets` are (CTA, view, barrier): several with multicast. A barrier is (CTA, address, name).
    """

    def __init__(self, role: Role, descriptor: GlobalDescriptor, coordinates, block_shape, targets, kind="tma load"):
        view = targets[0][1]
        super().__init__(role, kind, nbytes=nbytes(view.shape, view.dtype), shape=tuple(view.shape))
        self.descriptor = descriptor
        self.coordinates = list(coordinates)
        self.block_shape = list(block_shape)
        self.targets = targets
        self.size = nbytes(view.shape, view.dtype)
        self.phases = []
        for cta, target, (owner, address, _) in targets:
            barrier = owner.barriers.get(address)
            self.phases.append(None if barrier is None else barrier.completed)
            if barrier is not None:
                barrier.issued += self.size
            if checks.twin(target, cta.shared).valid & target.footprint().mask:
                target.poison(cta.shared)
        self.steps = len(targets)
        self.targets_of = [(cta.shared, target) for cta, target, _ in targets]

    def effect(self, step: int) -> None:
        cta, view, (owner, address, name) = self.targets[step]
        data = fetch(self, self.descriptor, self.coordinates, self.block_shape)
        checks.store(self, view, cta.shared, data.reshape(view.shape))
        barriers.deliver(self, owner.barriers.get(address), name, self.size, self.phases[step], self.event.number)


def fetch(actor, descriptor: GlobalDescriptor, coordinates, block_shape) -> torch.Tensor:
    """A block of a global tensor, filled where it lies outside."""
    box = descriptor.box(coordinates, block_shape)
    source = descriptor.buffer.flat
    fill = float("nan") if descriptor.padding == "nan" else 0
    if box is None:
        return torch.full(block_shape, fill, dtype=source.dtype)
    first, last, shape, steps, place = box
    if not descriptor.buffer.inside(first, last):
        actor.machine.fatal(
            "out of bounds",
            f"{actor.label} reads elements {first}..{last} of {descriptor.buffer.name}, which has "
            f"{descriptor.buffer.extent}",
            actor,
            advice=f"the descriptor's shape {descriptor.sizes} and strides {descriptor.steps}",
        )
    checks.on_global(actor, descriptor.buffer, checks.Strided(first, shape, steps), False)
    data = descriptor.view(first, shape, steps)
    if list(shape) == list(block_shape):
        return data
    whole = torch.full(block_shape, fill, dtype=source.dtype)
    whole[place] = data
    return whole


class TmaStore(Operation):
    """cp(.reduce).async.bulk.tensor, shared to global: the source is read late, and the result is there later still.

    Parts outside the tensor are clipped. `combine` is None to overwrite, else (global, block) to the new values: a
    reduction, atomic for each element. Step 1 ends what `store_wait` waits for by default (wait_group.read).
    """

    steps = 2

    def __init__(self, role: Role, descriptor: GlobalDescriptor, coordinates, view: View, block_shape, combine=None):
        kind = "tma store" if combine is None else "tma reduce"
        super().__init__(role, kind, nbytes=nbytes(view.shape, view.dtype), shape=tuple(view.shape))
        self.descriptor = descriptor
        self.coordinates = list(coordinates)
        self.block_shape = list(block_shape)
        self.view = view
        self.combine = combine
        self.data: torch.Tensor | None = None
        self.event.name = view.allocation.name

    def effect(self, step: int) -> None:
        if step == 0:
            self.data = checks.load(self, self.view, self.cta.shared).reshape(self.block_shape)
            return
        box = self.descriptor.box(self.coordinates, self.block_shape)
        if box is None or self.data is None:
            return
        first, last, shape, steps, place = box
        buffer = self.descriptor.buffer
        if not buffer.inside(first, last):
            self.machine.fatal(
                "out of bounds",
                f"{self.label} writes elements {first}..{last} of {buffer.name}, which has {buffer.extent}",
                self,
                advice=f"the descriptor's shape {self.descriptor.sizes} and strides {self.descriptor.steps}",
            )
        checks.on_global(self, buffer, checks.Strided(first, shape, steps), True, self.combine is not None)
        target = self.descriptor.view(first, shape, steps)
        new = self.data[place].to(target.dtype)
        target.copy_(new if self.combine is None else self.combine(target, new))


class Copy(Operation):
    """cp.async, global to shared, by a role's own threads: in the generic proxy (PTX ISA, "Async proxy")."""

    asynchronous = False

    def __init__(self, role: Role, view: View, data: torch.Tensor):
        super().__init__(role, "cp.async", "cp.async", nbytes(view.shape, view.dtype), tuple(view.shape))
        self.view = view
        self.data = data

    def effect(self, step: int) -> None:
        checks.store(self, self.view, self.cta.shared, self.data)


def multiply(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    """a @ b as tensor cores do it: exact products of the operands' types, added in fp32."""
    if not a.dtype.is_floating_point:
        return (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int32)
    a, b = a.to(torch.float32), b.to(torch.float32)
    if precision == "tf32":
        a, b = truncated(a), truncated(b)
    return a @ b


def truncated(x: torch.Tensor) -> torch.Tensor:
    """fp32 to tf32: 10 bits of mantissa."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class Product(Operation):
    """wgmma.mma_async: reads its operands in shared memory late, through the asynchronous proxy.

    Operations of a warp group complete in order (PTX ISA, "wgmma.commit_group / wait_group").
    """

    def __init__(self, role: Role, a, b: View, accumulator, use_accumulator: bool, precision, shape, dtype, layout):
        in_shared = nbytes(b.shape, b.dtype) + (0 if isinstance(a, Tensor) else nbytes(a.shape, a.dtype))
        super().__init__(role, "wgmma", "wgmma", in_shared, shape)
        self.a, self.b = a, b
        self.accumulator = accumulator  # a block, an Accumulator or None
        self.use_accumulator = use_accumulator
        self.precision = precision
        self.dtype, self.layout = dtype, layout
        self.result: torch.Tensor | None = None

    def effect(self, step: int) -> None:
        memory = self.cta.shared
        a = self.a.data if isinstance(self.a, Tensor) else checks.load(self, self.a, memory)
        b = checks.load(self, self.b, memory)
        result = multiply(a, b, self.precision)
        if self.use_accumulator:
            earlier = self.accumulator
            data = earlier.data if isinstance(earlier, Tensor) else earlier.operation.result
            result = result + data.to(result.dtype)
        self.result = result.to(torch_dtype(self.dtype))
        self.accumulator = self.a = None


class TensorCore(Operation):
    """tcgen05.mma and tcgen05.cp: operations of one issuing role run in order (PTX ISA, "tcgen05 memory consistency").

    Both read shared memory late, through the asynchronous proxy. `halves` are the CTAs of the pair, with the part of
    each operand that it holds.
    """

    def __init__(self, role: Role, kind: str, size: int, shape: tuple, work):
        super().__init__(role, kind, "tcgen05", size, shape)
        self.work = work

    def effect(self, step: int) -> None:
        self.work(self)
        self.work = None


class Commit(Operation):
    """tcgen05.commit: arrives, with a count of 1, when all that the role has issued before is complete.

    `targets` are (CTA, barrier address, name).
    """

    def __init__(self, role: Role, targets):
        super().__init__(role, "commit", "tcgen05")
        self.targets = targets
        self.event.name = targets[0][2]

    def effect(self, step: int) -> None:
        for cta, address, name in self.targets:
            barriers.arrive(self, cta.barriers.get(address), name, 1, self.event.number, "commits to")


class RemoteStore(Operation):
    """st.async: stores into shared memory of a CTA of the cluster, and tells a barrier there how many bytes came.

    What goes to several CTAs is an operation for each: a barrier that tells of one tells nothing of the others.
    """

    def __init__(self, role: Role, cta: Cta, view: View, data: torch.Tensor, barrier: tuple):
        super().__init__(role, "st.async", nbytes=nbytes(view.shape, view.dtype), shape=tuple(view.shape))
        self.asynchronous = False  # its stores need a fence before tensor cores read them
        self.target, self.view, self.data, self.barrier = cta, view, data, barrier
        self.targets_of = [(cta.shared, view)]

    def effect(self, step: int) -> None:
        owner, address, name = self.barrier
        checks.store(self, self.view, self.target.shared, self.data)
        barriers.deliver(self, owner.barriers.get(address), name, self.event.nbytes, None, self.event.number)


class TryCancel(Operation):
    """clusterlaunchcontrol.try_cancel: takes over a cluster that has not started, if there is one.

    Writes 16 bytes and delivers them to the barrier, in every CTA of the cluster (PTX ISA,
    "clusterlaunchcontrol.try_cancel"). The answer is kept beside the bytes, since their encoding is opaque.
    """

    def __init__(self, role: Role, targets):
        super().__init__(role, "try_cancel", nbytes=16)
        self.targets = targets  # (CTA, view, barrier)
        self.phases = [b.completed if (b := owner.barriers.get(at)) else None for _, _, (owner, at, _) in targets]

    def effect(self, step: int) -> None:
        program = self.cluster.launch.cancel()
        words = [0, 0] if program is None else [1, program[0] | program[1] << 20 | program[2] << 40]
        for (cta, view, (owner, address, name)), phase in zip(self.targets, self.phases, strict=True):
            checks.store(self, view, cta.shared, torch.tensor(words, dtype=torch.int64).reshape(view.shape))
            barriers.deliver(self, owner.barriers.get(address), name, 16, phase, self.event.number)


def reduction(name: str):
    """(global, block) to new values, for TMA's reductions."""
    table = {
        "add": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "and": torch.bitwise_and,
        "or": torch.bitwise_or,
        "xor": torch.bitwise_xor,
    }
    return table[name]
