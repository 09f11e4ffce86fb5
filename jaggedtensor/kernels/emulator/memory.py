"""Memory as bytes: shared and tensor memory of a CTA, views of them, and global tensors.

Shared memory is row-major in the logical order of a view's dimensions: swizzling, which only permutes bytes within a
buffer, is left out. Tensor memory is 128 lanes x 2048 bytes (PTX ISA, "Tensor Memory": 512 columns of 32 bits);
where an element lies is asked of Triton's own layout.
"""

import functools
import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from jaggedtensor.kernels.emulator.language.values import STORAGE, from_storage, to_storage

GRANULE = 2  # bytes that are watched together
SHARED_BYTES = 227 * 1024  # per CTA, SM90 and SM100 (CUDA programming guide, compute capabilities 9.0 and 10.0)
TENSOR_COLUMNS = 512
LANES = 128
LANE_BYTES = 2 * TENSOR_COLUMNS * 4  # twice what there is: buffers of 64 lanes that share columns get their own here
POISON = 0xFF  # NaN in every floating-point type, -1 in the signed ones


@dataclass(frozen=True)
class Footprint:
    """The granules that an access touches: bounds, and a bit for each."""

    low: int
    high: int
    mask: int

    def meets(self, other: "Footprint") -> bool:
        return self.low < other.high and other.low < self.high and (self.mask & other.mask) != 0


def _span(first: int, count: int) -> int:
    return ((1 << count) - 1) << first


@functools.lru_cache(maxsize=20000)
def strided_footprint(offset: int, shape: tuple, strides: tuple, itemsize: int) -> Footprint:
    """Footprint of elements at `offset` + index · strides; all in bytes, a stride for each dimension."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    run = itemsize
    while dims and dims[0][0] == run:
        stride, size = dims.pop(0)
        run = stride * size
    starts = numpy.array([offset], dtype=numpy.int64)
    for stride, size in dims:
        starts = (starts[:, None] + numpy.arange(size, dtype=numpy.int64) * stride).reshape(-1)
    return _runs(starts, run)


def indexed_footprint(index: torch.Tensor, itemsize: int) -> Footprint:
    """Footprint of elements whose element indices are given."""
    return _runs(index.reshape(-1).numpy() * itemsize, itemsize)


def _runs(starts: numpy.ndarray, run: int) -> Footprint:
    """Footprint of runs of `run` bytes."""
    first = starts // GRANULE
    last = (starts + run - 1) // GRANULE
    low, high = int(first.min()), int(last.max()) + 1
    if len(starts) == 1:
        return Footprint(low, high, _span(low, high - low))
    width = int(last[0] - first[0]) + 1
    bits = numpy.zeros(-(-high // 8) * 8, dtype=bool)
    bits[(first[:, None] + numpy.arange(width)).reshape(-1)] = True
    return Footprint(low, high, int.from_bytes(numpy.packbits(bits, bitorder="little").tobytes(), "little"))


@dataclass
class Record:
    """An access that later ones are held against."""

    low: int
    high: int
    mask: int
    timeline: int
    time: int
    actor: str
    where: tuple
    generic: bool  # through the generic proxy (ordinary loads and stores), not by an engine
    form: Any = None  # of the view


class Log:
    """Accesses to some bytes that later ones are held against; buffers that have the same bytes in turn share it."""

    def __init__(self):
        self.writes: list[Record] = []
        self.reads: list[Record] = []
        self.into: Log | None = None  # what it has become a part of

    def whole(self) -> "Log":
        log = self
        while log.into is not None:
            log = log.into
        return log

    def join(self, other: "Log") -> None:
        """The other becomes a part of this one."""
        if other is not self:
            self.writes += other.writes
            self.reads += other.reads
            other.into = self


@dataclass(eq=False)
class Allocation:
    """Bytes that a kernel allocated: who touches them, and which have been written."""

    memory: "Memory"
    name: str
    start: int
    nbytes: int
    where: tuple
    log: Log = field(default_factory=Log)
    valid: int = 0  # a bit per granule that has been written
    half: bool = False  # tensor memory: 64 lanes, so that two fit in the same columns

    def covers(self, footprint: Footprint) -> bool:
        return (footprint.mask & ~self.valid) == 0


class Memory:
    """Shared or tensor memory of one CTA.

    A buffer lives as long as the kernel's Python holds a descriptor of it; its bytes may then be given out again.
    """

    def __init__(self, kind: str, cta: int):
        self.kind = kind
        self.cta = cta
        self.tensor = kind == "tensor"
        self.capacity = LANE_BYTES // 4 if self.tensor else SHARED_BYTES
        self.data = torch.full((LANES * LANE_BYTES if self.tensor else SHARED_BYTES,), POISON, dtype=torch.uint8)
        self.allocations: list[Allocation] = []
        self.dead: list[Allocation] = []  # given back, but accesses of theirs may still be under way
        self.sites: dict[Any, Allocation] = {}  # the last allocation of each place in the kernel
        self.early: dict[int, Allocation] = {}  # by start: used by another CTA before this one has come to allocate it
        self.peak = 0
        self.peak_columns = 0
        self._views: dict[torch.dtype, torch.Tensor] = {}

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """All bytes as one flat tensor of `dtype`."""
        if dtype not in self._views:
            usable = self.data.numel() // dtype.itemsize * dtype.itemsize
            self._views[dtype] = self.data[:usable].view(dtype)
        return self._views[dtype]

    def fit(self, size: int, alignment: int) -> int | None:
        """The first free place for `size` bytes (shared) or columns (tensor), or None."""
        at = 0
        for allocation in sorted(self.allocations, key=lambda a: a.start):
            if at + size <= allocation.start:
                break
            at = max(at, -(-(allocation.start + allocation.nbytes) // alignment) * alignment)
        return at if at + size <= self.capacity else None

    def allocate(self, name: str, size: int, alignment: int, where: tuple, site: Any = None) -> Allocation | None:
        """A buffer, poisoned if its bytes are fresh, or None where it does not fit.

        The same `site` gets the same bytes again, as the compiled kernel has one buffer for it however often a loop
        comes there.
        """
        before = self.sites.get(site)
        if before is not None:
            self.release(before)
            start = before.start
        else:
            found = self.fit(size, alignment)
            if found is None:
                return None
            start = found
        self.peak = max(self.peak, start + size)
        early = self.early.pop(start, None)
        if early is not None and early.nbytes == size:
            allocation = early
        else:
            allocation = Allocation(self, name, start, size, where)
            if not self._inherit(allocation):
                self._poison(start, size)
        self.allocations.append(allocation)
        if site is not None:
            self.sites[site] = allocation
        return allocation

    def _inherit(self, allocation: Allocation) -> bool:
        """Accesses by those who had its bytes before count, also those that are still to come: for their sake the bytes
        stay as they are. Whether there were any."""
        start, end = allocation.start, allocation.start + allocation.nbytes
        kept, found = [], False
        for old in self.dead:
            if old.start < end and start < old.start + old.nbytes:
                allocation.log.join(old.log.whole())
                found = True
            if old.start < start or end < old.start + old.nbytes:
                kept.append(old)
        self.dead = kept
        return found

    def at(self, other: Allocation) -> Allocation:
        """This CTA's buffer at the place of another CTA's: all of a kernel's buffers are there from its start."""
        for allocation in self.allocations:
            if allocation.start == other.start:
                return allocation
        if other.start not in self.early:
            self.early[other.start] = Allocation(self, other.name, other.start, other.nbytes, other.where)
        return self.early[other.start]

    def release(self, allocation: Allocation) -> None:
        """The kernel has dropped its last descriptor; accesses under way are still held against later users."""
        if allocation in self.allocations:
            self.allocations.remove(allocation)
            self.dead.append(allocation)

    def renew(self) -> None:
        """For the next CTA: nothing allocated, what was used poisoned."""
        self._poison(0, self.peak)
        self.allocations, self.dead, self.early, self.sites = [], [], {}, {}
        self.peak = self.peak_columns = 0

    def _poison(self, start: int, size: int) -> None:
        if self.tensor:
            self.data.view(LANES, LANE_BYTES)[:, start * 4 : (start + size) * 4] = POISON
        else:
            self.data[start : start + size] = POISON


class Holder:
    """Kept by every descriptor of an allocation; when the last is gone, the bytes are free."""

    def __init__(self, allocation: Allocation):
        self.allocation = allocation
        weakref.finalize(self, allocation.memory.release, allocation).atexit = False


class View:
    """Elements of a buffer by strides: `offset` in bytes, `strides` in elements.

    `form` says how a layout permutes the buffer's bytes, as far as it matters to reading them in another layout.
    """

    __slots__ = ("dtype", "form", "holder", "offset", "shape", "strides")

    def __init__(self, holder: Holder, dtype, offset: int, shape, strides, form=None):
        self.form = form
        self.holder = holder
        self.dtype = dtype
        self.offset = offset
        self.shape = tuple(shape)
        self.strides = tuple(strides)

    @property
    def allocation(self) -> Allocation:
        return self.holder.allocation

    def on(self, memory: Memory) -> torch.Tensor:
        """The elements in `memory`, which may be another CTA's, as a torch view."""
        dtype = STORAGE[self.dtype.name]
        return memory.typed(dtype).as_strided(self.shape, self.strides, self.offset // dtype.itemsize)

    def footprint(self) -> Footprint:
        itemsize = STORAGE[self.dtype.name].itemsize
        return strided_footprint(self.offset, self.shape, tuple(s * itemsize for s in self.strides), itemsize)

    def read(self, memory: Memory) -> torch.Tensor:
        """A copy in register types."""
        data = self.on(memory)
        out = from_storage(data, self.dtype)
        return out.clone() if out.data_ptr() == data.data_ptr() else out

    def write(self, memory: Memory, data: torch.Tensor) -> None:
        self.on(memory).copy_(to_storage(data, self.dtype))

    def poison(self, memory: Memory) -> None:
        """Fill with NaN: bytes that a copy under way may or may not have written."""
        bytes_of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        itemsize = STORAGE[self.dtype.name].itemsize
        flat = memory.typed(bytes_of[itemsize])
        flat.as_strided(self.shape, self.strides, self.offset // itemsize).fill_(POISON if itemsize == 1 else -1)

    def sliced(self, dim: int, start: int, length: int, squeeze: bool = False) -> "View":
        """`length` of dimension `dim` from `start`, without the dimension if `squeeze`."""
        itemsize = STORAGE[self.dtype.name].itemsize
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[dim] * itemsize
        if squeeze:
            del shape[dim], strides[dim]
        else:
            shape[dim] = length
        return View(self.holder, self.dtype, offset, shape, strides, self.form)

    def permuted(self, order) -> "View":
        shape, strides = [self.shape[i] for i in order], [self.strides[i] for i in order]
        return View(self.holder, self.dtype, self.offset, shape, strides, self.form)

    def reshaped(self, shape) -> "View":
        """Another shape of the same elements in the same order; raises where strides cannot say it."""
        probe = torch.empty_strided(self.shape, self.strides, device="meta").view(list(shape))
        return View(self.holder, self.dtype, self.offset, shape, probe.stride(), self.form)


class IndexedView(View):
    """Elements of a buffer by an index each, where no strides say where they are. `key` names the index."""

    __slots__ = ("index", "key")

    def __init__(self, holder: Holder, dtype, index: torch.Tensor, key: tuple, form=None):
        super().__init__(holder, dtype, 0, index.shape, (), form)
        self.index = index
        self.key = key

    def footprint(self) -> Footprint:
        footprint = _INDEXED.get(self.key)
        if footprint is None:
            if len(_INDEXED) > 5000:
                _INDEXED.clear()
            footprint = _INDEXED[self.key] = indexed_footprint(self.index, STORAGE[self.dtype.name].itemsize)
        return footprint

    def read(self, memory: Memory) -> torch.Tensor:
        return from_storage(memory.typed(STORAGE[self.dtype.name])[self.index], self.dtype)

    def write(self, memory: Memory, data: torch.Tensor) -> None:
        memory.typed(STORAGE[self.dtype.name])[self.index] = to_storage(data, self.dtype)

    def poison(self, memory: Memory) -> None:
        raise NotImplementedError("only shared memory is the target of copies")

    def sliced(self, dim: int, start: int, length: int, squeeze: bool = False) -> "IndexedView":
        index = self.index.narrow(dim, start, length)
        key = (*self.key, dim, start, length, squeeze)
        return IndexedView(self.holder, self.dtype, index.squeeze(dim) if squeeze else index, key, self.form)

    def permuted(self, order) -> "IndexedView":
        key = (*self.key, "permuted", *order)
        return IndexedView(self.holder, self.dtype, self.index.permute(*order), key, self.form)


_INDEXED: dict[tuple, Footprint] = {}


def row_major(shape) -> list[int]:
    """Strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return strides


class GlobalLog:
    """For each element of a global tensor, its last write in one word: by which program (from 1; 0 is nobody), on which
    timeline, when, and whether it was atomic."""

    TIMELINES, TIMES = 12, 28  # bits

    def __init__(self, extent: int):
        self.words = torch.zeros(extent, dtype=torch.int64)

    def word(self, program: int, timeline: int, time: int, atomic: bool) -> int:
        return ((program << self.TIMELINES | timeline) << self.TIMES | time) << 1 | atomic

    def fields(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """program, timeline, time, atomic."""
        place = words >> 1 + self.TIMES
        time = words >> 1 & (1 << self.TIMES) - 1
        return place >> self.TIMELINES, place & (1 << self.TIMELINES) - 1, time, (words & 1).bool()


class GlobalBuffer:
    """A torch tensor that a kernel was given: its elements, and nothing beside them."""

    def __init__(self, tensor: torch.Tensor, name: str):
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        self.tensor = tensor
        self.name = name
        self.extent = extent if tensor.numel() else 0
        self.flat = tensor.detach().as_strided((self.extent,), (1,)) if self.extent else tensor.detach().reshape(-1)
        if self.flat.dtype == torch.bool:
            self.flat = self.flat.view(torch.uint8)
        elif self.flat.dtype in (torch.uint16, torch.uint32, torch.uint64):
            self.flat = self.flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[self.flat.dtype.itemsize])

        self.log: GlobalLog | None = None  # made when the kernel first writes

    def inside(self, low: int, high: int) -> bool:
        """Whether elements low..high are the tensor's."""
        return low >= 0 and high < self.extent


@dataclass
class GlobalDescriptor:
    """What a TMA descriptor says of a global tensor: Gluon's `TensorDescriptor`, or one made on the device."""

    buffer: GlobalBuffer
    sizes: list[int]
    steps: list[int]  # strides in elements
    block_shape: list[int]
    layout: Any
    dtype: Any
    padding: str = "zero"
    origin: int = 0  # element that coordinates count from

    def box(self, coordinates, block_shape):
        """The part of a block that lies in the tensor: (view of the global elements, its place in the block).

        None where nothing does. Addresses wrap at 2^64 bytes, as the hardware's do, which ragged descriptors use
        (triton.tools.ragged_tma). A coordinate that is negative or past the size is outside, in any dimension
        (PTX ISA, "Tensor access modes: tiled mode", out-of-boundary access).
        """
        first, shape, place = self.origin, [], []
        for coordinate, width, size, step in zip(coordinates, block_shape, self.sizes, self.steps, strict=True):
            begin, end = max(coordinate, 0), min(coordinate + width, size)
            if begin >= end:
                return None
            first += begin * step
            shape.append(end - begin)
            place.append(slice(begin - coordinate, end - coordinate))
        itemsize = self.buffer.flat.dtype.itemsize
        wrapped = (first * itemsize) % 2**64
        first = (wrapped - 2**64 if wrapped >= 2**63 else wrapped) // itemsize
        steps = [step if size > 1 else 0 for step, size in zip(self.steps, shape, strict=True)]
        last = first + sum(step * (size - 1) for step, size in zip(steps, shape, strict=True))
        return first, last, shape, steps, tuple(place)

    def view(self, first, shape, steps) -> torch.Tensor:
        return self.buffer.flat.as_strided(shape, steps, self.buffer.flat.storage_offset() + first)


def nbytes(shape, dtype) -> int:
    return math.prod(shape) * STORAGE[dtype.name].itemsize
