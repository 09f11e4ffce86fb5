"""Backward by pairs of CTAs on Blackwell: a tile of 256 keys stays, 128 with each CTA, and blocks of queries pass.

    dV = P^T dO        dS = P (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

Products are of both CTAs: of the left operand and of the result each has half of the rows, of the right operand half of
the columns. Keys are rows of S^T = K Q^T, dP^T, dV and dK, 256 of them, so that each CTA loads half of Q and dO for S
and dP, and half of their columns for dV and dK. dQ [128, D] is one product over 256 keys, of which each CTA has 64
rows: it takes dS of those rows and of all keys, so that the CTAs exchange halves of dS. A CTA sends out half of dQ for
twice as many keys, and so half of what it would send alone. For block n of 128 packed query rows:

    load rows      K, V at the start of a tile; Q(n+2), dO(n+2) by rows                       one warp each
    load columns   K at the start of a tile; dO(n+1), Q(n+1) by columns
    statistics     lse(n+2), delta(n+2)
    mma            S(n+1)   dK(n)   dQ(n)   dP(n+1)   dV(n+1)   S(n+2)    of the lead CTA alone
    compute 0, 1            P(n+1)                dS(n+1)                 four warps each: a key and 64 rows a thread
    reduce                                  dQ(n) out                     four warps; dV, dK at the end of a tile

A compute role has query rows in two pieces of 32, one for each half of a block, and so for each CTA that takes dS:
role 0 rows 0 and 64 onwards, role 1 rows 32 and 96. The two take turns at arithmetic and tensor memory. Each puts its P
in low precision over that part of S that it alone has read, the left 32 columns of its own, and dS over dP so.

Tensor memory of each CTA, 512 columns of 128 lanes. dQ of the block before, whose 64 rows take 64 columns of all lanes,
goes over the right half of S:

    |  P S, 64  |  dQ S, 64  |  dS dP, 64  |  dP, 64  |  dV, 128  |  dK, 128  |

Every operand has one buffer: it is filled again while the other products of a block run. The barriers, and what orders
the use of memory. Products run in order and a commit tells of all before it, to both CTAs. A barrier "of the pair" is
the lead's: all arrive there, and the lead alone waits:

    scored      S(n) is complete, and has read Q by rows; so is dV(n-1), which has read P(n-1) and dO by columns
    read        of the pair: all have the right half of S(n) in registers, so that dQ(n-1) may go over it
    weighted    of the pair: all have written P(n), a barrier for each piece
    graded      dP(n) is complete, and has read dO by rows; so are dK(n-1), which has read dS(n-1) in tensor memory and
                Q by columns, and dQ(n-1), which has read dS(n-1) in shared memory
    differed    of the pair: all have written dS(n) over dP(n)
    exchanged   dS(n) of a CTA's rows is in its shared memory, from both
    received    of the pair: both have seen that. The role that issues products passes it on for its CTA, with the fence
                before tensor cores may read it
    sums        dQ and dV: full when complete; dK is complete when the last dQ of its tile is. All empty, of the pair,
                when reduce has them in registers. S(n+2) waits for dQ(n) to leave, the first dV and dK of a tile for
                those of the tile before

So dK(n) hides the exchange of dS(n), and dQ(n) leaves while the products after it run.

dQ is added to global memory in no order: who asks for the same bits every time is served by other kernels. TMA reads
zeros past the end of a sequence and writes nothing there, so that a CTA may have keys of nobody: they have a P of at
most 1 and a finite dS, which meets K = 0 in dQ. A query row that is not there has an lse of +inf, and so P = 0.
"""

from jaggedtensor.kernels.blackwell.arithmetic import joined
from jaggedtensor.kernels.blackwell.backward import Statistics, limits_of, start_key_walk
from jaggedtensor.kernels.shared.arithmetic import at_most, rounded
from jaggedtensor.kernels.shared.dsl import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    async_store,
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
from jaggedtensor.kernels.shared.ragged import ragged_place
from jaggedtensor.kernels.shared.walk import Schedule

KEYS: gl.constexpr = gl.constexpr(256)  # of a tile
ROWS: gl.constexpr = gl.constexpr(128)  # packed query rows of a block
HALF: gl.constexpr = gl.constexpr(64)  # columns of dQ, dK or dV that leave at a time; query rows of a compute role
PIECE: gl.constexpr = gl.constexpr(32)  # query rows of P or dS that are made and stored at a time
BY_ROWS: gl.constexpr = gl.constexpr([[1, 0]])  # how a pair shares a block
BY_COLUMNS: gl.constexpr = gl.constexpr([[0, 1]])
LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]]))  # a copy for each CTA


@aggregate
class Cell:
    """One buffer that a load role fills and products read, by turns. Both CTAs' loads arrive on the lead's `full`."""

    buffer: gl.shared_memory_descriptor  # [1, *block]: Triton tells CTAs their halves by the block's own dimensions
    full: gl.shared_memory_descriptor  # of the pair
    empty: gl.shared_memory_descriptor  # of each CTA
    split: gl.constexpr  # how the pair shares its rows and columns
    late: gl.constexpr  # 1 if `empty` is what a product of the next block tells, else 0

    @gluon.jit
    def load(self, descriptor, place, turn):
        mbarrier.wait(self.empty, (turn & 1) ^ 1 ^ self.late)
        mbarrier.expect(self.full, descriptor.nbytes_per_cta)
        tma.async_load(descriptor, place, self.full, self.buffer.index(0))

    @gluon.jit
    def filled(self, turn):
        """The buffer, filled for the time `turn`."""
        mbarrier.wait(self.full, turn & 1)
        return matrix(self.buffer.index(opaque_zero(turn)), self.split)


@gluon.jit
def opaque_zero(turn):
    """0, which the compiler cannot know: it would keep the descriptors of all operands, and spill them."""
    return turn >> 30


@gluon.jit
def matrix(buffer, split: gl.constexpr):
    """A block of a ragged descriptor as rows and columns."""
    ROWS: gl.constexpr = buffer.shape[2] * buffer.shape[3]
    COLUMNS: gl.constexpr = buffer.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype, cga_layout=split)
    return reinterpret(buffer, buffer.dtype, [ROWS, COLUMNS], LAYOUT)


@aggregate
class Cells:
    k_rows: Cell  # [256, D], by rows
    k_columns: Cell  # [256, D], by columns
    v_rows: Cell  # [256, Dv]
    q_rows: Cell  # [128, D]
    q_columns: Cell
    grad_rows: Cell  # [128, Dv]
    grad_columns: Cell


@aggregate
class Scores:
    """S and dP of a block, transposed: [256, 128] fp32 each, by rows."""

    s: tensor_memory_descriptor
    dp: tensor_memory_descriptor
    ds: gl.shared_memory_descriptor  # [2, 256, 64], by columns: of each compute role
    scored: gl.shared_memory_descriptor
    weighted: gl.tuple  # of the pair, for each piece
    graded: gl.shared_memory_descriptor
    differed: gl.shared_memory_descriptor  # of the pair
    read: gl.shared_memory_descriptor  # of the pair
    exchanged: gl.shared_memory_descriptor
    received: gl.shared_memory_descriptor  # of the pair

    @gluon.jit
    def piece(self, wide, part: gl.constexpr, piece: gl.constexpr):
        """[256, 32] of S or dP."""
        return wide.slice(piece * HALF + part * PIECE, PIECE)

    @gluon.jit
    def low(self, wide, part: gl.constexpr, piece: gl.constexpr):
        """[256, 32] in low precision over the left half of S or dP: a piece of P or dS, over what its role has read."""
        layout: gl.constexpr = TensorMemoryLayout([KEYS // 2, 2 * ROWS], 1, BY_ROWS, True)
        whole = reinterpret(wide, self.ds.dtype, [KEYS, 2 * ROWS], layout)
        return whole.slice(part * HALF + piece * PIECE, PIECE)


@aggregate
class Sum:
    """An accumulator on its way out."""

    acc: tensor_memory_descriptor
    full: gl.shared_memory_descriptor | gl.constexpr  # None for dK, which is complete when its last dQ is
    empty: gl.shared_memory_descriptor  # of the pair


@aggregate
class Sums:
    dq: Sum  # [128, D] of a block, over the right half of S
    dv: Sum  # [256, Dv]
    dk: Sum  # [256, D]


@aggregate
class Line:
    """lse or delta of a block's rows."""

    buffer: gl.shared_memory_descriptor  # fp32 [128]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def put(self, values, turn):
        mbarrier.wait(self.empty, (turn & 1) ^ 1)
        self.buffer.store(values)
        mbarrier.arrive(self.full, count=1)


# -- loading -----------------------------------------------------------------------------------------------------------


@gluon.jit
def query_place(walk, n, C: gl.constexpr):
    """Of the n-th block of query rows of a tile."""
    row = walk.rows(n, C) * (ROWS // C.group)
    return ragged_place(walk.span.q_start, walk.span.q_count, row, walk.tile.head * C.group)


@gluon.jit
def load_rows_role(schedule, descriptors, cells, C: gl.constexpr):
    """What S and dP take."""
    k_desc, v_desc, q_desc, grad_desc = descriptors
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        place = ragged_place(span.k_start, span.k_count, tile.kv_begin * KEYS, tile.head)
        cells.k_rows.load(k_desc, place, t - begin)
        for n in range(tile.q_end - tile.q_begin):
            q_place = query_place(walk, n, C)
            cells.q_rows.load(q_desc, q_place, turn)
            if n == 0:
                cells.v_rows.load(v_desc, place, t - begin)
            cells.grad_rows.load(grad_desc, q_place, turn)
            turn += 1
        walk = walk.next(t)


@gluon.jit
def load_columns_role(schedule, descriptors, cells, C: gl.constexpr):
    """What dV, dQ and dK take."""
    k_desc, q_desc, grad_desc = descriptors
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    for t in range(begin, end):
        tile, span = walk.tile, walk.span
        for n in range(tile.q_end - tile.q_begin):
            q_place = query_place(walk, n, C)
            cells.grad_columns.load(grad_desc, q_place, turn)
            if n == 0:
                place = ragged_place(span.k_start, span.k_count, tile.kv_begin * KEYS, tile.head)
                cells.k_columns.load(k_desc, place, t - begin)
            cells.q_columns.load(q_desc, q_place, turn)
            turn += 1
        walk = walk.next(t)


@gluon.jit
def statistics_role(schedule, statistics, shifts, deltas, C: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0], [[0]])
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    for t in range(begin, end):
        tile = walk.tile
        for n in range(tile.q_end - tile.q_begin):
            row = walk.rows(n, C) * ROWS + gl.arange(0, ROWS, layout)
            shift, delta = statistics.load(tile.sequence, tile.head, walk.span, row, C)
            shifts.put(shift, turn)
            deltas.put(delta, turn)
            turn += 1
        walk = walk.next(t)


# -- products ----------------------------------------------------------------------------------------------------------


@aggregate
class Block:
    """A block of queries as the products see it."""

    turn: gl.tensor  # blocks before it
    number: gl.tensor  # tiles before its own
    first: gl.tensor  # of its tile
    last: gl.tensor


@gluon.jit
def multiply_piece(scores, wide, piece: gl.constexpr, rows, acc, use_acc):
    """What a piece of each compute role, in low precision, adds to dV or dK."""
    left, right = rows.slice(piece * HALF, PIECE), rows.slice(piece * HALF + PIECE, PIECE)
    tcgen05_mma(scores.low(wide, 0, piece), left, acc, use_acc=use_acc)
    tcgen05_mma(scores.low(wide, 1, piece), right, acc)


@gluon.jit
def issue_keys(block, cells, scores, sums):
    """dK of a block, from dS in tensor memory."""
    mbarrier.wait(scores.differed, block.turn & 1)
    q_columns = cells.q_columns.filled(block.turn)
    mbarrier.wait(sums.dk.empty, (block.number & 1) ^ 1)
    multiply_piece(scores, scores.dp, 0, q_columns, sums.dk.acc, block.first == 0)
    multiply_piece(scores, scores.dp, 1, q_columns, sums.dk.acc, True)


@gluon.jit
def issue_queries(block, cells, scores, sums, over):
    """dQ of a block, from the dS that the CTAs have exchanged; `over` half of the next S, if there is one."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(PIECE * 2, 16, 2, cga_layout=BY_COLUMNS)
    ds = reinterpret(scores.ds, scores.ds.dtype, [1, KEYS, ROWS], LAYOUT).index(opaque_zero(block.turn))
    mbarrier.expect(scores.exchanged, ds.nbytes_per_cta)
    mbarrier.wait(scores.exchanged, block.turn & 1)
    fence_async_shared()
    mbarrier.arrive(scores.received, count=1)
    mbarrier.wait(scores.received, block.turn & 1)
    k_columns = cells.k_columns.filled(block.number)
    mbarrier.wait(scores.read, (block.turn & 1) ^ 1, pred=over)
    tcgen05_mma(ds.permute((1, 0)), k_columns, sums.dq.acc, use_acc=False, mbarriers=[sums.dq.full])
    tcgen05_commit(cells.k_columns.empty, pred=block.last)


@gluon.jit
def mma_role(schedule, cells, scores, sums, C: gl.constexpr):
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    late = Block(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(False), gl.to_tensor(False))
    for t in range(begin, end):
        count = walk.tile.q_end - walk.tile.q_begin
        for n in range(count):
            block = Block(gl.to_tensor(turn), t - begin, n == 0, n + 1 == count)
            k_rows, q_rows = cells.k_rows.filled(block.number), cells.q_rows.filled(turn)
            mbarrier.wait(sums.dq.empty, turn & 1, pred=turn > 0)  # of the block before the last
            tcgen05_mma(k_rows, q_rows.permute((1, 0)), scores.s, use_acc=False, mbarriers=[scores.scored])
            tcgen05_commit(cells.k_rows.empty, pred=block.last)
            if turn > 0:
                issue_keys(late, cells, scores, sums)
                issue_queries(late, cells, scores, sums, True)
            v_rows, grad_rows = cells.v_rows.filled(block.number), cells.grad_rows.filled(turn)
            tcgen05_mma(v_rows, grad_rows.permute((1, 0)), scores.dp, use_acc=False, mbarriers=[scores.graded])
            tcgen05_commit(cells.v_rows.empty, pred=block.last)
            grad_columns = cells.grad_columns.filled(turn)
            mbarrier.wait(sums.dv.empty, (block.number & 1) ^ 1)
            mbarrier.wait(scores.weighted[0], turn & 1)
            multiply_piece(scores, scores.s, 0, grad_columns, sums.dv.acc, block.first == 0)
            mbarrier.wait(scores.weighted[1], turn & 1)
            multiply_piece(scores, scores.s, 1, grad_columns, sums.dv.acc, True)
            tcgen05_commit(sums.dv.full, pred=block.last)
            late = block
            turn += 1
        walk = walk.next(t)
    if begin < end:
        issue_keys(late, cells, scores, sums)
        mbarrier.wait(sums.dq.empty, turn & 1)
        issue_queries(late, cells, scores, sums, False)


# -- computing ---------------------------------------------------------------------------------------------------------


@gluon.jit
def weigh(s, part: gl.constexpr, piece: gl.constexpr, scores, shifts, scale_log2, limits, row):
    """P of a piece of S, published: fp32 [256, 32]."""
    at: gl.constexpr = piece * HALF + part * PIECE
    if limits is not None:
        s = limits.applied(s, row + at)
    shift = shifts.buffer.slice(at, PIECE).load(gl.SliceLayout(0, s.type.layout))
    p = gl.exp2(at_most(fma2(s, scale_log2, gl.expand_dims(shift, 0)), 0.0))
    target = scores.low(scores.s, part, piece)
    target.store(gl.convert_layout(p.to(target.dtype), target.get_reg_layout(), assert_trivial=True))
    mbarrier.arrive(scores.weighted[piece], count=1)
    return p


@gluon.jit
def write_weights(part: gl.constexpr, scores, shifts, scale_log2, limits, row, turn):
    """P of a role's part of a block whose first packed row is `row`, in pieces. No `limits`: all rows see all keys."""
    mbarrier.wait(shifts.full, turn & 1)
    mbarrier.wait(scores.scored, turn & 1)
    second = scores.piece(scores.s, part, 1).load()
    mbarrier.arrive(scores.read, count=1)
    first = scores.piece(scores.s, part, 0).load()
    weights = (
        weigh(first, part, 0, scores, shifts, scale_log2, limits, row),
        weigh(second, part, 1, scores, shifts, scale_log2, limits, row),
    )
    mbarrier.arrive(shifts.empty, count=1)
    return weights


@gluon.jit
def differ(p, dp, part: gl.constexpr, piece: gl.constexpr, scores, deltas):
    """dS of a piece of P and dP."""
    delta = deltas.buffer.slice(piece * HALF + part * PIECE, PIECE).load(gl.SliceLayout(0, dp.type.layout))
    ds = rounded(mul2(p, sub2(dp, gl.expand_dims(delta, 0))), scores.ds.dtype)
    target = scores.low(scores.dp, part, piece)
    target.store(gl.convert_layout(ds, target.get_reg_layout(), assert_trivial=True))
    return ds


@gluon.jit
def write_differences(part: gl.constexpr, weights, scores, deltas, turn):
    """dS of a role's part of a block, published."""
    mbarrier.wait(deltas.full, turn & 1)
    mbarrier.wait(scores.graded, turn & 1)
    first, second = scores.piece(scores.dp, part, 0).load(), scores.piece(scores.dp, part, 1).load()
    left = differ(weights[0], first, part, 0, scores, deltas)
    right = differ(weights[1], second, part, 1, scores, deltas)
    mbarrier.arrive(scores.differed, count=1)
    mbarrier.arrive(deltas.empty, count=1)
    async_store(scores.ds.index(part), joined(left, right), scores.exchanged)


@gluon.jit
def compute_role(part: gl.constexpr, schedule, scores, lines, scale, C: gl.constexpr):
    """`scale`: in log2 units, and the window."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, scores.s.slice(0, PIECE).get_reg_layout())
    scale_log2, window = scale
    shifts, deltas = lines
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    for t in range(begin, end):
        tile = walk.tile
        limits = None
        if C.left or C.right:
            limits = limits_of(tile.kv_begin, walk.span, window, LAYOUT, C)
        for n in range(tile.q_end - tile.q_begin):
            weights = write_weights(part, scores, shifts, scale_log2, limits, walk.rows(n, C) * ROWS, turn)
            write_differences(part, weights, scores, deltas, turn)
            turn += 1
        walk = walk.next(t)


# -- results -----------------------------------------------------------------------------------------------------------


@gluon.jit
def thread_halves(x):
    """[128, 128] of which a thread has 64 columns of a row, 0..63 or 64..127: two [128, 64] of the first and of the
    last 32 columns of each thread."""
    left, right = x.reshape([x.shape[0], 2, 2, 32]).permute(0, 1, 3, 2).split()
    return left.reshape([x.shape[0], HALF]), right.reshape([x.shape[0], HALF])


@gluon.jit
def add_piece(x, piece: gl.constexpr, desc, place, staging, pending: gl.constexpr):
    """Columns 32 * piece .. and 64 + 32 * piece .. of dQ, to be added to global memory."""
    PAIR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2, ROWS, 32], gl.float32, cga_layout=[[0, 1, 0]])
    tma.store_wait(pending)  # what was sent from it before has left
    both = reinterpret(staging, gl.float32, [2, 2, ROWS, 32], PAIR).index(piece)
    both.store(x.reshape([ROWS, 2, 32]).permute(1, 0, 2))
    fence_async_shared()
    r0, r1, r2, head, _ = place
    tma.async_atomic_add(desc, [r0, r1, r2, head, 32 * piece], staging.index(2 * piece))
    tma.async_atomic_add(desc, [r0, r1, r2, head, 64 + 32 * piece], staging.index(2 * piece + 1))


@gluon.jit
def add_queries(dq, turn, desc, place, staging):
    mbarrier.wait(dq.full, turn & 1)
    left, right = thread_halves(dq.acc.load())
    mbarrier.arrive(dq.empty, count=1)
    add_piece(left, 0, desc, place, staging, 1)
    add_piece(right, 1, desc, place, staging, 2)


@gluon.jit
def store_keys(out, number, desc, walk, staging, scale):
    """dV or dK of a tile."""
    COUNT: gl.constexpr = out.acc.shape[1] // HALF
    buffers = reinterpret(staging, desc.dtype, [2] + desc.block_shape, desc.layout)
    if out.full is not None:
        mbarrier.wait(out.full, number & 1)
    for i in gl.static_range(COUNT):
        x = out.acc.slice(i * HALF, HALF).load()
        if i + 1 == COUNT:
            mbarrier.arrive(out.empty, count=1)
        buffer = buffers.index(i % 2)
        tma.store_wait(1)
        matrix(buffer, BY_ROWS).store((x * scale).to(desc.dtype))
        fence_async_shared()
        span, tile = walk.span, walk.tile
        place = ragged_place(span.k_start, span.k_count, tile.kv_begin * KEYS, tile.head, i * HALF)
        tma.async_store(desc, place, buffer)


@gluon.jit
def reduce_role(schedule, descriptors, sums, staging, scale, C: gl.constexpr):
    dq_desc, dk_desc, dv_desc = descriptors
    walk, begin, end = start_key_walk(schedule, C)
    turn = 0
    for t in range(begin, end):
        last = walk.tile.q_end - walk.tile.q_begin - 1
        for n in range(last):
            add_queries(sums.dq, turn, dq_desc, query_place(walk, n, C), staging)
            turn += 1
        store_keys(sums.dv, t - begin, dv_desc, walk, staging, 1.0)
        add_queries(sums.dq, turn, dq_desc, query_place(walk, last, C), staging)
        turn += 1
        store_keys(sums.dk, t - begin, dk_desc, walk, staging, scale)
        walk = walk.next(t)
    tma.store_wait(0)


# -- entry -------------------------------------------------------------------------------------------------------------


@gluon.jit
def new_barrier(count: gl.constexpr, pair: gl.constexpr = False):
    """One barrier of each CTA, or one of the pair, on which `count` arrivals of each CTA are awaited."""
    barrier = mbarrier.allocate_mbarrier(two_ctas=pair)
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def make_cell(desc, split: gl.constexpr, empty, late: gl.constexpr = 0):
    buffer = gl.allocate_shared_memory(desc.dtype, [1] + desc.block_shape, desc.layout)
    return Cell(buffer, new_barrier(1, True), empty, split, late)


@gluon.jit
def make_line():
    return Line(gl.allocate_shared_memory(gl.float32, [ROWS], LINE), new_barrier(1), new_barrier(2))


@gluon.jit
def make_accumulator(columns: gl.constexpr):
    layout: gl.constexpr = TensorMemoryLayout([KEYS // 2, columns], 1, BY_ROWS, True)
    return allocate_tensor_memory(gl.float32, [KEYS, columns], layout)


@gluon.jit(do_not_specialize=["q_len", "stat_batch", "stat_row", "stat_head", "left", "right"])
def pair_kernel(
    k_rows,  # ragged descriptors of [tokens, Hkv, D], see shared.ragged: of blocks whose rows a pair shares
    k_columns,  # of blocks whose columns it shares
    v_rows,  # [tokens, Hkv, Dv]
    q_rows,  # [rows, Hq, D]
    q_columns,
    grad_rows,  # [rows, Hq, Dv]
    grad_columns,
    dk,  # in blocks of 64 columns
    dv,
    dq,  # fp32 [rows, Hq, D], zeros to be added to, in blocks of 32 columns
    lse,  # fp32 [B, Hq, Lq] or [rows, Hq]
    delta,
    stat_batch,
    stat_row,
    stat_head,  # strides of both
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
    dtype: gl.constexpr = q_rows.dtype
    scored, graded = new_barrier(1), new_barrier(1)
    cells = Cells(
        make_cell(k_rows, BY_ROWS, new_barrier(1)),
        make_cell(k_columns, BY_COLUMNS, new_barrier(1)),
        make_cell(v_rows, BY_ROWS, new_barrier(1)),
        make_cell(q_rows, BY_ROWS, scored),
        make_cell(q_columns, BY_COLUMNS, graded, 1),
        make_cell(grad_rows, BY_ROWS, graded),
        make_cell(grad_columns, BY_COLUMNS, scored, 1),
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], dtype, cga_layout=BY_COLUMNS)
    scores = Scores(
        make_accumulator(ROWS),
        make_accumulator(ROWS),
        gl.allocate_shared_memory(dtype, [2, KEYS, HALF], ds_layout),
        scored,
        (new_barrier(2, True), new_barrier(2, True)),
        graded,
        new_barrier(2, True),
        new_barrier(2, True),
        new_barrier(1),
        new_barrier(1, True),
    )
    dq_layout: gl.constexpr = TensorMemoryLayout([ROWS // 2, C.block_d], 1, BY_ROWS, True)
    halves = reinterpret(scores.s, gl.float32, [2, ROWS, C.block_d], dq_layout)
    sums = Sums(
        Sum(halves.index(1), new_barrier(1), new_barrier(1, True)),
        Sum(make_accumulator(C.block_dv), new_barrier(1), new_barrier(1, True)),
        Sum(make_accumulator(C.block_d), None, new_barrier(1, True)),
    )
    staging = gl.allocate_shared_memory(gl.float32, [4] + dq.block_shape, dq.layout)
    statistics = Statistics(lse, delta, stat_batch, stat_row, stat_head)
    shifts, deltas = make_line(), make_line()
    schedule = Schedule(tiles, worker_offsets, q_offsets, k_offsets, q_len, None)
    gl.warp_specialize(
        [
            (reduce_role, (schedule, (dq, dk, dv), sums, staging, scale, C)),
            (compute_role, (0, schedule, scores, (shifts, deltas), (scale_log2, (left, right)), C)),
            (compute_role, (1, schedule, scores, (shifts, deltas), (scale_log2, (left, right)), C)),
            (mma_role, (schedule, cells, scores, sums, C)),
            (load_rows_role, (schedule, (k_rows, v_rows, q_rows, grad_rows), cells, C)),
            (load_columns_role, (schedule, (k_columns, q_columns, grad_columns), cells, C)),
            (statistics_role, (schedule, statistics, shifts, deltas, C)),
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
