"""Backward on Hopper where every sequence has queries of its own: a block of keys stays, queries pass.

    dV = P^T dO        dS = P (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

A CTA walks tiles of 128 keys of one head, each with the blocks of 64 packed query rows that see it. Scores are computed
with keys as rows, so that P^T and dS^T are left operands in registers, and dK and dV stay there for the tile's life.
Roles, a warp each but for the consumers:

    consumer 0   keys 0 .. 63, and half of dQ's columns        keys         K and V of each tile
    consumer 1   keys 64 .. 127, and the other half            queries      Q and dO, a ring each
                                                               columns      lse and delta of each block of rows
                                                               reducer      adds dQ to global memory, in fp32

    tensor cores   S^T(i)   dP^T(i)   dV(i)      dQ(i-1)   dK(i)          S^T(i+1)
    threads                 P^T(i)    dS^T(i)              dQ(i-1) out
    barriers       rows full  read    rows(i-1) empty      dq, rows

dQ needs dS of both consumers, which they put into shared memory, and so comes one step late. A consumer that has done
with a block of rows has written its dS, and has read that of the block before: one barrier tells all, behind the only
fence of a step. V is loaded anew when the last dP is there and K when the last dQ is, as dK leaves through a buffer of
its own and dV through dS. dQ is added in no order, to a workspace laid out as threads hold it (see `total`), or in
turns (see `Turns`). TMA reads zeros past the end of a sequence and writes nothing there; a query row that is not there
has P = 1, but dO = 0, Q = 0 and so dS = 0.

lse and delta lie along columns of S^T and dP^T, which begin with them: one more step of these products, whose left
operand is a constant in registers, adds -lse / scale to S and -delta to dP (see `columns`). No thread loads them.

Tiles may come in waves, a launch for each (`Wave` of the schedules). In the first, dQ of a block is stored, in place of
zeros; in the last the reducer brings what is there, and consumers add their own, scale and round the sum and put it in
rows where dK leaves later, from where the reducer stores it.
"""

from jaggedtensor.kernels.hopper.arithmetic import as_operand, at_most, by_turn, rounded
from jaggedtensor.kernels.hopper.attention_bwd.channels import KEYS, ROWS, STAGES, Channels, read_tile
from jaggedtensor.kernels.hopper.attention_bwd.loads import columns_role, keys_role, queries_role
from jaggedtensor.kernels.hopper.attention_bwd.reducer import Turns, finish_role, reduce_role
from jaggedtensor.kernels.shared import masks
from jaggedtensor.kernels.shared.dsl import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaggedtensor.kernels.shared.pipeline import make_channel, new_barriers
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule, my_range, read_span

visible = gluon.jit(masks.visible.fn)


@gluon.jit
def product(a, b):
    """Issue a b, both in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, b.shape[1], 16])
    nothing = gl.zeros([a.shape[0], b.shape[1]], gl.float32, layout)
    return warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)


@gluon.jit
def sums_of(columns, first: gl.constexpr):
    """Issue the sums of three columns of [64, 16], from `first` on: that of row r in column r of [64, 64]."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, parent=scores, k_width=2)
    column = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :] + gl.zeros([ROWS, 16], gl.int32, layout)
    ones = gl.where((column >= first) & (column < first + 3), 1.0, 0.0).to(gl.bfloat16)
    return product(ones, columns.permute((1, 0)))


@gluon.jit
def as_held(x):
    """Sums [64, columns] in the order in which threads hold them: what a thread has of 16 rows and 8 columns is
    together, and so is a warp's, 512 bytes."""
    return x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))


@gluon.jit
def from_held(x, like):
    """Sums as threads hold them, `[64 * columns]` in any shape, in rows again: as `like`, and no data moves."""
    x = x.reshape([4, like.shape[1] // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5)).reshape(like.shape)
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def halves(x):
    """The left half of the columns of sums, and the right."""
    columns: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    left, right = x.reshape([ROWS, 2, columns]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@aggregate
class Edge:
    """What decides which keys the rows of a tile see."""

    j: gl.tensor  # [64]: keys within the sequence
    shift: gl.tensor  # Lk - Lq
    left: gl.tensor
    right: gl.tensor

    @gluon.jit
    def masked(self, p, block, first, C: gl.constexpr):
        """P^T with 0 where a query does not see a key."""
        if self.cuts(block, first, C):
            column = gl.arange(0, ROWS, gl.SliceLayout(0, p.type.layout))
            i = (block * ROWS + column) // C.group
            seen = visible(i[None, :], self.j[:, None], self.shift, (self.left, self.right), C)
            p = gl.where(seen, p, 0.0)
        return p

    @gluon.jit
    def cuts(self, block, first, C: gl.constexpr):
        """Whether some row of a block of queries does not see some key of a tile, whose first key is `first`."""
        low, high = block * ROWS // C.group, ((block + 1) * ROWS - 1) // C.group  # queries
        cut = first < 0
        if C.left:
            cut = cut | (first < high + self.shift - self.left)
        if C.right:
            cut = cut | (first + KEYS - 1 > low + self.shift + self.right)
        return cut


@aggregate
class Work:
    """What a consumer carries from block to block."""

    dk: gl.tensor  # [64, D]
    dv: gl.tensor  # [64, Dv]
    turn: gl.tensor  # blocks so far; dQ of the last one is still to come


@aggregate
class Consumer:
    channels: Channels
    edge: Edge
    first: gl.tensor  # key of the tile
    scale_log2: gl.tensor
    scale: gl.tensor
    part: gl.constexpr
    C: gl.constexpr

    @gluon.jit
    def grad_query(self, turn, opaque):
        """Issue my columns of dQ of a block, of the keys of both consumers, when both have left its step."""
        at = by_turn(self.channels.rows, turn)
        mbarrier.wait(self.channels.rows.empty.index(at.index), at.phase)
        ds = self.channels.ds
        first: gl.constexpr = self.part * self.C.half
        k_columns = self.channels.k.buffers.index(opaque).slice(first, self.C.half, dim=1)
        dq = product(ds.index(at.index * 2).permute((1, 0)), k_columns)
        k_columns = self.channels.k.buffers.index(opaque + 1).slice(first, self.C.half, dim=1)
        return warpgroup_mma(ds.index(at.index * 2 + 1).permute((1, 0)), k_columns, dq, is_async=True)

    @gluon.jit
    def put_grad_query(self, dq, turn):
        """My columns for the role that adds them: the slot, to be told of behind a fence. In the last wave, with what
        the slot has brought, for the role that stores them."""
        at = by_turn(self.channels.dq, turn)
        if self.C.last:
            slot, _ = self.channels.dq.acquire_full(at)
            held: gl.constexpr = as_held(dq).reshape([ROWS, self.C.half]).type.layout
            others = from_held(self.channels.dq.slot(at, self.part).buffer.load(held), dq)
            dq = (dq + gl.where(self.first > 0, others, 0.0)) * self.scale  # no others, and anything, if this is alone
            self.channels.dk.index(self.part * 2 + at.phase).store(dq.to(self.channels.dk.dtype))
        else:
            slot, _ = self.channels.dq.acquire_empty(at)
            if self.C.packed:
                dq = as_held(dq).reshape([ROWS, self.C.half])
            self.channels.dq.slot(at, self.part).buffer.store(dq)
        return slot

    @gluon.jit
    def tell(self, slot):
        """That of dQ is where the other role takes it from."""
        if self.C.last:
            slot.release()
        else:
            slot.publish()

    @gluon.jit
    def put_grad_key(self, dk):
        """dK of my keys, half of the columns to a buffer."""
        left, right = halves(dk)
        self.channels.dk.index(self.part * 2).store(left)
        self.channels.dk.index(self.part * 2 + 1).store(right)

    @gluon.jit
    def put_grad_value(self, dv):
        """dV of my keys to where my dS was, when both have done with that: 64 columns to a stage."""
        mine = self.channels.ds
        if dv.shape[1] > ROWS:
            left, right = halves(dv)
            mine.index(self.part).store(left)
            mine.index(self.part + 2).store(right)
        else:
            mine.index(self.part).store(dv)

    @gluon.jit
    def step(self, work, block, LATE: gl.constexpr):
        """One more block of query rows, and dQ of the one before if LATE."""
        channels, turn = self.channels, work.turn
        C: gl.constexpr = self.C
        dtype: gl.constexpr = channels.rows.buffers.dtype
        opaque = (turn >> 30) * 2  # 0, which the compiler cannot know: it would keep all matrix descriptors
        if opaque != 0:  # never; but a barrier tells the assembler that `turn` is the same for all threads
            gl.barrier()
        at = by_turn(channels.rows, turn)
        rows, _ = channels.rows.acquire_full(at)
        grad_out = channels.grad_out.index(at.index)
        s = sums_of(channels.columns, 0)
        dp = sums_of(channels.columns, 8)
        s = warpgroup_mma(channels.k.buffers.index(opaque + self.part), rows.buffer.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(channels.v.buffers.index(opaque + self.part), grad_out.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(channels.read, count=1)  # only dP's large product is still on its way
        p = gl.exp2(at_most(s * self.scale_log2, 0.0))
        if C.left or C.right:
            p = self.edge.masked(p, block, self.first, C)
        dv = warpgroup_mma(as_operand(p.to(dtype), work.dv), grad_out, work.dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = rounded(p * dp, dtype)
        if LATE:
            # From here on both have left the step before, and so dQ of the step before that, whose dS is replaced.
            dq = self.grad_query(turn - 1, opaque)
        else:  # dV of the tile before has left through dS
            tma.store_wait(0)
            gl.barrier()
        channels.ds.index(at.index * 2 + self.part).store(ds)
        dk = warpgroup_mma(as_operand(ds, work.dk), rows.buffer, work.dk, is_async=True)
        if LATE:
            dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
            told = self.put_grad_query(dq, turn - 1)
        fence_async_shared()
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        rows.release()
        if LATE:
            self.tell(told)
        return Work(dk, dv, turn + 1)


@gluon.jit
def store_part(parts, slot, x, PART: gl.constexpr, column: gl.constexpr, C: gl.constexpr):
    """My 64 keys of dK or dV to a slot, as threads hold them (see `parts`), behind what so many columns take there."""
    columns: gl.constexpr = x.shape[1]
    x = as_held(x).reshape([ROWS * columns])
    first = slot * (KEYS * (C.block_d + C.block_dv)) + KEYS * column + PART * ROWS * columns
    gl.store(parts + first + gl.arange(0, ROWS * columns, x.type.layout), x)


@gluon.jit
def consume_role(schedule, out_descs, parts, channels, scales, window, PART: gl.constexpr, C: gl.constexpr):
    dtype: gl.constexpr = channels.rows.buffers.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_d, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_dv, 16])
    dk_desc, dv_desc = out_descs
    begin, end = my_range(schedule)
    k_at, v_at = channels.k.start(), channels.v.start()
    nothing = gl.zeros([ROWS, C.block_d], gl.float32, DK)
    no_values = gl.zeros([ROWS, C.block_dv], gl.float32, DV)
    work = Work(nothing, no_values, gl.to_tensor(0))
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        span = read_span(schedule, tile.sequence)
        first = tile.block * KEYS
        j = first + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        edge = Edge(j, span.k_count - span.q_count, window[0], window[1])
        me = Consumer(channels, edge, first, scales[0], scales[1], PART, C)
        work = Work(nothing, no_values, work.turn)
        k_slot, k_after = channels.k.acquire_full(k_at)
        v_slot, v_after = channels.v.acquire_full(v_at)
        work = me.step(work, tile.walked(0, C), False)
        for n in range(1, tile.end - tile.begin):
            work = me.step(work, tile.walked(n, C), True)
        v_slot.release()
        dq = warpgroup_mma_wait(0, deps=(me.grad_query(work.turn - 1, (work.turn >> 30) * 2),))
        k_slot.release()
        told = me.put_grad_query(dq, work.turn - 1)
        fence_async_shared()
        me.tell(told)

        slot = gl.load(schedule.tiles + t * 8 + 7) if C.cut else -1
        if C.cut and slot >= 0:
            store_part(parts, slot, work.dk, PART, 0, C)
            store_part(parts, slot, work.dv, PART, C.block_d, C)
        else:
            if not C.last:
                me.put_grad_key((work.dk * scales[1]).to(dtype))
            mbarrier.wait(k_slot.empty, k_at.phase)  # both have read dS
            me.put_grad_value(work.dv.to(dtype))
            if C.last:
                mbarrier.wait(channels.free, k_at.phase)
                me.put_grad_key((work.dk * scales[1]).to(dtype))
            fence_async_shared()
            row = first + PART * ROWS
            for half in gl.static_range(C.block_dv // ROWS):
                place = ragged_place(span.k_start, span.k_count, row, tile.head, half * ROWS)
                tma.async_store(dv_desc, place, channels.ds.index(PART + half * 2))
            for half in gl.static_range(2):
                place = ragged_place(span.k_start, span.k_count, row, tile.head, half * C.half)
                tma.async_store(dk_desc, place, channels.dk.index(PART * 2 + half))
        k_at, v_at = k_after, v_after
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "turn_head", "stores", "left", "right"])
def backward_kernel(
    q,  # ragged descriptors of [rows, Hq, D], see shared.ragged
    k,  # [tokens, Hkv, D]
    v,
    grad_out,  # [rows, Hq, Dv]
    columns,  # bf16 [rows, Hq, 16], see `columns`
    dk,  # in blocks of half the columns
    dv,  # in blocks of 64 columns
    out,  # the last wave: dQ [rows, Hq, D] in blocks of half the columns; else anything
    dq,  # fp32 [rows, Hq, D], zeros to be added to; packed, an ordinary descriptor of [blocks * 128, D / 2]
    turns,  # int32, zeros to count in: see Turns; without turns, anything
    turn_head,  # of the turns of a head of keys; packed, blocks of dQ of a head of keys
    stores,  # packed: whether dQ is stored, and no zeros are needed
    parts,  # scratch for dK and dV of tiles that are cut, fp32 [slots, 128 * (D + Dv)]; None if none is
    tiles,  # of the schedule, by keys
    worker_offsets,
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # scale * log2(e)
    scale,
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_d], dtype)
    wide_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_dv], dtype)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    natural: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.half], gl.float32)
    single: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2) if C.packed else natural
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.half], dtype)
    few: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 16], gl.bfloat16)
    channels = Channels(
        make_channel(dtype, [ROWS, C.block_d], wide, 1, 2, 1, 2),
        make_channel(dtype, [ROWS, C.block_dv], wide_v, 1, 2, 1, 2),
        make_channel(dtype, [ROWS, C.block_d], wide, STAGES, 2, 3),  # filled by three loads
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, C.block_dv], wide_v),
        gl.allocate_shared_memory(gl.bfloat16, [ROWS, 16], few),
        new_barriers(1, 2).index(0),
        gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, ROWS], square),
        make_channel(gl.float32, [ROWS, C.half], single, 1, 2 if C.last else 1, 1, 2, 0 if C.last else 1),
        gl.allocate_shared_memory(dtype, [4, ROWS, C.half], narrow),
        new_barriers(1, 1).index(0) if C.last else None,
    )
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, None)
    scales, window = (scale_log2, scale), (left, right)
    turns = Turns(turns, turn_head)
    gl.warp_specialize(
        [
            (consume_role, (schedule, (dk, dv), parts, channels, scales, window, 0, C)),
            (consume_role, (schedule, (dk, dv), parts, channels, scales, window, 1, C)),
            (queries_role, (schedule, (q, grad_out), channels, C)),
            (keys_role, (schedule, (k, v), channels, C)),
            (columns_role, (schedule, columns, channels, C)),
            (finish_role, (schedule, dq, out, turns, channels, C))
            if C.last
            else (reduce_role, (schedule, dq, turns, stores, left, channels, C)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )
