"""What a CTA has to do: its tiles of a schedule, one after the other, with where their rows are.

A tile is eight numbers of the schedule and four of the offsets, and the latter can only be asked for when the former
are there. Every role asks for both two tiles ahead, so that it waits for neither.
"""

from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon


@aggregate
class Schedule:
    """Of the whole batch."""

    tiles: gl.tensor  # int32 [capacity, 8]
    worker_offsets: gl.tensor  # int32 [workers + 1]
    q_offsets: gl.tensor | gl.constexpr  # [B + 1], or None if all sequences have `q_len` queries
    k_offsets: gl.tensor  # [B + 1]
    q_len: gl.tensor
    listed: gl.tensor | gl.constexpr  # the list of blocks that a block mask lets through, None without one

    @gluon.jit
    def block(self, place):
        """The number of the KV block at a place of a tile's range."""
        if self.listed is not None:
            place = gl.load(self.listed + place)
        return place


@aggregate
class Tile:
    """A row of the schedule."""

    sequence: gl.tensor
    head: gl.tensor  # of keys
    q_block: gl.tensor
    kv_begin: gl.tensor  # blocks of keys
    kv_end: gl.tensor


@aggregate
class Span:
    """Where the rows of a tile's sequence are, and how many."""

    k_start: gl.tensor
    k_count: gl.tensor
    q_start: gl.tensor
    q_count: gl.tensor


@gluon.jit
def read_tile(schedule, place):
    row = schedule.tiles + place * 8
    # A schedule without any tile has surplus rows only, of sequence -1.
    sequence = gl.maximum(gl.load(row), 0)
    return Tile(sequence, gl.load(row + 1), gl.load(row + 2), gl.load(row + 4), gl.load(row + 5))


@gluon.jit
def read_span(schedule, sequence):
    k_start = gl.load(schedule.k_offsets + sequence).to(gl.int32)
    k_count = gl.load(schedule.k_offsets + sequence + 1).to(gl.int32) - k_start
    if schedule.q_offsets is None:
        q_start, q_count = sequence * schedule.q_len, schedule.q_len
    else:
        q_start = gl.load(schedule.q_offsets + sequence).to(gl.int32)
        q_count = gl.load(schedule.q_offsets + sequence + 1).to(gl.int32) - q_start
    return Span(k_start, k_count, q_start, q_count)


@aggregate
class Walk:
    """The tile at hand, and the next one's row."""

    schedule: Schedule
    tile: Tile
    span: Span
    ahead: Tile
    last: gl.tensor  # the CTA's last place in the schedule
    mirror: gl.tensor  # first + last place of a CTA that walks from the last to the first, else -1

    @gluon.jit
    def next(self, t):
        """The walk at the tile after tile `t`."""
        span = read_span(self.schedule, self.ahead.sequence)
        ahead = read_tile(self.schedule, place_of(t + 2, self.last, self.mirror))
        return Walk(self.schedule, self.ahead, span, ahead, self.last, self.mirror)


@gluon.jit
def place_of(t, last, mirror):
    """Where tile `t` of a walk is in the schedule; the last one past the end, and somewhere within it for a CTA without
    tiles."""
    t = gl.minimum(t, last)
    return gl.where(mirror < 0, t, gl.maximum(gl.minimum(mirror - t, last), 0))


@gluon.jit
def my_range(schedule):
    """First place in the schedule, and the one past the last, of this CTA."""
    worker = gl.program_id(0)
    return gl.load(schedule.worker_offsets + worker), gl.load(schedule.worker_offsets + worker + 1)


@gluon.jit
def start_walk(schedule, begin, end, backwards=False):
    """At the first tile of begin..end-1, or at the last if `backwards`; t counts from `begin` either way."""
    last = gl.maximum(end - 1, 0)
    mirror = gl.where(backwards, begin + end - 1, -1)
    tile = read_tile(schedule, place_of(begin, last, mirror))
    ahead = read_tile(schedule, place_of(begin + 1, last, mirror))
    return Walk(schedule, tile, read_span(schedule, tile.sequence), ahead, last, mirror)


@gluon.jit
def query_of(tile, C: gl.constexpr):
    """A number for the Q that a tile needs, if several tiles may share it."""
    return tile.head * C.q_blocks + tile.q_block
