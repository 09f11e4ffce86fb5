"""Backward. With S = scale * Q K^T, P = exp(S - lse), dP = dO V^T and delta = rowsum(O dO) - dlse:

    dV = P^T dO        dS = P (dP - delta)        dK = scale * dS^T Q        dQ = scale * dS K

(Dao et al. 2022, appendix B.4; the gradient of lse enters through delta.) Three ways to share the work:

    keys_kernel       stays on a block of keys, walks the query rows            -> dK, dV
    queries_kernel    stays on a block of query rows, walks the keys            -> dQ
    broadcast_kernel  stays on the one query of the batch, walks the keys of all sequences; each block of keys is met
                      once, so its dK and dV are finished on the way            -> dK, dV and a share of dQ

A longer broadcast query is served in parts, a launch for each: the first stores dK and dV, the others add to them.

Shares of a broadcast query's dQ are stored one per worker and summed in the order of workers: same bits every time.

A row that sees no key has lse = -inf; loading it as +inf makes its probabilities 0. Keys past the end of a sequence are
zeros: they add nothing to dQ as long as dS is finite, and their own rows of dK and dV are not stored.
"""

import triton
import triton.language as tl

from jaggedtensor.kernels.shared.masks import blocks_seen_by_all, blocks_that_see_all, visible
from jaggedtensor.kernels.shared.rows import (
    QueryRows,
    Sequence,
    key_places,
    load_rows,
    product,
    query_places,
    query_rows,
    query_span,
    sequence_at,
    store_rows,
)
from jaggedtensor.kernels.shared.tiles import block_at, load_tile


@triton.jit(do_not_specialize=["total", "inner"])
def delta_kernel(
    out,  # operands of [B, Lq, Hq, Dv] or [rows, Hq, Dv]
    grad_out,
    grad_lse,  # operand, or None
    delta,
    total,  # rows in all
    inner,  # rows of one batch entry
    C: tl.constexpr,
):
    """delta = rowsum(out * grad_out) - grad_lse, for each query row and head."""
    row = tl.program_id(0).to(tl.int64) * C.block_m + tl.arange(0, C.block_m)
    head = tl.program_id(1)
    inside = row < total
    number, i = row // inner, row % inner
    rows = QueryRows(i, head, inside)
    sequence = Sequence(number, 0, inner)
    o = load_rows(query_places(out, sequence, rows, C.aligned), inside, C.value_dim, C.block_dv, True)
    do = load_rows(query_places(grad_out, sequence, rows, C.aligned), inside, C.value_dim, C.block_dv, True)
    result = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        result -= tl.load(query_places(grad_lse, sequence, rows), mask=inside, other=0.0)
    tl.store(query_places(delta, sequence, rows), result, mask=inside)


@triton.jit
def load_statistics(statistics, sequence, rows):
    """lse in log2 units and delta; +inf and 0 where a row sees nothing, whatever its gradients are, or is not there."""
    lse = tl.load(query_places(statistics[0], sequence, rows), mask=rows.inside, other=float("-inf"))
    delta = tl.load(query_places(statistics[1], sequence, rows), mask=rows.inside, other=0.0)
    blind = lse == float("-inf")
    return tl.where(blind, float("inf"), lse) * 1.4426950408889634, tl.where(blind, 0.0, delta)


@triton.jit
def probabilities(score, lse, scale_log2, C: tl.constexpr):
    """exp(S - lse) of raw scores; at most 1, so that what stands outside of a sequence cannot overflow."""
    if C.flip:
        score = -score
    return tl.exp2(tl.minimum(score * scale_log2 - lse, 0.0))


@triton.jit(do_not_specialize=["q_len"])
def keys_kernel(
    q,
    k,
    v,
    grad_out,
    statistics,  # (lse, delta)
    dk,
    dv,
    schedule,  # (tiles, list of q blocks or None): a tile stays on a kv block and walks blocks of query rows
    offsets,
    q_len,
    scales,  # (|scale| * log2(e), scale)
    window,
    C: tl.constexpr,
):
    """dK and dV of one block of keys."""
    N: tl.constexpr = C.block_n
    D: tl.constexpr = C.block_d
    DV: tl.constexpr = C.block_dv
    tile = load_tile(schedule[0], tl.program_id(0))
    if tile.sequence < 0:
        return
    queries = sequence_at(offsets[0], tile.sequence, q_len)
    keys = sequence_at(offsets[1], tile.sequence, 0)
    j = tile.kv_begin * C.block_n + tl.arange(0, C.block_n)
    here = j < keys.count
    k_tile = load_rows(key_places(k, keys, tile.head, j, C.aligned), here, C.head_dim, C.block_d, True)  # [N, D]
    v_tile = load_rows(key_places(v, keys, tile.head, j, C.aligned), here, C.value_dim, C.block_dv, True)  # [N, Dv]
    dk_tile = tl.zeros([N, D], tl.float32)
    dv_tile = tl.zeros([N, DV], tl.float32)

    shift = keys.count - queries.count
    edge = (j, shift, window)
    source = (q, grad_out, statistics, queries)
    listed = schedule[1]
    if not C.left and not C.right:
        dk_tile, dv_tile = walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, source, tile.head, tile.q_begin, tile.q_end, listed, edge, scales[0], C,
            False,
        )  # fmt: skip
    elif listed is not None:  # windows may cut any block
        dk_tile, dv_tile = walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, source, tile.head, tile.q_begin, tile.q_end, listed, edge, scales[0], C,
            True,
        )  # fmt: skip
    else:
        last = tl.minimum((tile.kv_begin + 1) * C.block_n, keys.count) - 1
        whole, rest = blocks_that_see_all(
            tile.kv_begin * C.block_n, last, queries.count, shift, window, tile.q_begin, tile.q_end, C
        )
        dk_tile, dv_tile = walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, source, tile.head, tile.q_begin, whole, None, edge, scales[0], C, True
        )
        dk_tile, dv_tile = walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, source, tile.head, whole, rest, None, edge, scales[0], C, False
        )
        dk_tile, dv_tile = walk_queries(
            dk_tile, dv_tile, k_tile, v_tile, source, tile.head, rest, tile.q_end, None, edge, scales[0], C, True
        )
    if dk is not None:
        store_rows(key_places(dk, keys, tile.head, j, C.aligned), dk_tile * scales[1], here, C.head_dim, C.block_d)
    if dv is not None:
        store_rows(key_places(dv, keys, tile.head, j, C.aligned), dv_tile, here, C.value_dim, C.block_dv)


@triton.jit
def walk_queries(
    dk_tile, dv_tile, k_tile, v_tile, source, head, begin, end, listed, edge, scale_log2, C: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    # Turned outside of the loop: in it, Triton 3.9 keeps both in registers and writes them to shared memory every time.
    k_turned, v_turned = k_tile.T, v_tile.T
    first = block_at(listed, begin, end)
    lse, delta = load_statistics(source[2], source[3], query_rows(first, head, source[3].count, C))
    for n in range(begin, end):
        rows = query_rows(block_at(listed, n, end), head, source[3].count, C)
        q_tile = load_rows(
            query_places(source[0], source[3], rows, C.aligned), rows.inside, C.head_dim, C.block_d, True
        )
        do_tile = load_rows(
            query_places(source[1], source[3], rows, C.aligned), rows.inside, C.value_dim, C.block_dv, True
        )
        score = product(q_tile, k_turned, tl.zeros([M, N], tl.float32), C)
        # Asked for a turn ahead: these loads feed no product, so Triton does not pipeline them by itself.
        next_rows = query_rows(block_at(listed, n + 1, end), head, source[3].count, C)
        next_lse, next_delta = load_statistics(source[2], source[3], next_rows)
        p = probabilities(score, lse[:, None], scale_log2, C)  # [M, N]: statistics of rows take few registers
        if MASK:
            p = tl.where(visible(rows.i[:, None], edge[0][None, :], edge[1], edge[2], C), p, 0.0)
        dv_tile = product(p.to(do_tile.dtype).T, do_tile, dv_tile, C)
        dp = product(do_tile, v_turned, tl.zeros([M, N], tl.float32), C)
        ds = p * (dp - delta[:, None])
        dk_tile = product(ds.to(q_tile.dtype).T, q_tile, dk_tile, C)
        lse, delta = next_lse, next_delta
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["q_len"])
def queries_kernel(
    q,
    k,
    v,
    grad_out,
    statistics,
    dq,  # operand like q, or for a broadcast query the shares, fp32 [workers, M, D]
    schedule,  # (tiles, worker_offsets or None: one tile for each program, list of kv blocks or None)
    offsets,
    q_len,
    scales,
    window,
    C: tl.constexpr,
):
    """dQ of one block of query rows: of one sequence, or a worker's share of a broadcast query's."""
    M: tl.constexpr = C.block_m
    D: tl.constexpr = C.block_d
    worker = tl.program_id(0)
    dq_tile = tl.zeros([M, D], tl.float32)
    if schedule[1] is None:
        tile = load_tile(schedule[0], worker)
        if tile.sequence < 0:
            return
        queries = sequence_at(offsets[0], tile.sequence, q_len)
        rows = query_rows(tile.q_begin, tile.head, queries.count, C)
        dq_tile = walk_keys(
            dq_tile, q, k, v, grad_out, statistics, tile.sequence, tile.q_begin, tile.head, tile.kv_begin, tile.kv_end,
            schedule[2], offsets, q_len, scales[0], window, C,
        )  # fmt: skip
        store_rows(query_places(dq, queries, rows, C.aligned), dq_tile * scales[1], rows.inside, C.head_dim, C.block_d)
    else:
        for t in range(tl.load(schedule[1] + worker), tl.load(schedule[1] + worker + 1)):
            tile = load_tile(schedule[0], t)
            # A line of the schedule is a pair (head, block of query rows); a worker stays on one. Listed tiles are of
            # all blocks of the query, of which the others' are passed over.
            block = tile.head % C.q_blocks
            mine = True
            if schedule[2] is not None:
                mine = tile.q_begin == block
            if mine:
                dq_tile = walk_keys(
                    dq_tile, q, k, v, grad_out, statistics, tile.sequence, block, tile.head // C.q_blocks,
                    tile.kv_begin, tile.kv_end, schedule[2], offsets, q_len, scales[0], window, C,
                )  # fmt: skip
        store_share(dq, worker, dq_tile * scales[1], C)


@triton.jit
def walk_keys(
    dq_tile, q, k, v, grad_out, statistics, sequence, block, head, begin, end, listed, offsets, q_len, scale_log2,
    window, C: tl.constexpr,
):  # fmt: skip
    """dQ of one block of query rows from kv blocks begin..end-1 of one sequence, or those listed there."""
    queries = sequence_at(offsets[0], sequence, q_len)
    keys = sequence_at(offsets[1], sequence, 0)
    rows = query_rows(block, head, queries.count, C)
    q_tile = load_rows(query_places(q, queries, rows, C.aligned), rows.inside, C.head_dim, C.block_d, True)  # [M, D]
    do_tile = load_rows(
        query_places(grad_out, queries, rows, C.aligned), rows.inside, C.value_dim, C.block_dv, True
    )  # [M, Dv]
    lse, delta = load_statistics(statistics, queries, rows)
    shift = keys.count - queries.count
    edge = (rows.i, shift, window)
    fixed = (q_tile, do_tile, lse, delta)
    if listed is not None:  # any may be cut; a loop of its own for those that are not would cost registers
        dq_tile = add_keys(dq_tile, fixed, k, v, keys, head, begin, end, listed, edge, scale_log2, C, True)
    else:
        first, last = query_span(block, queries.count, C)
        whole, rest = blocks_seen_by_all(first, last, keys.count, shift, window, begin, end, C)
        if C.left:
            dq_tile = add_keys(dq_tile, fixed, k, v, keys, head, begin, whole, None, edge, scale_log2, C, True)
        dq_tile = add_keys(dq_tile, fixed, k, v, keys, head, whole, rest, None, edge, scale_log2, C, False)
        dq_tile = add_keys(dq_tile, fixed, k, v, keys, head, rest, end, None, edge, scale_log2, C, True)
    return dq_tile


@triton.jit
def add_keys(
    dq_tile, fixed, k, v, keys, head, begin, end, listed, edge, scale_log2, C: tl.constexpr, MASK: tl.constexpr
):
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    for n in range(begin, end):
        j = block_at(listed, n, end) * C.block_n + tl.arange(0, C.block_n)
        here = j < keys.count
        k_tile = load_rows(key_places(k, keys, head, j, C.aligned), here, C.head_dim, C.block_d, MASK)  # [N, D]
        v_tile = load_rows(key_places(v, keys, head, j, C.aligned), here, C.value_dim, C.block_dv, MASK)  # [N, Dv]
        score = product(fixed[0], k_tile.T, tl.zeros([M, N], tl.float32), C)  # [M, N]
        p = probabilities(score, fixed[2][:, None], scale_log2, C)
        if MASK:
            seen = here[None, :]
            if C.left or C.right:
                seen = seen & visible(edge[0][:, None], j[None, :], edge[1], edge[2], C)
            p = tl.where(seen, p, 0.0)
        dp = product(fixed[1], v_tile.T, tl.zeros([M, N], tl.float32), C)
        ds = p * (dp - fixed[3][:, None])
        dq_tile = product(ds.to(k_tile.dtype), k_tile, dq_tile, C)
    return dq_tile


@triton.jit(do_not_specialize=["q_len", "part"])
def broadcast_kernel(
    q,
    k,
    v,
    grad_out,
    statistics,
    dk,
    dv,
    dq,  # shares, fp32 [lines * workers, M, D]: a line is a pair (head, part)
    schedule,  # (tiles, worker_offsets): equal ranges of the kv blocks of one head, over all sequences
    k_offsets,
    q_len,
    scales,
    window,
    part,  # which M rows of the query
    C: tl.constexpr,
    ADD: tl.constexpr,  # to dK and dV, where earlier parts have left theirs
):
    """dK, dV and a share of dQ; the query and dQ stay on chip for the life of the program."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    D: tl.constexpr = C.block_d
    worker = tl.program_id(0)
    head = worker // C.workers
    rows = query_rows(part, head, q_len, C)
    q_tile = load_rows(
        query_places(q, Sequence(worker * 0, 0, q_len), rows, C.aligned), rows.inside, C.head_dim, C.block_d, True
    )
    dq_tile = tl.zeros([M, D], tl.float32)
    # If late, dK waits for the next block's scores, so that nobody waits for its product. It goes on from sequence to
    # sequence: if each began with zeros, ptxas would move registers of a product at work, and serialise all products.
    LATE: tl.constexpr = C.late and not ADD
    last = Sequence(worker * 0, (worker * 0).to(tl.int64), worker * 0)
    dk_tile = tl.zeros([N, D], tl.float32)
    for t in range(tl.load(schedule[1] + worker), tl.load(schedule[1] + worker + 1)):
        tile = load_tile(schedule[0], t)
        queries = sequence_at(None, tile.sequence, q_len)
        keys = sequence_at(k_offsets, tile.sequence, 0)
        do_tile = load_rows(
            query_places(grad_out, queries, rows, C.aligned), rows.inside, C.value_dim, C.block_dv, True
        )
        lse, delta = load_statistics(statistics, queries, rows)
        for block in range(tile.kv_begin, tile.kv_end):
            j = block * C.block_n + tl.arange(0, C.block_n)
            here = j < keys.count
            k_tile = load_rows(key_places(k, keys, head, j, C.aligned), here, C.head_dim, C.block_d, True)  # [N, D]
            v_tile = load_rows(key_places(v, keys, head, j, C.aligned), here, C.value_dim, C.block_dv, True)  # [N, Dv]
            score = product(q_tile, k_tile.T, tl.zeros([M, N], tl.float32), C)
            if LATE:
                put_sums(dk, last, 0, head, dk_tile * scales[1], C.head_dim, C.block_d, C, ADD)
            p = probabilities(score, lse[:, None], scales[0], C)  # [M, N]: statistics of rows take few registers
            if C.left or C.right:
                p = tl.where(visible(rows.i[:, None], j[None, :], keys.count - q_len, window, C), p, 0.0)
            if q_tile.dtype == tl.float16:  # else -delta of a key past the end may overflow, and inf * 0 is NaN
                p = tl.where(here[None, :], p, 0.0)
            present, number = keys, block
            if LATE:
                present, number = block_of_keys(keys, block, C), 0
            if dv is not None:
                dv_tile = over_rows(p.to(do_tile.dtype), do_tile, C)
                put_sums(dv, present, number, head, dv_tile, C.value_dim, C.block_dv, C, ADD)
            dp = product(do_tile, v_tile.T, tl.zeros([M, N], tl.float32), C)
            ds = (p * (dp - delta[:, None])).to(q_tile.dtype)
            if dk is not None:
                dk_tile = over_rows(ds, q_tile, C)
                if not LATE:
                    put_sums(dk, present, number, head, dk_tile * scales[1], C.head_dim, C.block_d, C, ADD)
            if dq is not None:
                dq_tile = product(ds, k_tile, dq_tile, C)
            if LATE:
                last = present
    if LATE:
        put_sums(dk, last, 0, head, dk_tile * scales[1], C.head_dim, C.block_d, C, ADD)
    if dq is not None:
        line = head * C.q_blocks + part
        store_share(dq, line * C.workers + worker % C.workers, dq_tile * scales[1], C)


@triton.jit
def over_rows(scores, rows, C: tl.constexpr):
    """scores^T rows: [N, columns] of [M, N] and [M, columns]. If turned, as (rows^T scores)^T: rows of the product are
    then the columns, which are many, and not the keys, which are too few for Hopper's instruction."""
    if C.turned:
        return product(rows.T, scores, tl.zeros([rows.shape[1], scores.shape[1]], tl.float32), C).T
    else:
        return product(scores.T, rows, tl.zeros([scores.shape[1], rows.shape[1]], tl.float32), C)


@triton.jit
def block_of_keys(keys, block, C: tl.constexpr):
    """The keys of one block of a sequence, as if they were a sequence."""
    first = block * C.block_n
    return Sequence(keys.number, keys.start + first, tl.minimum(keys.count - first, C.block_n))


@triton.jit
def put_sums(
    operand, keys, block, head, sums, WIDTH: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, ADD: tl.constexpr
):
    """Stores [rows, BLOCK] of dK or dV, or adds it to what is stored, in its dtype; nothing if nobody needs it.

    As nobody else writes there, memory may do the adding when it likes: to load would cost registers and a wait.
    """
    if operand is not None:
        j = block * C.block_n + tl.arange(0, C.block_n)
        here = j < keys.count
        places = key_places(operand, keys, head, j, C.aligned)
        if not ADD:
            store_rows(places, sums, here, WIDTH, BLOCK)
        elif C.reduces:
            column = tl.arange(0, BLOCK)
            mask = here[:, None] & (column < WIDTH)[None, :]
            tl.atomic_add(places[:, None] + column[None, :], sums.to(places.dtype.element_ty), mask=mask, sem="relaxed")
        else:
            store_rows(places, sums + load_rows(places, here, WIDTH, BLOCK, True), here, WIDTH, BLOCK)


@triton.jit
def store_share(dq, worker, dq_tile, C: tl.constexpr):
    """A worker's share of a broadcast query's gradient, rows past the end included."""
    row = tl.arange(0, C.block_m)
    places = dq.pointer + worker.to(tl.int64) * dq.batch + row * dq.row
    store_rows(places, dq_tile, row >= 0, C.head_dim, C.block_d)
