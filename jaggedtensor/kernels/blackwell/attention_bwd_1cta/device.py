"""Backward on Blackwell that keeps a block of keys: queries pass, and their gradient is added to global memory.

    dV = P^T dO        dS = P (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

A CTA walks tiles of 128 keys of one head, each with the blocks of 128 packed query rows that see it. dV and dK of the
tile stay in tensor memory; dQ of each block leaves it at once. Keys are lanes and query rows columns of S and dP. For
block n of a tile:

    load K, V      V, K of the next tile                               one warp, a ring each
    load Q, dO     Q(n+2)   dO(n+1)                                    one warp, a ring each
    statistics     lse, delta(n+2)                                     one warp
    mma            S(n+1)   dQ(n)  dK(n)   dP(n+1)   dV(n+1)   S(n+2)  one warp
    compute 0, 1            P(n+1)                   dS(n+1)           four warps each: 64 query rows of every key
    drain                          dQ(n)                               four warps: slices of 32 columns, added by TMA
                                                     dV   ...   dK     at the end of a tile: halves of 64, by TMA

Tensor memory, 512 columns of 128 lanes for D = Dv = 128. A compute role has two pieces of 32 query rows, role 0 rows 0
and 64 onwards, role 1 rows 32 and 96: 32 columns of each half of S. It puts P, in low precision, over those in the left
half and dS over those in the right half, where only it reads. dS(n) has to wait in registers until S(n+1) is in
registers too. dQ takes the place of dP unless there is room for it (D = 64):

    |  P S, 64  |  dS S, 64  |  dQ dP, 128  |  dV, Dv  |  dK, D  |  [dQ, D]  |  [dQ, D]  |

The barriers, and what orders the use of memory. Products of the one role that issues them run in order, and a commit
tells of all before it:

    scored      S(n) is complete; so is dV(n-1), which has read P(n-1), and dK(n-2), which has read dS(n-2)
    kept        both roles have read S(n+1), or it is not under way, and have written dS(n) over it
    weighted    both roles have read S(n) and written P(n), a barrier for each piece
    graded      dP(n) is complete; so is dQ(n-1), which has read dS(n-1) in shared memory
    differed    both roles have read dP(n) and written dS(n) to shared memory
    dq          full when dQ(n) is complete; empty when drain has half of it staged and half in registers. With D = 128
                dP(n+1) waits for that, so dQ(n) comes first, dK(n) runs meanwhile, and drain adds nothing before
    dv, dk      full after the last block of a tile, empty when drain has read them: the next tile's dV or dK waits

dO of a block is done with after dV, but released after the dQ that follows: so the next one is written to shared memory
while dK takes its left operand from tensor memory, and not during S.

With one slot for K (D = 128) the last dQ of a tile comes before the first S of the next; with two, the scores of the
next tile are under way before. TMA reads zeros past the end of a sequence and stores nothing there, so that no score
needs a mask at a ragged end: such a key has P <= 1 and a finite dS, which meets K = 0 in dQ, and a query row that is
not there has an lse of +inf, and so P = 0. Windows set scores to -inf, in blocks that they cut.

If turns are taken, a tile adds to a block of dQ when all tiles of later keys have: see `Turns`.
"""

from jaggedtensor.kernels.blackwell.arithmetic import halves as halves_of
from jaggedtensor.kernels.blackwell.backward import (
    HALF,
    PIECE,
    PLAIN,
    ROWS,
    Statistics,
    limits_of,
    start_key_walk,
    statistics_role,
)
from jaggedtensor.kernels.shared.arithmetic import at_most, rounded
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    fence_async_shared,
    fma2,
    gl,
    gluon,
    mbarrier,
    mul2,
    reinterpret,
    sub2,
    tcgen05_commit,
    tcgen05_mma,
    tensor_memory_descriptor,
    tma,
)
from jaggedtensor.kernels.shared.pipeline import Channel, Counter, make_channel, new_barriers
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule

WEIGHTS: gl.constexpr = gl.constexpr(0)  # where P is over S, in columns of low precision
DIFFERENCES: gl.constexpr = gl.constexpr(128)  # where dS of the block before is
SLICE: gl.constexpr = gl.constexpr(32)  # columns of dQ that are staged at a time


@aggregate
class Scores:
    """S and dP of a block, transposed: [N, 128] fp32 each."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor
    ds: gl.shared_memory_descriptor  # [N, 128]
    scored: gl.shared_memory_descriptor
    weighted: gl.tuple  # for each piece
    graded: gl.shared_memory_descriptor
    differed: gl.shared_memory_descriptor
    kept: gl.shared_memory_descriptor

    @gluon.jit
    def low(self, at: gl.constexpr, part: gl.constexpr, piece: gl.constexpr):
        """[N, 32] in low precision over S: a piece of P, at WEIGHTS, or of dS, at DIFFERENCES."""
        N: gl.constexpr = self.s.shape[0]
        whole = reinterpret(self.s, self.ds.dtype, [N, 2 * ROWS], TensorMemoryLayout([N, 2 * ROWS], col_stride=1))
        return whole.slice(at + part * HALF + piece * PIECE, PIECE)


@aggregate
class Channels:
    q: Channel  # [128, D]
    grad_out: Channel  # [128, Dv]
    k: Channel  # [N, D]
    v: Channel  # [N, Dv]
    statistics: Channel  # 2 x [128] fp32: -lse in log2 units and delta


@aggregate
class Sum:
    """A gradient in tensor memory, fp32: a ring of [128, columns], full when complete, empty when drain has read it."""

    buffers: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr  # of barriers
    alone: gl.constexpr  # one buffer, that is no ring

    @gluon.jit
    def start(self):
        return Counter(gl.to_tensor(0), gl.to_tensor(0), self.depth)

    @gluon.jit
    def buffer(self, at):
        if self.alone:
            return self.buffers
        else:
            return self.buffers.index(at.index)


@aggregate
class Sums:
    dq: Sum
    dk: Sum
    dv: Sum


@aggregate
class Turns:
    """Who adds to a block of dQ: the tile of the last keys that it sees, then the one before, and so on.

    `done` counts the tiles that have added to it. All CTAs walk one list from its end, in which the tiles of a sequence
    and head are in the order of their keys: a tile waits for tiles further back only, that is for such as their CTAs
    began before everything they have in front of this one. So of all tiles under way the furthest back waits for
    nothing, as long as all CTAs are resident: there is one for each processor.
    """

    done: gl.tensor  # int32 [Hkv, stride]
    stride: gl.tensor  # blocks of query rows of all sequences, at most
    window: gl.tuple

    @gluon.jit
    def of(self, tile, span, keys, C: gl.constexpr):
        """Those of a block of keys."""
        # Sequence b begins at a place of its own: rows of the ones before // 128 + b is past all of their blocks.
        start = (span.q_start.to(gl.int64) * C.group // ROWS).to(gl.int32) + tile.sequence
        done = self.done + tile.head.to(gl.int64) * self.stride + start
        reach = span.k_count - span.q_count + self.window[1]  # the last key that query 0 sees
        return KeyTurns(done, (span.k_count - 1) // C.block_n, reach, keys)


@aggregate
class KeyTurns:
    """The turns of a block of keys."""

    done: gl.tensor
    last: gl.tensor  # block of keys of the sequence
    reach: gl.tensor
    keys: gl.tensor

    @gluon.jit
    def come(self, block, C: gl.constexpr):
        """Waits until all later keys have added to a block of dQ."""
        number = self.last
        if C.right:
            i = ((block + 1) * ROWS - 1) // C.group  # the last query of the block
            number = gl.minimum(number, (i + self.reach) // C.block_n)
        number -= self.keys
        so_far = 0
        while so_far < number:
            so_far = gl.atomic_add(self.done + block, 0, sem="acquire", scope="gpu")

    @gluon.jit
    def pass_on(self, block):
        """What this tile has added is there."""
        tma.store_wait(0, read_only=False)
        gl.atomic_add(self.done + block, 1, sem="release", scope="gpu")


@aggregate
class Results:
    """Where gradients go."""

    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    dq: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor  # fp32 [2, 128, 32]
    turns: Turns | gl.constexpr  # None: dQ is added in any order
    scale: gl.tensor


# -- loading -----------------------------------------------------------------------------------------------------------


@gluon.jit
def load_keys_role(schedule, descriptors, channels, C: gl.constexpr):
    k_desc, v_desc = descriptors
    walk, begin, end = start_key_walk(schedule, C)
    k_at, v_at = channels.k.start(), channels.v.start()
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for block in range(tile.kv_begin, tile.kv_end):
            place = ragged_place(span.k_start, span.k_count, block * C.block_n, tile.head)
            slot, v_at = channels.v.acquire_empty(v_at)  # V of the tile before is done with before its K
            slot.load(v_desc, place)
            slot, k_at = channels.k.acquire_empty(k_at)
            slot.load(k_desc, place)
        walk = walk.next(t)


@gluon.jit
def load_queries_role(schedule, descriptors, channels, C: gl.constexpr):
    q_desc, grad_desc = descriptors
    walk, begin, end = start_key_walk(schedule, C)
    q_at, grad_at = channels.q.start(), channels.grad_out.start()
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        q_start = span.q_start
        if C.workers:  # a broadcast query
            q_start = q_start * 0
        for _ in range(tile.kv_begin, tile.kv_end):
            for n in range(tile.q_end - tile.q_begin):
                row, head = walk.rows(n, C) * (ROWS // C.group), tile.head * C.group
                slot, q_at = channels.q.acquire_empty(q_at)
                slot.load(q_desc, ragged_place(q_start, span.q_count, row, head))
                slot, grad_at = channels.grad_out.acquire_empty(grad_at)
                slot.load(grad_desc, ragged_place(span.q_start, span.q_count, row, head))
        walk = walk.next(t)


# -- products ----------------------------------------------------------------------------------------------------------


@aggregate
class Step:
    """A block of query rows whose dS is still to come."""

    k_at: Counter
    q_at: Counter
    grad_at: Counter
    turn: gl.tensor  # blocks before it
    tile: gl.tensor  # blocks of keys before its own
    n: gl.tensor  # blocks of its tile before it


@gluon.jit
def multiply_piece(scores, at: gl.constexpr, piece: gl.constexpr, rows, acc, use_acc):
    """What a piece of each compute role, in low precision, adds to dV or dK."""
    first, second = rows.slice(piece * HALF, PIECE), rows.slice(piece * HALF + PIECE, PIECE)
    tcgen05_mma(scores.low(at, 0, piece), first, acc, use_acc=use_acc)
    tcgen05_mma(scores.low(at, 1, piece), second, acc)


@gluon.jit
def issue_late(step, last, channels, scores, sums, dq_at):
    """What comes of dS of a block: dQ, for which drain waits, and dK, which sets Q free; `last` of its tile, they set K
    free. The place in the ring of dQ after it."""
    q_slot, k_slot = channels.q.slot(step.q_at), channels.k.slot(step.k_at)
    mbarrier.wait(scores.differed, step.turn & 1)
    if not sums.dq.alone:
        mbarrier.wait(sums.dq.empty.index(dq_at.index), dq_at.phase ^ 1)
    tcgen05_mma(
        scores.ds.permute((1, 0)),
        k_slot.buffer,
        sums.dq.buffer(dq_at),
        use_acc=False,
        mbarriers=[sums.dq.full.index(dq_at.index)],
    )
    tcgen05_commit(channels.grad_out.slot(step.grad_at).empty)
    tcgen05_commit(k_slot.empty, pred=last)
    mbarrier.wait(sums.dk.empty.index(0), (step.tile & 1) ^ 1, pred=step.n == 0)
    mbarrier.wait(scores.kept, step.turn & 1)
    multiply_piece(scores, DIFFERENCES, 0, q_slot.buffer, sums.dk.buffers, step.n > 0)
    multiply_piece(scores, DIFFERENCES, 1, q_slot.buffer, sums.dk.buffers, True)
    tcgen05_commit(q_slot.empty)
    tcgen05_commit(sums.dk.full.index(0), pred=last)
    return dq_at.next()


@gluon.jit
def mma_role(schedule, channels, scores, sums, C: gl.constexpr):
    walk, begin, end = start_key_walk(schedule, C)
    k_at, v_at, q_at, grad_at = channels.k.start(), channels.v.start(), channels.q.start(), channels.grad_out.start()
    dq_at = sums.dq.start()
    turn, number = gl.to_tensor(0), gl.to_tensor(0)  # blocks, and blocks of keys, so far
    step = Step(k_at, q_at, grad_at, turn, number, turn)
    for t in range(begin, end):
        tile = walk.tile
        count = tile.q_end - tile.q_begin
        for _ in range(tile.kv_begin, tile.kv_end):
            k_slot, k_after = channels.k.acquire_full(k_at)
            v_slot = channels.v.slot(v_at)
            for n in range(count):
                q_slot, q_after = channels.q.acquire_full(q_at)
                tcgen05_mma(
                    k_slot.buffer, q_slot.buffer.permute((1, 0)), scores.s, use_acc=False, mbarriers=[scores.scored]
                )
                late = turn > 0 if C.overlapped else n > 0
                if late:
                    dq_at = issue_late(step, n == 0, channels, scores, sums, dq_at)
                step = Step(k_at, q_at, grad_at, turn, number, n)
                q_at = q_after
                if n == 0:
                    v_slot, v_at = channels.v.acquire_full(v_at)
                grad_slot, grad_at = channels.grad_out.acquire_full(grad_at)
                if sums.dq.alone:  # dQ of the block before is where dP goes
                    mbarrier.wait(sums.dq.empty.index(0), (turn & 1) ^ 1)
                tcgen05_mma(
                    v_slot.buffer,
                    grad_slot.buffer.permute((1, 0)),
                    scores.dp,
                    use_acc=False,
                    mbarriers=[scores.graded],
                )
                tcgen05_commit(v_slot.empty, pred=n + 1 == count)
                mbarrier.wait(sums.dv.empty.index(0), (number & 1) ^ 1, pred=n == 0)
                mbarrier.wait(scores.weighted[0], turn & 1)
                multiply_piece(scores, WEIGHTS, 0, grad_slot.buffer, sums.dv.buffers, n > 0)
                mbarrier.wait(scores.weighted[1], turn & 1)
                multiply_piece(scores, WEIGHTS, 1, grad_slot.buffer, sums.dv.buffers, True)
                tcgen05_commit(sums.dv.full.index(0), pred=n + 1 == count)
                turn += 1
            if not C.overlapped:
                dq_at = issue_late(step, turn > 0, channels, scores, sums, dq_at)
            number += 1
            k_at = k_after
        walk = walk.next(t)
    if C.overlapped and begin < end:
        dq_at = issue_late(step, turn > 0, channels, scores, sums, dq_at)


# -- computing ---------------------------------------------------------------------------------------------------------


@gluon.jit
def weigh(s, part: gl.constexpr, piece: gl.constexpr, scores, shifts, scale_log2, limits, row):
    """P of a piece of S, published: fp32 [N, 32]. `limits`: which rows see which keys, None if all do."""
    at: gl.constexpr = piece * HALF + part * PIECE
    if limits is not None:
        s = limits.applied(s, row + at)
    shift = shifts.slice(at, PIECE).load(gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(at_most(fma2(s, scale_log2, gl.expand_dims(shift, 0)), 0.0))
    target = scores.low(WEIGHTS, part, piece)
    target.store(gl.convert_layout(p.to(target.dtype), target.get_reg_layout(), assert_trivial=True))
    mbarrier.arrive(scores.weighted[piece], count=1)
    return p


@gluon.jit
def differ(p, dp, part: gl.constexpr, piece: gl.constexpr, scores, deltas):
    """dS of a piece of P and dP, to shared memory: the bits of [N, 32]."""
    at: gl.constexpr = piece * HALF + part * PIECE
    delta = deltas.slice(at, PIECE).load(gl.SliceLayout(0, dp.type.layout))
    ds = rounded(mul2(p, sub2(dp, gl.expand_dims(delta, 0))), scores.ds.dtype)
    scores.ds.slice(at, PIECE, dim=1).store(ds)
    return ds.to(gl.int16, bitcast=True)  # or the compiler takes pairs of fp16 apart to carry them along


@gluon.jit
def keep(held, part: gl.constexpr, scores):
    """dS of a block to tensor memory, over what its role has read of the right half of S."""
    for piece in gl.static_range(2):
        target = scores.low(DIFFERENCES, part, piece)
        ds = held[piece].to(scores.ds.dtype, bitcast=True)
        target.store(gl.convert_layout(ds, target.get_reg_layout(), assert_trivial=True))
    mbarrier.arrive(scores.kept, count=1)


@gluon.jit
def pieces_of(wide, part: gl.constexpr):
    """A compute role's query rows of S or dP, in two pieces [N, 32]."""
    return wide.slice(part * PIECE, PIECE).load(), wide.slice(HALF + part * PIECE, PIECE).load()


@gluon.jit
def compute_role(part: gl.constexpr, schedule, channel, scores, numbers, C: gl.constexpr):
    LAYOUT: gl.constexpr = scores.s.slice(0, PIECE).get_reg_layout()
    LANES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    scale_log2, window = numbers
    walk, begin, end = start_key_walk(schedule, C)
    at = channel.start()
    nothing = gl.full([C.block_n, PIECE], 0, gl.int16, LAYOUT)
    held = nothing, nothing  # dS of the block before
    turn = 0
    for t in range(begin, end):
        tile = walk.tile
        for keys in range(tile.kv_begin, tile.kv_end):
            if C.left or C.right:
                limits = limits_of(keys, walk.span, window, LANES, C)
            else:
                limits = None
            for n in range(tile.q_end - tile.q_begin):
                row = walk.rows(n, C) * ROWS
                slot, after = channel.acquire_full(at)
                deltas = channel.slot(at, 1).buffer
                mbarrier.wait(scores.scored, turn & 1)
                left, right = pieces_of(scores.s, part)
                late = turn > 0 if C.overlapped else n > 0
                if late:
                    keep(held, part, scores)
                left = weigh(left, part, 0, scores, slot.buffer, scale_log2, limits, row)
                right = weigh(right, part, 1, scores, slot.buffer, scale_log2, limits, row)
                mbarrier.wait(scores.graded, turn & 1)
                dp_left, dp_right = pieces_of(scores.dp, part)
                held = (
                    differ(left, dp_left, part, 0, scores, deltas),
                    differ(right, dp_right, part, 1, scores, deltas),
                )
                fence_async_shared()
                mbarrier.arrive(scores.differed, count=1)
                slot.release()
                at = after
                turn += 1
            if not C.overlapped:
                keep(held, part, scores)
        walk = walk.next(t)
    if C.overlapped and begin < end:
        keep(held, part, scores)


# -- draining ----------------------------------------------------------------------------------------------------------


@gluon.jit
def stage(results, at, x):
    """[128, 32] fp32, or 64 columns in half of the bytes, in place of what was sent from there before. The buffer."""
    buffer = results.staging.index(at.index)
    if x.dtype != gl.float32:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([x.shape[0], HALF], x.dtype)
        buffer = reinterpret(buffer, x.dtype, [x.shape[0], HALF], LAYOUT)
    buffer.store(x)
    fence_async_shared()
    return buffer


@gluon.jit
def drain_sum(total, at, number, desc, key, results, scale):
    """dV or dK of a block of keys, half of its columns after half. The place in the ring of staging after it."""
    COUNT: gl.constexpr = total.buffers.shape[1] // HALF
    tile, span, row = key
    mbarrier.wait(total.full.index(0), number & 1)
    for i in gl.static_range(COUNT):
        x = total.buffers.slice(i * HALF, HALF).load()
        if i + 1 == COUNT:
            mbarrier.arrive(total.empty.index(0), count=1)
        tma.store_wait(1)
        buffer = stage(results, at, (x * scale).to(desc.dtype))
        tma.async_store(desc, ragged_place(span.k_start, span.k_count, row, tile.head, i * HALF), buffer)
        at = at.next()
    return at


@gluon.jit
def add_slice(results, place, at, i: gl.constexpr):
    """A slice of dQ that is staged. The place in the ring of staging after it."""
    start, count, row, head = place
    tma.async_atomic_add(results.dq, ragged_place(start, count, row, head, i * SLICE), results.staging.index(at.index))
    return at.next()


@gluon.jit
def drain_query(dq, dq_at, at, where, results, turns, C: gl.constexpr):
    """dQ of a block: its last 64 columns wait in registers, those before them staged, so that tensor memory is free
    before anything is added, which may have to wait for its turn. The place in the ring of staging after it."""
    EARLY: gl.constexpr = C.block_d // SLICE - 2
    block, place = where
    buffer = dq.buffer(dq_at)
    mbarrier.wait(dq.full.index(dq_at.index), dq_at.phase)
    if EARLY > 0:
        early = halves_of(buffer.slice(0, 2 * SLICE).load())
        if C.workers == 0:
            tma.store_wait(0)
    if C.workers:  # what this CTA has added to the same place must be there, so that bits do not depend on the time
        tma.store_wait(0, read_only=False)
    if EARLY > 0:
        stage(results, at, early[0])
        stage(results, at.next(), early[1])
    late = halves_of(buffer.slice(EARLY * SLICE, 2 * SLICE).load())
    mbarrier.arrive(dq.empty.index(dq_at.index), count=1)
    if C.ordered:
        turns.come(block, C)
    for i in gl.static_range(EARLY):
        at = add_slice(results, place, at, i)
    for i in gl.static_range(2):
        tma.store_wait(1)
        stage(results, at, late[i])
        at = add_slice(results, place, at, EARLY + i)
    if C.ordered:
        turns.pass_on(block)
    return at


@gluon.jit
def drain_role(schedule, sums, results, C: gl.constexpr):
    walk, begin, end = start_key_walk(schedule, C)
    dq_at = sums.dq.start()
    at = Counter(gl.to_tensor(0), gl.to_tensor(0), 2)
    number = 0
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        count = tile.q_end - tile.q_begin
        for keys in range(tile.kv_begin, tile.kv_end):
            key = tile, span, keys * C.block_n
            if C.ordered:
                turns = results.turns.of(tile, span, keys, C)
            else:
                turns = None
            for n in range(count):
                block = walk.rows(n, C)
                if n + 1 == count:
                    at = drain_sum(sums.dv, at, number, results.dv, key, results, 1.0)
                place = query_place(tile, span, block, C)
                at = drain_query(sums.dq, dq_at, at, (block, place), results, turns, C)
                dq_at = dq_at.next()
            at = drain_sum(sums.dk, at, number, results.dk, key, results, results.scale)
            number += 1
        walk = walk.next(t)
    tma.store_wait(0, read_only=False)


@gluon.jit
def query_place(tile, span, block, C: gl.constexpr):
    """Where dQ of a block goes: to rows of queries, or to this CTA's share of those of a broadcast query."""
    if C.workers:
        total = C.q_blocks * ROWS
        return gl.program_id(0) * total, total, block * ROWS, 0
    else:
        return span.q_start, span.q_count, block * (ROWS // C.group), tile.head * C.group


# -- the kernel --------------------------------------------------------------------------------------------------------


@gluon.jit
def make_sum(rows: gl.constexpr, columns: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([rows, columns], col_stride=1)
    buffers = allocate_tensor_memory(gl.float32, [rows, columns], layout)
    return Sum(buffers, new_barriers(1, 1), new_barriers(1, 1), 1, True)


@gluon.jit
def make_scores(dtype: gl.constexpr, C: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([C.block_n, ROWS], col_stride=1)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.block_n, ROWS], dtype)
    return Scores(
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        allocate_tensor_memory(gl.float32, [C.block_n, ROWS], layout),
        gl.allocate_shared_memory(dtype, [C.block_n, ROWS], ds_layout),
        new_barriers(1, 1).index(0),
        (new_barriers(1, 2).index(0), new_barriers(1, 2).index(0)),
        new_barriers(1, 1).index(0),
        new_barriers(1, 2).index(0),
        new_barriers(1, 2).index(0),
    )


@gluon.jit
def make_query_sum(scores, C: gl.constexpr):
    """dQ in buffers of its own, or over dP."""
    DEPTH: gl.constexpr = C.dq_stages
    if DEPTH == 0:
        return Sum(scores.dp.slice(0, C.block_d), new_barriers(1, 1), new_barriers(1, 1), 1, True)
    else:
        layout: gl.constexpr = TensorMemoryLayout([ROWS, C.block_d], col_stride=1)
        buffers = allocate_tensor_memory(gl.float32, [DEPTH, ROWS, C.block_d], layout)
        return Sum(buffers, new_barriers(DEPTH, 1), new_barriers(DEPTH, 1), DEPTH, False)


@gluon.jit(do_not_specialize=["q_len", "stat_batch", "stat_row", "stat_head", "turn_stride", "left", "right"])
def backward_kernel(
    q,  # ragged descriptors of [rows, Hq, D], see shared.ragged
    k,  # [tokens, Hkv, D]
    v,
    grad_out,  # [rows, Hq, Dv]
    dk,  # in blocks of 64 columns
    dv,
    dq,  # fp32 [rows, Hq, D] in blocks of 32 columns, zeros to be added to; of a broadcast query [CTAs * rows, 1, D]
    lse,  # fp32 [B, Hq, Lq] or [rows, Hq]
    delta,
    stat_batch,
    stat_row,
    stat_head,  # strides of both
    tiles,  # of the schedule, by keys
    worker_offsets,
    listed,  # blocks of query rows that a block mask lets through, None without one
    q_offsets,  # [B + 1], None unless jagged
    k_offsets,  # [B + 1]
    q_len,
    done,  # int32 [Hkv, turn_stride] zeros, None unless turns are taken
    turn_stride,
    scale_log2,  # scale * log2(e)
    scale,
    left,
    right,
    C: gl.constexpr,  # config.Config
):
    dtype: gl.constexpr = q.dtype
    N: gl.constexpr = C.block_n
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_d], dtype)
    grad_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, C.block_dv], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_d], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, C.block_dv], dtype)
    slice_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], gl.float32)
    channels = Channels(
        make_channel(dtype, [ROWS, C.block_d], q_layout, C.q_stages),
        make_channel(dtype, [ROWS, C.block_dv], grad_layout, C.grad_stages),
        make_channel(dtype, [N, C.block_d], k_layout, C.k_stages),
        make_channel(dtype, [N, C.block_dv], v_layout, C.v_stages),
        make_channel(gl.float32, [ROWS], PLAIN, C.statistics_stages, 2, 1, 2),
    )
    scores = make_scores(dtype, C)
    sums = Sums(make_query_sum(scores, C), make_sum(N, C.block_d), make_sum(N, C.block_dv))
    staging = gl.allocate_shared_memory(gl.float32, [2, ROWS, SLICE], slice_layout)
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, listed)
    statistics = Statistics(lse, delta, stat_batch, stat_row, stat_head)
    if C.ordered:
        turns = Turns(done, turn_stride, (left, right))
    else:
        turns = None
    results = Results(dk, dv, dq, staging, turns, scale)
    numbers = (scale_log2, (left, right))
    gl.warp_specialize(
        [
            (drain_role, (schedule, sums, results, C)),
            (compute_role, (0, schedule, channels.statistics, scores, numbers, C)),
            (compute_role, (1, schedule, channels.statistics, scores, numbers, C)),
            (mma_role, (schedule, channels, scores, sums, C)),
            (load_keys_role, (schedule, (k, v), channels, C)),
            (load_queries_role, (schedule, (q, grad_out), channels, C)),
            (statistics_role, (schedule, statistics, channels.statistics, C)),
        ],
        [4, 4, 1, 1, 1, 1],
        [
            C.compute_registers,
            C.compute_registers,
            C.single_registers,
            C.single_registers,
            C.single_registers,
            C.single_registers,
        ],
    )
