"""A CTA's tiles, one after the other: those that the schedule gives it, or those that it asks for when it is free.

Cluster launch control (PTX ISA, "clusterlaunchcontrol.try_cancel") hands a CTA the place of a program that has not
started yet. A role of its own asks, a few tiles ahead, and all others read each answer.
"""

from jaggedtensor.kernels.shared.anchor import any_flagged, is_flagged
from jaggedtensor.kernels.shared.dsl import aggregate, clc, fence_async_shared, gl, gluon, mbarrier
from jaggedtensor.kernels.shared.pipeline import Counter
from jaggedtensor.kernels.shared.walk import Schedule, Span, Tile, my_range, read_span, read_tile


@aggregate
class Answers:
    """A ring of answers of the launch control."""

    buffers: gl.shared_memory_descriptor  # [stages, 2] int64
    offered: gl.shared_memory_descriptor  # [stages, 1]
    taken: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def take(self, at, end):
        """The next place in the schedule, whether there is one, and the counter after it."""
        mbarrier.wait(self.offered.index(at.index), at.phase)
        answer = clc.load_result(self.buffers.index(at.index))
        mbarrier.arrive(self.taken.index(at.index), count=1)
        more = answer.is_canceled()
        place = gl.where(more, answer.program_id(0), 0)
        more = more & (place < end)  # past the end are surplus rows
        return gl.where(more, place, 0), more, at.next()


@gluon.jit
def make_answers(stages: gl.constexpr, readers: gl.constexpr):
    buffers = gl.allocate_shared_memory(gl.int64, [stages, 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    offered = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(offered.index(i), count=1)
        mbarrier.init(taken.index(i), count=readers)
    return Answers(buffers, offered, taken, stages)


@aggregate
class Source:
    """Where tiles come from, and which keys their queries see."""

    schedule: Schedule
    answers: Answers | gl.constexpr  # None where the schedule says whose a tile is
    left: gl.tensor  # the window
    right: gl.tensor
    flags: gl.tensor | gl.constexpr  # int32 [tiles, 2]: only flagged tiles are walked; None: all
    some: gl.tensor | gl.constexpr  # whether any of this CTA's is


@gluon.jit
def any_in_range(flags, worker_offsets):
    """Whether any tile that the schedule gives this CTA is flagged. By all warps, before the roles begin."""
    worker = gl.program_id(0)
    return any_flagged(flags, gl.load(worker_offsets + worker), gl.load(worker_offsets + worker + 1), 2)


@gluon.jit
def ask_role(source):
    """Asks until there is nothing more."""
    answers = source.answers
    end = gl.load(source.schedule.worker_offsets)
    at = Counter(gl.to_tensor(0), gl.to_tensor(0), answers.stages)
    more = gl.program_id(0) < end
    while more:
        mbarrier.wait(answers.taken.index(at.index), at.phase ^ 1)
        fence_async_shared()  # after ordinary reads of what was there
        mbarrier.expect(answers.offered.index(at.index), 16)
        clc.try_cancel(answers.buffers.index(at.index), answers.offered.index(at.index))
        mbarrier.wait(answers.offered.index(at.index), at.phase)
        answer = clc.load_result(answers.buffers.index(at.index))
        more = answer.is_canceled()
        more = more & (gl.where(more, answer.program_id(0), end) < end)
        at = at.next()


@aggregate
class Walk:
    """The tile at hand, if there is `more`, and the next one's row, so that no role waits for either."""

    source: Source
    tile: Tile
    span: Span
    ahead: Tile
    more: gl.tensor
    more_ahead: gl.tensor
    here: gl.tensor  # the place of `tile` in the schedule
    place: gl.tensor  # of `ahead`
    end: gl.tensor
    at: Counter

    @gluon.jit
    def next(self):
        """The walk at the next tile that there is anything to do for."""
        return wanted(self.step())

    @gluon.jit
    def step(self):
        """The walk at the next tile."""
        span = read_span(self.source.schedule, self.ahead.sequence)
        place, more, at = self.place, self.more_ahead, self.at
        if self.source.answers is None:
            place = gl.minimum(self.place + 1, gl.maximum(self.end - 1, 0))
            more = self.place + 1 < self.end
        elif self.more_ahead:
            place, more, at = self.source.answers.take(self.at, self.end)
        ahead = read_tile(self.source.schedule, place)
        return Walk(self.source, self.ahead, span, ahead, self.more_ahead, more, self.place, place, self.end, at)


@gluon.jit
def wanted(walk):
    """The walk, past tiles without a flag."""
    flags = walk.source.flags
    if flags is not None:
        while walk.more & (not is_flagged(flags, walk.here, 2)):
            walk = walk.step()
    return walk


@gluon.jit
def slot_of(walk):
    """Where the part of a cut tile goes, -1 if the tile is whole."""
    return gl.load(walk.source.schedule.tiles + walk.here * 8 + 7)


@gluon.jit
def start_walk(source):
    """At this CTA's first tile."""
    schedule = source.schedule
    if source.answers is None:
        first, end = my_range(schedule)
        if source.flags is not None:
            end = gl.where(source.some, end, first)
        last = gl.maximum(end - 1, 0)
        place, more_ahead = gl.minimum(first + 1, last), first + 1 < end
        at = Counter(gl.to_tensor(0), gl.to_tensor(0), 1)
    else:
        first, end = gl.program_id(0), gl.load(schedule.worker_offsets)
        last = gl.maximum(end - 1, 0)
        at = Counter(gl.to_tensor(0), gl.to_tensor(0), source.answers.stages)
        place, more_ahead = gl.to_tensor(0), gl.to_tensor(False)
        if first < end:
            place, more_ahead, at = source.answers.take(at, end)
    tile = read_tile(schedule, gl.minimum(first, last))
    ahead = read_tile(schedule, place)
    span = read_span(schedule, tile.sequence)
    return wanted(Walk(source, tile, span, ahead, first < end, more_ahead, gl.minimum(first, last), place, end, at))
