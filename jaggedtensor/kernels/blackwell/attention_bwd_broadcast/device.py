"""Backward of a broadcast query on Blackwell: the query stays, keys and values pass.

    dV = P^T dO        dK = scale * dS^T Q        dQ = scale * dS K        dS = P (dP - delta)

A CTA stays on one key-value head and walks an equal share of its tiles of 128 keys, over all sequences: dQ stays in
tensor memory for its life and leaves once, dV and dK of a tile are finished on the way. Keys are lanes of tensor memory
and query rows its columns, S^T = K Q^T: so P^T and dS^T are left operands where they were made. For tile n:

    load K, V      K(n+2)   V(n+1)                                     one warp, a ring each
    load Q, dO     dO, at a seam                                       one warp
    mma            S(n+1)   dQ(n)  dK(n)   dP(n+1)   dV(n+1)   S(n+2)  one warp
    compute 0, 1            P(n+1)                   dS(n+1)           four warps each: 64 query rows of every key
    drain                   dV(n)  dK(n)                               four warps: in halves of 64 columns, by TMA

Tensor memory, 512 columns of 128 lanes for D = 128. Each compute role has half of S and of dP, and puts its half of P
and dS, in low precision, over the left of it, where only it reads:

    |  P S, 64  |  P S, 64  |  dS dP, 64  |  dS dP, 64  |  half, 64  |  half, 64  |  dQ, D  |

The barriers, and what orders the use of memory. Products of the one role that issues them run in order, and a commit
tells of all before it:

    scored      S(n) is complete; so is dV(n-1), which has read P(n-1)
    weighted    both roles have read S(n) and written P(n)
    graded      dP(n) is complete; so are dQ(n-1) and dK(n-1), which have read dS(n-1)
    differed    both roles have read dP(n) and written dS(n), to tensor memory for dK and to shared memory for dQ
    halves      a ring of two: full when a half of dV or dK is complete, empty when drain has it in registers. The last
                one, of dK, tells that dQ is complete too

At the seam of two sequences dP waits for the new dO, and dO for the last dV that reads the old one; S goes on. TMA
reads zeros past the end of a sequence and stores nothing there, so that no score needs a mask: such a key has P <= 1
and a finite dS, which meets K = 0 in dQ. A query row that is not there has an lse of +inf, and so P = 0.
"""

from jaggedtensor.kernels.blackwell.attention_bwd_broadcast.scores import (
    make_scores,
    write_differences,
    write_weights,
)
from jaggedtensor.kernels.blackwell.backward import HALF, PLAIN, ROWS
from jaggedtensor.kernels.shared.arithmetic import LOG2_E
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)
from jaggedtensor.kernels.shared.pipeline import Channel, Counter, make_channel, new_barriers
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule, my_range, start_walk


@aggregate
class Channels:
    q: gl.shared_memory_descriptor  # [128, D]
    q_full: gl.shared_memory_descriptor  # filled once
    grad_out: Channel  # [128, Dv]
    k: Channel  # [N, D]
    v: Channel  # [N, Dv]


@aggregate
class Halves:
    """A ring of two [N, 64] in tensor memory, for dV and dK on their way out."""

    buffers: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def start(self):
        return Counter(gl.to_tensor(0), gl.to_tensor(0), 2)


@aggregate
class Statistics:
    """Of the query rows of each sequence."""

    lse: gl.tensor  # fp32 [B, Hq, Lq]
    delta: gl.tensor  # the same
    shifts: gl.shared_memory_descriptor  # fp32 [2, 64]: those of the sequence at hand, for each compute role
    deltas: gl.shared_memory_descriptor
    head: gl.tensor  # of keys
    q_len: gl.tensor
    C: gl.constexpr

    @gluon.jit
    def load(self, sequence, row):
        """-lse in log2 units and delta of packed rows: -inf and 0 for a row that is not there, whose P is then 0."""
        i, q_head = row // self.C.group, self.head * self.C.group + row % self.C.group
        at = (sequence.to(gl.int64) * self.C.q_heads + q_head) * self.q_len + i
        inside = i < self.q_len
        shift = gl.load(self.lse + at, mask=inside, other=float("inf")) * -LOG2_E
        return shift, gl.load(self.delta + at, mask=inside, other=0.0)


@gluon.jit
def load_keys_role(schedule, descriptors, channels, C: gl.constexpr):
    k_desc, v_desc = descriptors
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    k_at, v_at = channels.k.start(), channels.v.start()
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for block in range(tile.kv_begin, tile.kv_end):
            place = ragged_place(span.k_start, span.k_count, block * C.block_n, tile.head)
            slot, k_at = channels.k.acquire_empty(k_at)
            slot.load(k_desc, place)
            slot, v_at = channels.v.acquire_empty(v_at)
            slot.load(v_desc, place)
        walk = walk.next(t)


@gluon.jit
def load_queries_role(head, schedule, descriptors, channels, C: gl.constexpr):
    q_desc, grad_desc = descriptors
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    at = channels.grad_out.start()
    if begin < end:
        mbarrier.expect(channels.q_full, q_desc.nbytes_per_cta)
        place = ragged_place(0, schedule.q_len, 0, head * C.group)
        tma.async_load(q_desc, place, channels.q_full, channels.q)
    for t in range(begin, end):
        span = walk.span
        slot, at = channels.grad_out.acquire_empty(at)
        slot.load(grad_desc, ragged_place(span.q_start, span.q_count, 0, head * C.group))
        walk = walk.next(t)


@gluon.jit
def issue_halves(low0, low1, factor, halves, at):
    """dV or dK = [low0, low1] factor, half of its columns after half. The place in the ring after them."""
    COUNT: gl.constexpr = factor.shape[1] // HALF
    for i in gl.static_range(COUNT):
        columns = factor.slice(i * HALF, HALF, dim=1)
        acc = halves.buffers.index(at.index)
        mbarrier.wait(halves.empty.index(at.index), at.phase ^ 1)
        tcgen05_mma(low0, columns.slice(0, HALF), acc, use_acc=False, mbarriers=[])
        tcgen05_mma(low1, columns.slice(HALF, HALF), acc, mbarriers=[halves.full.index(at.index)])
        at = at.next()
    return at


@gluon.jit
def issue_late(turn, channels, k_at, scores, halves, at, dq):
    """What comes of dS of a tile: dQ += dS K, which sets K free, and dK. The place in the ring of halves after it."""
    slot = channels.k.slot(k_at)
    mbarrier.wait(scores.differed, turn & 1)
    tcgen05_mma(scores.ds.permute((1, 0)), slot.buffer, dq, use_acc=turn > 0, mbarriers=[slot.empty])
    return issue_halves(scores.low(scores.dp, 0), scores.low(scores.dp, 1), channels.q, halves, at)


@gluon.jit
def mma_role(schedule, channels, scores, halves, dq, C: gl.constexpr):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    k_at, v_at, grad_at, at = channels.k.start(), channels.v.start(), channels.grad_out.start(), halves.start()
    late_at = k_at  # of the tile before
    turn = 0  # tiles so far
    if begin < end:
        mbarrier.wait(channels.q_full, 0)
    for t in range(begin, end):
        count = walk.tile.kv_end - walk.tile.kv_begin
        grad_slot = channels.grad_out.slot(grad_at)
        for n in range(count):
            k_slot, after = channels.k.acquire_full(k_at)
            tcgen05_mma(k_slot.buffer, channels.q.permute((1, 0)), scores.s, use_acc=False, mbarriers=[scores.scored])
            if turn > 0:
                at = issue_late(turn - 1, channels, late_at, scores, halves, at, dq)
            late_at, k_at = k_at, after
            if n == 0:
                grad_slot, grad_at = channels.grad_out.acquire_full(grad_at)
            v_slot, v_at = channels.v.acquire_full(v_at)
            tcgen05_mma(
                v_slot.buffer,
                grad_slot.buffer.permute((1, 0)),
                scores.dp,
                use_acc=False,
                mbarriers=[scores.graded, v_slot.empty],
            )
            mbarrier.wait(scores.weighted, turn & 1)
            at = issue_halves(scores.low(scores.s, 0), scores.low(scores.s, 1), grad_slot.buffer, halves, at)
            tcgen05_commit(grad_slot.empty, pred=n + 1 == count)
            turn += 1
        walk = walk.next(t)
    if begin < end:
        at = issue_late(turn - 1, channels, late_at, scores, halves, at, dq)


@gluon.jit
def compute_role(part: gl.constexpr, schedule, scores, statistics, scale_log2):
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    shifts, deltas = statistics.shifts.index(part), statistics.deltas.index(part)
    row = part * HALF + gl.arange(0, HALF, gl.BlockedLayout([1], [32], [4], [0]))
    shift, delta = statistics.load(walk.tile.sequence, row)
    turn = 0
    for t in range(begin, end):
        shifts.store(shift)
        deltas.store(delta)
        shift, delta = statistics.load(walk.ahead.sequence, row)
        for _ in range(walk.tile.kv_begin, walk.tile.kv_end):
            mbarrier.wait(scores.scored, turn & 1)
            weights = write_weights(part, scores, shifts, scale_log2)
            mbarrier.wait(scores.graded, turn & 1)
            write_differences(part, scores, weights, deltas)
            turn += 1
        walk = walk.next(t)


@gluon.jit
def drain_half(halves, at, staging, desc, place, scale):
    """Half of the columns of dV or dK of a tile. The place in the ring after it."""
    mbarrier.wait(halves.full.index(at.index), at.phase)
    x = halves.buffers.index(at.index).load()
    mbarrier.arrive(halves.empty.index(at.index), count=1)
    buffer = staging.index(at.index)
    tma.store_wait(1)  # what was sent from it before has left
    buffer.store((x * scale).to(buffer.dtype))
    fence_async_shared()
    tma.async_store(desc, place, buffer)
    return at.next()


@gluon.jit
def drain_role(schedule, descriptors, halves, dq, staging, shares, scale, C: gl.constexpr):
    DK_HALVES: gl.constexpr = C.block_d // HALF
    DV_HALVES: gl.constexpr = C.block_dv // HALF
    dk_desc, dv_desc = descriptors
    begin, end = my_range(schedule)
    walk = start_walk(schedule, begin, end)
    at = halves.start()
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for block in range(tile.kv_begin, tile.kv_end):
            row = block * C.block_n
            for i in gl.static_range(DV_HALVES):
                place = ragged_place(span.k_start, span.k_count, row, tile.head, i * HALF)
                at = drain_half(halves, at, staging, dv_desc, place, 1.0)
            for i in gl.static_range(DK_HALVES):
                place = ragged_place(span.k_start, span.k_count, row, tile.head, i * HALF)
                at = drain_half(halves, at, staging, dk_desc, place, scale)
        walk = walk.next(t)
    flush(dq, shares, begin < end, scale, C)
    tma.store_wait(0)


@gluon.jit
def flush(dq, shares, some, scale, C: gl.constexpr):
    """The CTA's share of dQ [128, D], 0 without any tile."""
    WIDTH: gl.constexpr = 32
    PIECES: gl.constexpr = C.block_d // WIDTH
    layout: gl.constexpr = dq.slice(0, WIDTH).get_reg_layout()
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = shares + row.to(gl.int64)[:, None] * C.block_d + column[None, :]
    for i in gl.static_range(PIECES):
        share = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        if some:
            share = dq.slice(i * WIDTH, WIDTH).load(layout) * scale
        gl.store(place + i * WIDTH, share)


@gluon.jit(do_not_specialize=["q_len"])
def broadcast_kernel(
    q,  # ragged descriptors of [Lq, Hq, D], see shared.ragged
    k,  # [tokens, Hkv, D]
    v,
    grad_out,  # [B * Lq, Hq, Dv]
    dk,  # in blocks of 64 columns
    dv,
    lse,  # fp32 [B, Hq, Lq]
    delta,  # the same
    shares,  # fp32 [CTAs, 128, D]: a share of dQ from each
    tiles,  # of the schedule: equal ranges of the KV tiles of one head
    worker_offsets,
    k_offsets,  # [B + 1]
    q_len,
    scale_log2,  # scale * log2(e)
    scale,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    N: gl.constexpr = C.block_n
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_d], dtype)
    grad_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_dv], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_d], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_dv], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, HALF], dtype)
    half_layout: gl.constexpr = TensorMemoryLayout([N, HALF], col_stride=1)
    dq_layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_d], col_stride=1)
    channels = Channels(
        gl.allocate_shared_memory(dtype, [ROWS, C.block_d], q_layout),
        new_barriers(1, 1).index(0),
        make_channel(dtype, [ROWS, C.block_dv], grad_layout, 1),
        make_channel(dtype, [N, C.block_d], k_layout, C.k_stages),
        make_channel(dtype, [N, C.block_dv], v_layout, C.v_stages),
    )
    scores = make_scores(dtype, C)
    halves = Halves(
        allocate_tensor_memory(gl.float32, [2, N, HALF], half_layout), new_barriers(2, 1), new_barriers(2, 1)
    )
    dq = allocate_tensor_memory(gl.float32, [ROWS, C.block_d], dq_layout)
    staging = gl.allocate_shared_memory(dtype, [2, N, HALF], out_layout)
    schedule = Schedule(tiles, worker_offsets, None, k_offsets, q_len, None)
    head = gl.program_id(0) // C.workers
    statistics = Statistics(
        lse,
        delta,
        gl.allocate_shared_memory(gl.float32, [2, HALF], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, HALF], PLAIN),
        head,
        q_len,
        C,
    )
    gl.warp_specialize(
        [
            (drain_role, (schedule, (dk, dv), halves, dq, staging, shares, scale, C)),
            (compute_role, (0, schedule, scores, statistics, scale_log2)),
            (compute_role, (1, schedule, scores, statistics, scale_log2)),
            (mma_role, (schedule, channels, scores, halves, dq, C)),
            (load_keys_role, (schedule, (k, v), channels, C)),
            (load_queries_role, (head, schedule, (q, grad_out), channels, C)),
        ],
        [4, 4, 1, 1, 1],
        [C.compute_registers, C.compute_registers, C.single_registers, C.single_registers, C.single_registers],
    )
