"""Forward: one program for each tile (sequence, key-value head, block of query rows), the longest tiles first.

The keys are walked in blocks with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Only blocks at the
edges of what is visible pay for a mask:

    kv blocks   | cut by the left limit | seen whole by every row of the tile | cut by the right limit or the end |
    loop        |       MASK=True       |             MASK=False              |             MASK=True             |
"""

import triton
import triton.language as tl

from jaggedtensor.kernels.shared.fill import fill_if_empty
from jaggedtensor.kernels.shared.masks import blocks_seen_by_all, visible
from jaggedtensor.kernels.shared.rows import (
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


@triton.jit(do_not_specialize=["q_len", "blind"])
def forward_kernel(
    q,  # operand of [Lq, Hq, D], [B, Lq, Hq, D] or [rows, Hq, D]
    k,  # operand of [rows, Hkv, D]
    v,  # operand of [rows, Hkv, Dv]
    out,  # operand of [B, Lq, Hq, Dv] or [rows, Hq, Dv]
    lse,  # operand of [B, Hq, Lq] or [rows, Hq], seen in the order of out
    schedule,  # (tiles, list of kv blocks or None)
    offsets,  # (q_offsets or None, k_offsets)
    q_len,  # Lq where there are no q_offsets
    scale_log2,  # |scale| * log2(e)
    window,  # (left, right)
    blind,  # how many sequences may be empty, whose results no tile is for; 0 if they are filled already
    C: tl.constexpr,  # attention_fwd.config.Config
):
    M: tl.constexpr = C.block_m
    DV: tl.constexpr = C.block_dv
    for sequence in range(tl.program_id(0), blind, tl.num_programs(0)):
        fill_if_empty(out.pointer, lse.pointer, offsets[1], sequence, out.batch, lse.batch, 1024)
    tile = load_tile(schedule[0], tl.program_id(0))
    if tile.sequence < 0:  # a surplus entry of the schedule: leave before any address is formed
        return
    queries = sequence_at(offsets[0], tile.sequence, q_len)
    keys = sequence_at(offsets[1], tile.sequence, 0)
    rows = query_rows(tile.q_begin, tile.head, queries.count, C)
    q_tile = load_rows(query_places(q, queries, rows, C.aligned), rows.inside, C.head_dim, C.block_d, True)  # [M, D]

    peak = tl.full([M], float("-inf"), tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    shift = keys.count - queries.count
    edge = (rows.i, shift, window)
    if schedule[1] is not None:
        rest = tile.kv_begin  # windows may cut any block
        if not C.left and not C.right:
            rest = tile.kv_end - 1  # in ascending order, the end of the sequence cuts the last one
            peak, norm, acc = attend(
                peak, norm, acc, q_tile, k, v, keys, tile.head, tile.kv_begin, rest, schedule[1], edge, scale_log2, C,
                False,
            )  # fmt: skip
        peak, norm, acc = attend(
            peak, norm, acc, q_tile, k, v, keys, tile.head, rest, tile.kv_end, schedule[1], edge, scale_log2, C, True
        )
    else:
        first, last = query_span(tile.q_begin, queries.count, C)
        whole, rest = blocks_seen_by_all(first, last, keys.count, shift, window, tile.kv_begin, tile.kv_end, C)
        if C.left:
            peak, norm, acc = attend(
                peak, norm, acc, q_tile, k, v, keys, tile.head, tile.kv_begin, whole, None, edge, scale_log2, C, True
            )
        peak, norm, acc = attend(
            peak, norm, acc, q_tile, k, v, keys, tile.head, whole, rest, None, edge, scale_log2, C, False
        )
        peak, norm, acc = attend(
            peak, norm, acc, q_tile, k, v, keys, tile.head, rest, tile.kv_end, None, edge, scale_log2, C, True
        )

    some = norm > 0
    norm = tl.where(some, norm, 1.0)
    store_rows(query_places(out, queries, rows, C.aligned), acc / norm[:, None], rows.inside, C.value_dim, C.block_dv)
    natural = (peak * scale_log2 + tl.log2(norm)) * 0.6931471805599453
    tl.store(query_places(lse, queries, rows), tl.where(some, natural, float("-inf")), mask=rows.inside)


@triton.jit
def attend(
    peak,  # [M]: largest raw score so far
    norm,  # [M]: sum of exponentials so far
    acc,  # [M, Dv]
    q_tile,  # [M, D]
    k,
    v,
    keys,
    head,
    begin,
    end,
    listed,  # the schedule's list of blocks, or None: blocks begin..end-1 themselves
    edge,  # (i, shift, window)
    scale_log2,
    C: tl.constexpr,
    MASK: tl.constexpr,
):
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    for n in range(begin, end):
        j = block_at(listed, n, end) * C.block_n + tl.arange(0, C.block_n)
        here = j < keys.count
        k_tile = load_rows(key_places(k, keys, head, j, C.aligned), here, C.head_dim, C.block_d, MASK)  # [N, D]
        score = product(q_tile, k_tile.T, tl.zeros([M, N], tl.float32), C)
        if C.flip:
            score = -score
        if MASK:
            seen = here[None, :] & visible(edge[0][:, None], j[None, :], edge[1], edge[2], C)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = higher
        if MASK:
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet
        # Subtract the unscaled maximum, then scale: a fused multiply-add would keep the product exact beside a rounded
        # maximum, and overflow for large scores.
        p = tl.exp2((score - base[:, None]) * scale_log2)
        if MASK:
            p = tl.where(seen, p, 0.0)
        fade = tl.where(peak == float("-inf"), 0.0, tl.exp2((peak - base) * scale_log2))
        norm = norm * fade + tl.sum(p, 1)
        v_tile = load_rows(key_places(v, keys, head, j, C.aligned), here, C.value_dim, C.block_dv, MASK)  # [N, Dv]
        acc = product(p.to(v_tile.dtype), v_tile, acc * fade[:, None], C)
        peak = higher
    return peak, norm, acc
