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

    @gluon.jit
    def next(self, place):
        """The walk at the tile after `place`."""
        span = read_span(self.schedule, self.ahead.sequence)
        ahead = read_tile(self.schedule, gl.minimum(place + 2, self.last))
        return Walk(self.schedule, self.ahead, span, ahead, self.last)


@gluon.jit
def my_range(schedule):
    """First place in the schedule, and the one past the last, of this CTA."""
    worker = gl.program_id(0)
    return gl.load(schedule.worker_offsets + worker), gl.load(schedule.worker_offsets + worker + 1)


@gluon.jit
def start_walk(schedule, begin, end):
    """At the tile `begin`."""
    last = gl.maximum(end - 1, 0)
    tile = read_tile(schedule, gl.minimum(begin, last))
    return Walk(
        schedule, tile, read_span(schedule, tile.sequence), read_tile(schedule, gl.minimum(begin + 1, last)), last
    )


@gluon.jit
def query_of(tile, C: gl.constexpr):
    """A number for the Q that a tile needs, if several tiles may share it."""
    return tile.head * C.q_blocks + tile.q_block
