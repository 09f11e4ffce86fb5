"""Backward of a broadcast query on Hopper: the query stays, keys and values pass.

    dV = P^T dO        dS = P (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

A CTA walks an equal share of all KV tiles, head after head, over all sequences: dQ of a head stays in registers, and dK
and dV of a tile are finished on the way. Roles:

    scorers 0, 1   dQ of query rows 0 .. 63 and 64 .. 127      loaders   K and V, a ring each; Q of a head, and each dO
    maker          dV and dK of all rows                       stores    dV; dK

They meet in shared memory: each scorer writes its rows of P and dS, of which the maker makes dV and dK. For tile n:

    scorer    S(n) dP(n)     P(n)             dS(n)             dQ(n)        S(n+1) ..
    barriers  k, v full      p empty, full    ds empty, full    v, k empty

    maker     dV(n)          dV(n) out        dK(n)             dK(n) out    dV(n+1) ..
    barriers  p full         dv full          ds full           dk full

Each of the three has products for less than half of the time, so that those of one run beside what the threads of the
others do. Q of a head is an operand of S in registers, which spares half of what S reads from shared memory; such a
product holds its warps, so it is issued when none of them is on its way.

Where a query has one part, and 128 dimensions, a scorer is a step late with dQ, which then runs behind S, while threads
make P:

    products  S(n)           dQ(n-1)          dP(n)            S(n+1) ..
    threads   dS(n-1) out    P(n), P(n) out                    dS(n)

With 64 dimensions it makes P of a sequence's first tile while O and dO, of which delta is, are on their way.

dX (dV or dK) leaves through the buffer that P (or dS) of its tile was in, which only the maker reads. TMA reads zeros
past the end of a sequence and stores nothing there, so that no score needs a mask: such a key has P <= 1 and a finite
dS, which meets K = 0 in dQ.

A query of more rows has a CTA for each 128 of them, in a chain: see `store_role`, and `held_back`.
"""

from jaggedtensor.kernels.hopper.arithmetic import LOG2_E, as_operand, at_most, by_turn, rounded
from jaggedtensor.kernels.shared.dsl import (
    EVICT_FIRST,
    EVICT_LAST,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jaggedtensor.kernels.shared.pipeline import Channel, async_store_by, make_channel
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule, read_tile, start_walk

M: gl.constexpr = gl.constexpr(128)  # packed query rows of a CTA
ROWS: gl.constexpr = gl.constexpr(64)  # of a scorer


@aggregate
class Channels:
    q: Channel  # [128, D], of a head
    grad_out: Channel  # [128, Dv]
    k: Channel  # [N, D]
    v: Channel  # [N, Dv]
    p: Channel  # [128, N], filled by both scorers
    ds: Channel  # the same
    dv: Channel  # [N, Dv], in the memory of p: the maker stages what the store role stores, which then frees both
    dk: Channel  # [N, D], in that of ds


@aggregate
class Statistics:
    """What belongs to the query rows of each sequence."""

    lse: gl.tensor  # fp32 [B, Hq, Lq], contiguous
    grad_lse: gl.tensor | gl.constexpr  # the same, or None
    out: gl.tensor  # [B, Lq, Hq, Dv], contiguous
    sequence: gl.tensor
    head: gl.tensor  # of keys
    q_len: gl.tensor
    C: gl.constexpr

    @gluon.jit
    def of(self, tile):
        """Those of another tile."""
        return Statistics(self.lse, self.grad_lse, self.out, tile.sequence, tile.head, self.q_len, self.C)

    @gluon.jit
    def place(self, row):
        """Query, query head, whether there is such a row, and where its numbers are."""
        i, q_head = row // self.C.group, self.head * self.C.group + row % self.C.group
        at = (self.sequence.to(gl.int64) * self.C.q_heads + q_head) * self.q_len + i
        return i, q_head, i < self.q_len, at

    @gluon.jit
    def load_lse(self, row):
        """Of packed rows, in log2 units; +inf for a row that sees nothing or is not there, which makes its P 0."""
        _, _, inside, at = self.place(row)
        lse = gl.load(self.lse + at, mask=inside, other=float("-inf"))
        return gl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E

    @gluon.jit
    def load_out(self, row, layout: gl.constexpr):
        """[rows, Dv] of O; `row` is of the layout's first dimension."""
        i, q_head, inside, _ = self.place(row)
        column = gl.arange(0, self.C.block_dv, gl.SliceLayout(0, layout))
        first = (self.sequence.to(gl.int64) * self.q_len + i) * self.C.q_heads + q_head
        mask = inside[:, None] & (column < self.C.value_dim)[None, :]
        return gl.load(self.out + first[:, None] * self.C.value_dim + column[None, :], mask=mask, other=0.0)

    @gluon.jit
    def delta(self, row, lse, out, grad_out):
        """rowsum(O dO) - dlse; 0 where lse is +inf."""
        delta = gl.convert_layout(gl.sum(out.to(gl.float32) * grad_out.to(gl.float32), 1), lse.type.layout)
        if self.grad_lse is not None:
            _, _, inside, at = self.place(row)
            delta -= gl.load(self.grad_lse + at, mask=inside, other=0.0)
        return gl.where(lse == float("inf"), 0.0, delta)


@gluon.jit
def my_part(C: gl.constexpr):
    """Which 128 of the query rows this CTA has."""
    return gl.program_id(0) % C.parts


@gluon.jit
def my_range(schedule, C: gl.constexpr):
    """First place in the schedule, and the one past the last, of this CTA; all parts of a query have the same."""
    worker = gl.program_id(0) // C.parts
    return gl.load(schedule.worker_offsets + worker), gl.load(schedule.worker_offsets + worker + 1)


@gluon.jit
def held_back(next_one, turn, known, patience, C: gl.constexpr):
    """Wait while the next CTA of the chain is `C.lead` tiles behind, so that what it reads and adds to is still in L2.
    It may be on the GPU only when this one has left it: without any progress for long, nobody waits again."""
    while (turn - known >= C.lead) & (patience > 0):
        seen = gl.atomic_add(next_one, 0, sem="relaxed", scope="gpu")
        patience = gl.where(seen > known, C.patience, patience - 1)
        known = seen
    return known, patience


@gluon.jit
def load_keys(slot, descriptor, place, C: gl.constexpr):
    """K or V of a tile. They stay in L2 until the last part of the query has them."""
    if C.parts == 1:
        slot.load(descriptor, place)
    elif my_part(C) < C.parts - 1:
        slot.load(descriptor, place, EVICT_LAST)
    else:
        slot.load(descriptor, place, EVICT_FIRST)


@gluon.jit
def load_keys_role(schedule, descriptors, progress, channels, C: gl.constexpr):
    k_desc, v_desc = descriptors
    begin, end = my_range(schedule, C)
    walk = start_walk(schedule, begin, end)
    k_at, v_at = channels.k.start(), channels.v.start()
    turn, known = 0, 0  # tiles of this CTA; those that the next has written
    patience = gl.where(my_part(C) < C.parts - 1, C.patience, 0)  # the last CTA of a chain waits for nobody
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for block in range(tile.kv_begin, tile.kv_end):
            if C.parts > 1:
                known, patience = held_back(progress + gl.program_id(0) + 1, turn, known, patience, C)
                turn += 1
            place = ragged_place(span.k_start, span.k_count, block * C.block_n, tile.head)
            slot, k_at = channels.k.acquire_empty(k_at)
            load_keys(slot, k_desc, place, C)
            slot, v_at = channels.v.acquire_empty(v_at)
            load_keys(slot, v_desc, place, C)
        walk = walk.next(t)


@gluon.jit
def load_queries_role(schedule, descriptors, channels, C: gl.constexpr):
    q_desc, grad_desc = descriptors
    begin, end = my_range(schedule, C)
    walk = start_walk(schedule, begin, end)
    q_at, at = channels.q.start(), channels.grad_out.start()
    row, head = my_part(C) * (M // C.group), -1
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        if tile.head != head:
            head = tile.head
            slot, q_at = channels.q.acquire_empty(q_at)
            slot.load(q_desc, ragged_place(0, span.q_count, row, head * C.group))
        slot, at = channels.grad_out.acquire_empty(at)
        slot.load(grad_desc, ragged_place(span.q_start, span.q_count, row, tile.head * C.group))
        walk = walk.next(t)


@gluon.jit
def store_role(schedule, out_desc, out, progress, C: gl.constexpr):
    """dV or dK of each tile, from where the maker staged it. A query of several parts is a chain of CTAs: the first
    stores, each of the others adds to what the one before it has written. `progress`: tiles written, by CTA. It is told
    a tile late: what it takes to make a write seen passes while the next one is on its way."""
    begin, end = my_range(schedule, C)
    walk = start_walk(schedule, begin, end)
    at = out.start()
    part = my_part(C)
    mine = progress + gl.program_id(0)
    turn = 0
    before = 0  # tiles that the CTA before this one in the chain has written, as far as is known
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for block in range(tile.kv_begin, tile.kv_end):
            place = ragged_place(span.k_start, span.k_count, block * C.block_n, tile.head)
            if part > 0:
                while before <= turn:
                    before = gl.atomic_add(mine - 1, 0, sem="acquire", scope="gpu")
            slot, at = out.acquire_full(at)
            if C.parts == 1:
                fence_async_shared()
            if part == 0:
                async_store_by(out_desc, place, slot.buffer, EVICT_LAST if C.parts > 1 else None)
            else:
                tma.async_atomic_add(out_desc, place, slot.buffer)
            tma.store_wait(0)
            slot.release()
            if C.parts > 1:
                if turn > 0:
                    gl.atomic_xchg(mine, turn, sem="release", scope="gpu")
                tma.store_wait(0, read_only=False)
                turn += 1
        walk = walk.next(t)
    if C.parts > 1:
        gl.atomic_xchg(mine, turn, sem="release", scope="gpu")


@aggregate
class Scorer:
    """64 of the query rows."""

    channels: Channels
    scale_log2: gl.tensor
    first: gl.constexpr  # row
    C: gl.constexpr

    @gluon.jit
    def rows_of(self, slot):
        """My rows of Q, dO, P or dS."""
        return slot.buffer.slice(self.first, ROWS)

    @gluon.jit
    def scores(self, q, turn):
        """Issue S = Q K^T, with Q in registers."""
        slot, _ = self.channels.k.acquire_full(by_turn(self.channels.k, turn))
        return product(q, slot.buffer.permute((1, 0)))

    @gluon.jit
    def grad_scores(self, grad_out, turn):
        """Issue dP = dO V^T."""
        slot, _ = self.channels.v.acquire_full(by_turn(self.channels.v, turn))
        return product(grad_out, slot.buffer.permute((1, 0)))

    @gluon.jit
    def add_grad_query(self, ds, turn, acc):
        """dQ + dS K, with dS in registers."""
        slot = self.channels.k.slot(by_turn(self.channels.k, turn))
        acc = warpgroup_mma_wait(0, deps=(self.grad_query(ds, slot, acc),))
        slot.release()
        return acc

    @gluon.jit
    def grad_query(self, ds, k_slot, acc):
        """Issue dQ + dS K."""
        return warpgroup_mma(as_operand(ds, acc), k_slot.buffer, acc, is_async=True)

    @gluon.jit
    def put(self, channel, turn, x):
        """My rows of P or dS, for the maker."""
        slot, _ = channel.acquire_empty(by_turn(channel, turn))
        self.rows_of(slot).store(x)
        slot.publish()  # the maker has the fence

    @gluon.jit
    def put_probabilities(self, s, lse, turn):
        p = gl.exp2(at_most(s * self.scale_log2 - lse[:, None], 0.0))
        self.put(self.channels.p, turn, p.to(self.channels.p.buffers.dtype))
        return p

    @gluon.jit
    def grad_of_scores(self, p, dp, delta):
        return rounded(p * (dp - delta[:, None]), self.channels.ds.buffers.dtype)

    @gluon.jit
    def late(self, s, lse, ds, turn, goes_on, acc):
        """P of a tile, whose S is issued, and dQ of the one before it. The first of a sequence has none before it: dS
        is 0, and its own K as good as any."""
        if goes_on:
            self.put(self.channels.ds, turn - 1, ds)
        k_slot = self.channels.k.slot(by_turn(self.channels.k, gl.where(goes_on, turn - 1, turn)))
        acc = self.grad_query(ds, k_slot, acc)
        p = self.put_probabilities(warpgroup_mma_wait(1, deps=(s,)), lse, turn)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if goes_on:
            k_slot.release()
        return p, acc

    @gluon.jit
    def finish(self, p, dp, delta, grad_slot, last, turn, acc):
        """dS of a tile, whose dP is issued, and dQ where it is not late. `last`: of its sequence."""
        dp = warpgroup_mma_wait(0, deps=(dp,))
        self.channels.v.slot(by_turn(self.channels.v, turn)).release()
        if last:
            grad_slot.release()
        ds = self.grad_of_scores(p, dp, delta)
        if not self.C.late:
            self.put(self.channels.ds, turn, ds)
            acc = self.add_grad_query(ds, turn, acc)
        return ds, acc

    @gluon.jit
    def put_share(self, shares, slot, share):
        """My rows of dQ of a head."""
        row = (slot * self.C.parts + my_part(self.C)) * M + self.first
        row += gl.arange(0, ROWS, gl.SliceLayout(1, share.type.layout))
        column = gl.arange(0, self.C.block_d, gl.SliceLayout(0, share.type.layout))
        gl.store(shares + row.to(gl.int64)[:, None] * self.C.block_d + column[None, :], share)


@gluon.jit
def product(a, b):
    """Issue a b; b is in shared memory."""
    WIDTH: gl.constexpr = b.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return warpgroup_mma(a, b, gl.zeros([a.shape[0], WIDTH], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def score_role(schedule, statistics, shares, channels, scales, FIRST: gl.constexpr, C: gl.constexpr):
    N: gl.constexpr = C.block_n
    D: gl.constexpr = C.block_d
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, parent=S_LAYOUT, k_width=2)
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.block_dv, C.block_dv // 8], [4, 1], [1, 0])
    me = Scorer(channels, scales[0], FIRST, C)
    row = my_part(C) * M + FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    out_row = my_part(C) * M + FIRST + gl.arange(0, ROWS, gl.SliceLayout(1, OUT_LAYOUT))
    acc = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)

    begin, end = my_range(schedule, C)
    q_at, grad_at = channels.q.start(), channels.grad_out.start()
    q_slot = channels.q.slot(q_at)
    turn = 0  # tiles so far
    head, share = -1, 0
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        here = statistics.of(tile)
        lse = here.load_lse(row)
        out = here.load_out(out_row, OUT_LAYOUT)  # on its way while dO is
        if tile.head != head:
            if head >= 0:
                fence_async_shared()  # Q has been read, perhaps since the last fence
                q_slot.release()
                me.put_share(shares, share, acc * scales[1])
                acc = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
            head, share = tile.head, gl.load(schedule.tiles + t * 8 + 7)
            _, q_at = channels.q.acquire_full(q_at)
        if C.early:  # Q stays in shared memory, as registers have O
            p = me.put_probabilities(warpgroup_mma_wait(0, deps=(me.scores(me.rows_of(q_slot), turn),)), lse, turn)
        else:
            q = me.rows_of(q_slot).load(Q_LAYOUT)
        grad_slot, grad_at = channels.grad_out.acquire_full(grad_at)
        grad_out = me.rows_of(grad_slot)
        delta = here.delta(row, lse, out, grad_out.load(OUT_LAYOUT))
        fence_async_shared()  # dO has been read, and may be loaded anew once it is released
        if C.early:
            last = tile.kv_begin + 1 == tile.kv_end
            ds, acc = me.finish(p, me.grad_scores(grad_out, turn), delta, grad_slot, last, turn, acc)
            q = me.rows_of(q_slot).load(Q_LAYOUT)
            turn += 1
        else:
            ds = gl.zeros([ROWS, N], channels.ds.buffers.dtype, S_LAYOUT)  # of the tile before, in this sequence
        for block in range(tile.kv_begin + C.early, tile.kv_end):
            if turn < 0:  # never; but a barrier tells the assembler that `turn` is the same for all threads
                gl.barrier()
            s = me.scores(q, turn)
            if C.late:
                p, acc = me.late(s, lse, ds, turn, block > tile.kv_begin, acc)
                dp = me.grad_scores(grad_out, turn)
            else:
                dp = me.grad_scores(grad_out, turn)
                p = me.put_probabilities(warpgroup_mma_wait(1, deps=(s,)), lse, turn)
            ds, acc = me.finish(p, dp, delta, grad_slot, block + 1 == tile.kv_end, turn, acc)
            turn += 1
        if C.late:
            me.put(channels.ds, turn - 1, ds)
            acc = me.add_grad_query(ds, turn - 1, acc)

    if begin < end:
        # Nobody waits for this; but the memory of a barrier that nobody uses may be given to a buffer.
        q_slot.release()
        me.put_share(shares, share, acc * scales[1])


@gluon.jit
def make(parts, factor, out, scale, turn, C: gl.constexpr):
    """dX of a tile out of P or dS and dO or Q, for the role that stores it."""
    slot, _ = parts.acquire_full(by_turn(parts, turn))
    fence_async_shared()
    dx = warpgroup_mma_wait(0, deps=(product(slot.buffer.permute((1, 0)), factor),))
    slot = out.slot(by_turn(out, turn))
    gl.barrier()  # all warps have read what was there
    slot.buffer.store((dx * scale).to(slot.buffer.dtype))
    if C.parts > 1:  # the role that stores has no time for it in a chain
        fence_async_shared()
    slot.publish()


@gluon.jit
def make_role(schedule, channels, scale, C: gl.constexpr):
    """dV and dK."""
    begin, end = my_range(schedule, C)
    q_at, grad_at = channels.q.start(), channels.grad_out.start()
    q_slot = channels.q.slot(q_at)
    turn, head = 0, -1
    for t in range(begin, end):
        tile = read_tile(schedule, t)
        if tile.head != head:
            if head >= 0:
                q_slot.release()
            head = tile.head
            _, q_at = channels.q.acquire_full(q_at)
        grad_slot, grad_at = channels.grad_out.acquire_full(grad_at)
        for block in range(tile.kv_begin, tile.kv_end):
            if turn < 0:  # never, see above
                gl.barrier()
            make(channels.p, grad_slot.buffer, channels.dv, 1.0, turn, C)
            if block + 1 == tile.kv_end:
                grad_slot.release()
            make(channels.ds, q_slot.buffer, channels.dk, scale, turn, C)
            turn += 1
    if begin < end:
        q_slot.release()


@gluon.jit
def make_staging(parts, shape: gl.constexpr, layout: gl.constexpr):
    """A channel in the memory of another, that is full when one writer has filled it, and empty when the other is."""
    halves: gl.constexpr = parts.buffers.shape[1] * parts.buffers.shape[2] // (shape[0] * shape[1])
    buffers = reinterpret(parts.buffers, parts.buffers.dtype, [2 * halves] + shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
    return Channel(buffers, full, parts.empty, 2, halves)


@gluon.jit(do_not_specialize=["q_len"])
def broadcast_kernel(
    q,  # ragged descriptors of [Lq, Hq, D], see shared.ragged
    k,  # [tokens, Hkv, D]
    v,
    grad_out,  # [B * Lq, Hq, Dv]
    dk,
    dv,
    lse,  # fp32 [B, Hq, Lq]
    grad_lse,  # the same, or None
    out,  # [B, Lq, Hq, Dv]
    shares,  # fp32 [slots, parts, 128, D]: dQ of all that a CTA has of a head
    progress,  # int32 [2, CTAs], zeros; for a query of one part, anything
    tiles,  # of the schedule: equal ranges of the KV tiles of all heads
    worker_offsets,
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # scale * log2(e)
    scale,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    N: gl.constexpr = C.block_n
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, C.block_d], dtype)
    grad_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, C.block_dv], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_d], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_dv], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], dtype)
    p, ds = (make_channel(dtype, [M, N], p_layout, 2, 1, 2), make_channel(dtype, [M, N], p_layout, 2, 1, 2))
    channels = Channels(
        make_channel(dtype, [M, C.block_d], q_layout, 1, 3),
        make_channel(dtype, [M, C.block_dv], grad_layout, C.grad_stages, 3),
        make_channel(dtype, [N, C.block_d], k_layout, C.k_stages, 2),
        make_channel(dtype, [N, C.block_dv], v_layout, C.v_stages, 2),
        p,
        ds,
        make_staging(p, [N, C.block_dv], v_layout),
        make_staging(ds, [N, C.block_d], k_layout),
    )
    schedule = Schedule(tiles, worker_offsets, None, k_offsets, q_len, None)
    scales = (scale_log2, scale)
    statistics = Statistics(lse, grad_lse, out, gl.to_tensor(0), gl.to_tensor(0), q_len, C)
    gl.warp_specialize(
        [
            (score_role, (schedule, statistics, shares, channels, scales, 0, C)),
            (score_role, (schedule, statistics, shares, channels, scales, 64, C)),
            (make_role, (schedule, channels, scale, C)),
            (load_keys_role, (schedule, (k, v), progress, channels, C)),
            (load_queries_role, (schedule, (q, grad_out), channels, C)),
            (store_role, (schedule, dv, channels.dv, progress, C)),
            (store_role, (schedule, dk, channels.dk, progress + gl.num_programs(0), C)),
        ],
        [4, 4, 1, 1, 1, 1],
        [192, 96, 24, 24, 24, 24],
    )
