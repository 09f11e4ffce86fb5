"""The role that loads Q, K and V: in the order in which consumers take them, or K of a block and Q of a tile ahead."""

from jaggedtensor.kernels.hopper.attention_fwd.channels import goes_back
from jaggedtensor.kernels.shared.dsl import gl, gluon
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import place_of, query_of, start_walk


@gluon.jit
def load_query(tile, span, at, descriptor, channels, C: gl.constexpr):
    """The rows of each consumer. The counter of the next Q."""
    PARTS: gl.constexpr = C.consumers
    q_start = 0 if C.broadcast else span.q_start
    _, after = channels.q.acquire_empty(at)
    for part in gl.static_range(PARTS):
        first = (tile.q_block * C.consumers + part) * (C.rows // C.group)
        place = ragged_place(q_start, span.q_count, first, tile.head * C.heads)
        channels.q.slot(at, part).load(descriptor, place)
    return after


@gluon.jit
def load_role(schedule, flags, descriptors, channels, C: gl.constexpr):
    q_desc, k_desc, v_desc = descriptors
    begin, end = flags.range(schedule, C)
    walk = start_walk(schedule, begin, end, goes_back(C))
    q_at, k_at, v_at = channels.q.start(), channels.k.start(), channels.v.start()
    held = -1
    for t in range(begin, end):
        tile, span = flags.due(walk.tile, place_of(t, walk.last, walk.mirror), C), walk.span
        walk = walk.next(t)
        if C.lends or not C.resident or query_of(tile, C) != held:
            q_at = load_query(tile, span, q_at, q_desc, channels, C)
            held = query_of(tile, C)
        for n in range(tile.kv_end - tile.kv_begin):
            row = schedule.block(tile.kv_end - 1 - n) * C.block_n
            slot, k_at = channels.k.acquire_empty(k_at)
            slot.load(k_desc, ragged_place(span.k_start, span.k_count, row, tile.head))
            slot, v_at = channels.v.acquire_empty(v_at)
            slot.load(v_desc, ragged_place(span.k_start, span.k_count, row, tile.head))


@gluon.jit
def leading_load_role(schedule, flags, descriptors, channels, C: gl.constexpr):
    """The same, ahead: K of a block before V of the one that is walked before it, as its slot is free half a step
    earlier, and Q a tile before its keys. Each tile has some, and neither slot of Q is needed until its end.

    A block of keys that ends with its sequence is known by three numbers: where that is, rows up to there, and a head.
    """
    q_desc, k_desc, v_desc = descriptors
    begin, end = flags.range(schedule, C)
    walk = start_walk(schedule, begin, end, goes_back(C))
    q_at, k_at, v_at = channels.q.start(), channels.k.start(), channels.v.start()
    held = gl.to_tensor(-1)
    # Numbers of their own: Triton takes a name for a constant of the loop whose first value is one of the walk's.
    stop, row, head = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    if begin < end:
        q_at = load_query(walk.tile, walk.span, q_at, q_desc, channels, C)
        held = query_of(walk.tile, C)
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        next_stop, next_row = span.k_start + span.k_count, (tile.kv_end - 1) * C.block_n - span.k_count
        walk = walk.next(t)
        k_slot, k_at = channels.k.acquire_empty(k_at)
        k_slot.load(k_desc, ragged_place(next_stop, 0, next_row, tile.head))
        if t > begin:  # the last block of the tile before
            v_slot, v_at = channels.v.acquire_empty(v_at)
            v_slot.load(v_desc, ragged_place(stop, 0, row, head))
        stop, row, head = next_stop, next_row, tile.head
        if t + 1 < end and (not C.resident or query_of(walk.tile, C) != held):
            q_at = load_query(walk.tile, walk.span, q_at, q_desc, channels, C)
            held = query_of(walk.tile, C)
        for _ in range(tile.kv_end - tile.kv_begin - 1):
            k_slot, k_at = channels.k.acquire_empty(k_at)
            k_slot.load(k_desc, ragged_place(stop, 0, row - C.block_n, head))
            v_slot, v_at = channels.v.acquire_empty(v_at)
            v_slot.load(v_desc, ragged_place(stop, 0, row, head))
            row -= C.block_n
    if begin < end:
        v_slot, v_at = channels.v.acquire_empty(v_at)
        v_slot.load(v_desc, ragged_place(stop, 0, row, head))
