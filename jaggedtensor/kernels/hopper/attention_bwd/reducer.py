"""The role that brings dQ of a block to global memory: adds it to what others have added, in no order or in turns; in
the last wave, brings their sum and stores the whole."""

from jaggedtensor.kernels.hopper.attention_bwd.channels import KEYS, ROWS, read_tile
from jaggedtensor.kernels.shared.dsl import aggregate, gl, gluon, mbarrier, tma
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import my_range, read_span


@aggregate
class Turns:
    """How many tiles have added their part to dQ of a block of rows, in the order of the keys: int32 zeros, one for
    each block of each sequence and head of keys. For `ordered` only."""

    taken: gl.tensor
    head: gl.tensor  # stride

    @gluon.jit
    def of(self, tile, span, C: gl.constexpr):
        """Where those of a tile's sequence are."""
        return self.taken + tile.head * self.head + span.q_start * C.group // ROWS + tile.sequence

    @gluon.jit
    def packed(self, tile, span, C: gl.constexpr):
        """The first block of a tile's sequence in a packed dQ, of which a head has `head` blocks."""
        return tile.head * self.head + (span.q_start * C.group + (ROWS - 1) * (tile.sequence + 1)) // ROWS

    @gluon.jit
    def wait(self, mine, block, turn):
        """Until it is a tile's turn to add to a block of rows."""
        while gl.atomic_add(mine + block, 0, sem="acquire", scope="gpu") != turn:
            pass

    @gluon.jit
    def tell(self, mine, block, turn):
        """What has been added is there."""
        gl.atomic_xchg(mine + block, turn + 1, sem="release", scope="gpu")


@gluon.jit
def turn_of(tile, span, block, left, C: gl.constexpr):
    """How many tiles of fewer keys a block of rows sees."""
    turn = tile.block
    if C.left:
        first = block * ROWS // C.group + span.k_count - span.q_count - left
        turn -= gl.maximum(first, 0) // KEYS
    return turn


@gluon.jit
def reduce_role(schedule, dq_desc, turns, stores, left, channels, C: gl.constexpr):
    begin, end = my_range(schedule)
    at = channels.dq.start()
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        mine = turns.of(tile, span, C)
        for n in range(tile.end - tile.begin):
            block = tile.walked(n, C)
            if C.ordered:
                turn = turn_of(tile, span, block, left, C)
                turns.wait(mine, block, turn)
            slot, after = channels.dq.acquire_full(at)
            if C.packed:
                row = 2 * (turns.packed(tile, span, C) + block) * ROWS
                if stores:
                    for half in gl.static_range(2):
                        tma.async_store(dq_desc, [row + half * ROWS, 0], channels.dq.slot(at, half).buffer)
                else:
                    for half in gl.static_range(2):
                        tma.async_atomic_add(dq_desc, [row + half * ROWS, 0], channels.dq.slot(at, half).buffer)
            else:
                row = block * (ROWS // C.group)
                for half in gl.static_range(2):
                    r0, r1, r2, head, _ = ragged_place(span.q_start, span.q_count, row, tile.head * C.group)
                    tma.async_atomic_add(dq_desc, [r0, r1, r2, head, half * C.half], channels.dq.slot(at, half).buffer)
            tma.store_wait(0)
            slot.release()
            at = after
            if C.ordered:
                tma.store_wait(0, read_only=False)
                turns.tell(mine, block, turn)


@gluon.jit
def finish_role(schedule, dq_desc, out_desc, turns, channels, C: gl.constexpr):
    """In the last wave: brings what others have added to dQ of a block, and stores that of the block before, which
    consumers have put where dK leaves later."""
    begin, end = my_range(schedule)
    at = channels.dq.start()
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        first = turns.packed(tile, span, C)
        for n in range(tile.end - tile.begin):
            row = 2 * (first + tile.walked(n, C)) * ROWS
            _, after = channels.dq.acquire_empty(at)  # and so dQ of the block before is there
            tma.store_wait(0)  # as this block's comes to where that of two before was
            for half in gl.static_range(2):
                channels.dq.slot(at, half).load(dq_desc, [row + half * ROWS, 0])
            if n > 0:
                store_grad_query(out_desc, channels, tile, span, n - 1, at.phase ^ 1, C)
            at = after
        channels.dq.acquire_empty(at)
        store_grad_query(out_desc, channels, tile, span, tile.end - tile.begin - 1, at.phase ^ 1, C)
        tma.store_wait(0)
        mbarrier.arrive(channels.free, count=1)


@gluon.jit
def store_grad_query(out_desc, channels, tile, span, n, stage, C: gl.constexpr):
    """dQ of the n-th block of a tile, which is whole."""
    row = tile.walked(n, C) * (ROWS // C.group)
    for half in gl.static_range(2):
        place = ragged_place(span.q_start, span.q_count, row, tile.head * C.group, half * C.half)
        tma.async_store(out_desc, place, channels.dk.index(half * 2 + stage))
