"""Buffers of shared memory between roles, with full and empty mbarriers.

A role walks a channel with a counter of its own. The writer acquires empty slots, readers full ones; a reader releases
a slot when it has read it. A phase of a full barrier ends with the bytes that the writer said it expects, or with an
arrival of each writer; a phase of an empty barrier with a release of each reader.

    writer:  slot, at = channel.acquire_empty(at); slot.load(desc, [row, 0])
    reader:  slot, at = channel.acquire_full(at);  ... slot.buffer ...;  slot.release()
"""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon, mbarrier, tma


@aggregate
class Counter:
    """A place in a ring of `depth` slots, and the parity of the lap, which mbarriers count phases by."""

    index: gl.tensor
    phase: gl.tensor
    depth: gl.constexpr

    @gluon.jit
    def next(self):
        """The place after it."""
        index = self.index + 1
        last = index == self.depth
        return Counter(gl.where(last, 0, index), gl.where(last, self.phase ^ 1, self.phase), self.depth)


@aggregate
class Slot:
    """One buffer that a role has acquired."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def load(self, descriptor, place, policy: gl.constexpr = None):
        """Fill it by TMA with the block of `descriptor` at `place`; the slot is full when all bytes are there.
        `policy`: how L2 is to keep them, see `dsl.EVICT_LAST`."""
        mbarrier.expect(self.full, descriptor.nbytes_per_cta)
        if policy is None:
            tma.async_load(descriptor, place, self.full, self.buffer)
        else:
            tma.async_load(descriptor, place, self.full, self.buffer, cache_policy=policy)

    @gluon.jit
    def publish(self):
        """A writer that fills by ordinary stores (after its `fence_async_shared`) has filled its part."""
        mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def release(self):
        """A reader has done with it."""
        mbarrier.arrive(self.empty, count=1)


@aggregate
class Channel:
    """A ring of `depth` slots, each of one buffer or of several parts that share its barriers."""

    buffers: gl.shared_memory_descriptor  # [depth * parts, *shape]
    full: gl.shared_memory_descriptor  # [depth, 1]
    empty: gl.shared_memory_descriptor  # [depth, 1]
    depth: gl.constexpr
    parts: gl.constexpr

    @gluon.jit
    def start(self):
        """The counter that a role begins with."""
        return Counter(gl.to_tensor(0), gl.to_tensor(0), self.depth)

    @gluon.jit
    def slot(self, at, part=0):
        """The slot at a counter, or a part of it, without waiting."""
        buffer = self.buffers.index(at.index * self.parts + part)
        return Slot(buffer, self.full.index(at.index), self.empty.index(at.index))

    @gluon.jit
    def acquire_empty(self, at):
        """Wait until all readers have released the slot. The slot, and the counter after it."""
        mbarrier.wait(self.empty.index(at.index), at.phase ^ 1)
        return self.slot(at), at.next()

    @gluon.jit
    def acquire_full(self, at):
        """Wait until the slot is filled. The slot, and the counter after it."""
        mbarrier.wait(self.full.index(at.index), at.phase)
        return self.slot(at), at.next()


@gluon.jit
def async_store_by(descriptor, place, buffer, policy: gl.constexpr):
    """Store a block by TMA; `policy` as for loads."""
    if policy is None:
        tma.async_store(descriptor, place, buffer)
    else:
        tma.async_store(descriptor, place, buffer, cache_policy=policy)


@gluon.jit
def make_channel(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    depth: gl.constexpr,
    readers: gl.constexpr = 1,
    writers: gl.constexpr = 1,
    parts: gl.constexpr = 1,
    signals: gl.constexpr = 0,
):
    """A channel of `depth` slots of `parts` buffers of `shape`. For each phase as many roles as `readers` release the
    slot, all of `writers` fill every part, and `signals` roles that fill nothing arrive."""
    buffers = gl.allocate_shared_memory(dtype, [depth * parts] + shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(depth):
        mbarrier.init(full.index(i), count=writers * parts + signals)
        mbarrier.init(empty.index(i), count=readers)
    return Channel(buffers, full, empty, depth, parts)


@gluon.jit
def new_barriers(depth: gl.constexpr, count: gl.constexpr):
    """[depth, 1] mbarriers, each of whose phases ends with `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(depth):
        mbarrier.init(barriers.index(i), count=count)
    return barriers
