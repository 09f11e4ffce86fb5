"""The roles that load: K and V of a tile; Q and dO, and lse and delta, of each block of query rows."""

from jaggedtensor.kernels.hopper.attention_bwd.channels import KEYS, ROWS, read_tile
from jaggedtensor.kernels.shared.dsl import gl, gluon, mbarrier
from jaggedtensor.kernels.shared.pipeline import Slot
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import my_range, read_span

AHEAD: gl.constexpr = gl.constexpr(3)  # of dQ of a block: what is loaded to the rows that its step has freed


@gluon.jit
def keys_role(schedule, descriptors, channels, C: gl.constexpr):
    k_desc, v_desc = descriptors
    begin, end = my_range(schedule)
    k_at, v_at = channels.k.start(), channels.v.start()
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        _, v_after = channels.v.acquire_empty(v_at)  # before K is
        for half in gl.static_range(2):
            place = ragged_place(span.k_start, span.k_count, tile.block * KEYS + half * ROWS, tile.head)
            channels.v.slot(v_at, half).load(v_desc, place)
        _, k_after = channels.k.acquire_empty(k_at)
        for half in gl.static_range(2):
            place = ragged_place(span.k_start, span.k_count, tile.block * KEYS + half * ROWS, tile.head)
            channels.k.slot(k_at, half).load(k_desc, place)
        k_at, v_at = k_after, v_after


@gluon.jit
def queries_role(schedule, descriptors, channels, C: gl.constexpr):
    """Q and dO. The end of a step frees rows and tells of dQ: loads, which consumers wait for next, go before adds, so
    dQ is told of from here, too."""
    q_desc, grad_desc = descriptors
    begin, end = my_range(schedule)
    at, asked = channels.rows.start(), 0
    added = channels.dq.slot(channels.dq.start())
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        for n in range(tile.end - tile.begin):
            block = tile.walked(n, C)
            place = ragged_place(span.q_start, span.q_count, block * (ROWS // C.group), tile.head * C.group)
            slot, after = channels.rows.acquire_empty(at)
            slot.load(q_desc, place)
            Slot(channels.grad_out.index(at.index), slot.full, slot.empty).load(grad_desc, place)
            if not C.last and asked >= AHEAD:
                added.publish()
            at, asked = after, asked + 1
    if not C.last:
        for block in range(gl.maximum(asked - AHEAD, 0), asked):
            if block > 0:  # each once the one before has been told of
                mbarrier.wait(added.full, (block - 1) & 1)
            added.publish()


@gluon.jit
def columns_role(schedule, desc, channels, C: gl.constexpr):
    """lse and delta of a block's rows. Where a row is not there they are 0, as Q and dO are, and add nothing."""
    begin, end = my_range(schedule)
    at, turn = channels.rows.start(), 0
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        for n in range(tile.end - tile.begin):
            row = tile.walked(n, C) * (ROWS // C.group)
            place = ragged_place(span.q_start, span.q_count, row, tile.head * C.group)
            mbarrier.wait(channels.read, turn & 1 ^ 1)
            Slot(channels.columns, channels.rows.slot(at).full, channels.read).load(desc, place)
            at, turn = at.next(), turn + 1
