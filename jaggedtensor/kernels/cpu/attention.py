"""Attention of packed sequences on the CPU, forward and backward, in plain torch operations.

A long sequence goes alone, as a view of its packed rows. Short ones of similar lengths are gathered into groups, so
that ten thousand tiny sequences are a few hundred matrix products and not ten thousand calls. All kinds of query take
the same path: `Batch` says which rows go together, `One` and `Many` read and write them, and here is what is done with
them.

Shape tags: B sequences, G sequences of a group, H heads of the keys, g query heads that share one of them, m queries,
M = g m rows of queries, L keys, D features of a key, E features of a value. N is the number of different sets of
queries in a group: 1 where its sequences share the query, else G.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.kernels.cpu.batch import Batch, Block, Group
from jaggedtensor.kernels.cpu.rows import Many, One, finished

# What scaled_dot_product_attention calls on a CPU; it gives lse too, and reads strided rows where they lie.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output, and the natural logarithm of the sum of the exponentials of the scaled scores.

    q is (m, Hq, D) shared by all sequences, (B, m, Hq, D), or with `q_offsets` (rows, Hq, D); k is (rows, H, D) and v
    is (rows, H, E). Query i sees key j when i + L - m - left <= j <= i + L - m + right; -1 is no limit. Returns out,
    (B, m, Hq, E) or (rows, Hq, E), and lse, (B, Hq, m) or (rows, Hq), which are 0 and -inf where a query sees no key.
    `mask` is a block mask, (B or 1, blocks of queries, blocks of keys).

    Raises:
        ValueError: offsets that do not start at 0, decrease, leave the rows, or are of two batch sizes; a mask with too
            few blocks.
    """
    batch = Batch(q, k, v, q_offsets, k_offsets, left, right, mask)
    shape = (len(k_offsets) - 1,) * batch.shared + q.shape[:-1]
    wide = _wide(q.dtype)
    out, lse = batch.new_results(v.shape[2], q.dtype), batch.new_results(1, wide, -math.inf)
    queries, packed_k, packed_v = _Queries(batch, q, scale), batch.keys(k), batch.keys(v)
    packed_out, packed_lse = batch.results(out), batch.results(lse)
    for group in batch.groups():
        keys, values = group.keys.take(packed_k, wide), group.keys.take(packed_v, wide)
        for block in group.blocks:
            rows, results = group.rows(block)
            query, seen = queries.take(group, rows), _seen(values, block)
            if _is_plain(query, seen, group):
                some_out, some_lse = _flash(query[None], keys[None], seen[None], scale=1.0)  # (1, H, M, E), (1, H, M)
                results.put(packed_out, some_out[0])
                results.put(packed_lse, some_lse[0, :, :, None])
                continue
            s, p = _probabilities(query, _seen(keys, block), batch, group, block)
            results.put(packed_out, torch.bmm(p.mT, seen))
            room = results.room(packed_lse, wide)
            torch.sub(s.amax(1), p.amax(1).log_(), out=room.squeeze(2))
            if group.blind_rows:
                room.masked_fill_(_blind(p).mT, -math.inf)
            results.put(packed_lse, room)
    out = finished(out, batch.result_rows, batch.num_queries, 0).view(*shape, v.shape[2])
    lse = finished(lse, batch.result_rows, batch.num_queries, -math.inf).view(shape)
    return out, lse if batch.jagged else lse.transpose(1, 2).contiguous()


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    mask: Tensor | None = None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, those that `needs` asks for, from the gradients of both results of `forward`.

    Probabilities are worked out anew from whole rows of scores. That is as fast as from `lse`, and their sum is 1 even
    where scores are so large that `lse` has no digits left for it; `out` and `lse` are not read.
    """
    batch = Batch(q, k, v, q_offsets, k_offsets, left, right, mask)
    wide = _wide(q.dtype)
    queries, packed_k, packed_v = _Queries(batch, q, scale), batch.keys(k), batch.keys(v)
    packed_grad_out, packed_grad_lse = batch.results(grad_out), None
    if grad_lse is not None:
        packed_grad_lse = batch.results((grad_lse if batch.jagged else grad_lse.transpose(1, 2)).unsqueeze(-1))
    dq = _QueryGradient(batch, q, scale) if needs[0] else None
    dk, dv = (_KeyGradient(batch, x) if need else None for x, need in zip((k, v), needs[1:], strict=True))
    for group in batch.groups():
        keys, values = group.keys.take(packed_k, wide), group.keys.take(packed_v, wide)
        for block in group.blocks:
            rows, results = group.rows(block)
            query, seen = queries.take(group, rows), _seen(keys, block)
            _, p = _probabilities(query, seen, batch, group, block)
            grads = results.take(packed_grad_out, wide, repeat=False)
            if dv is not None:
                dv.add(group, block, p, grads)
            if dq is None and dk is None:
                continue
            lse_grads = None
            if packed_grad_lse is not None:
                lse_grads = results.take(packed_grad_lse, wide, repeat=False)
                if group.blind_rows:
                    lse_grads = lse_grads.masked_fill(_blind(p).mT, 0)
            ds = _fold(_score_gradients(p, _seen(values, block), grads, lse_grads), query)  # (H N, L G / N, M)
            if dk is not None:
                dk.add(group, block, ds, query)
            if dq is not None:
                dq.add(rows, ds.mT, _fold(seen, query))
    return tuple(None if gradient is None else gradient.finished() for gradient in (dq, dk, dv))


class _Queries:
    """Scaled queries of each block. Groups that share a query come one after the other, so the last one is kept."""

    def __init__(self, batch: Batch, q: Tensor, scale: float):
        self.packed, self.shared, self.scale = batch.queries(q), batch.shared, scale
        self.wide, self.last, self.query = _wide(q.dtype), None, None

    def take(self, group: Group, rows: One | Many) -> Tensor:
        """(H N, M, D)"""
        if not self.shared:
            return rows.take(self.packed, self.wide) * self.scale
        if self.last != (rows.start, rows.length, rows.heads):
            self.last = rows.start, rows.length, rows.heads
            self.query = rows.take(self.packed, self.wide) * self.scale
        count = group.keys.count
        if count == 1 or _keys_lead(self.query):
            return self.query
        return self.query[:, None].expand(-1, count, -1, -1).flatten(0, 1)  # to be multiplied sequence by sequence


class _QueryGradient:
    """A shared query's gradient is a sum over the batch, which is rounded in the end."""

    def __init__(self, batch: Batch, q: Tensor, scale: float):
        self.batch, self.like, self.scale = batch, q, scale
        if batch.shared:
            m, heads, features = q.shape  # heads first in memory too: products are added to all of them at once
            self.rows = torch.zeros(heads, m, features, dtype=_wide(q.dtype)).transpose(0, 1)
        else:
            self.rows = batch.new_results(q.shape[-1], q.dtype)
        self.packed = batch.queries(self.rows)

    def add(self, rows: One | Many, a: Tensor, b: Tensor) -> None:
        """The product of a, (H N, M, L G / N), and b, (H N, L G / N, D)."""
        if self.batch.shared:
            rows.add_product(self.packed, a, b, self.scale)
        else:
            rows.put(self.packed, torch.bmm(a, b).mul_(self.scale))

    def finished(self) -> Tensor:
        if self.batch.shared:
            return self.rows.to(self.like.dtype).contiguous()
        return finished(self.rows, self.batch.result_rows, self.batch.num_queries, 0).view(self.like.shape)


class _KeyGradient:
    """Gradient of keys or of values: a sum over the blocks of a sequence, which is rounded in the end."""

    def __init__(self, batch: Batch, like: Tensor):
        self.batch, self.length = batch, len(like)
        self.rows = batch.new_keys(like)
        self.packed = batch.keys(self.rows)

    def add(self, group: Group, block: Block, a: Tensor, b: Tensor) -> None:
        """The product of a, (H N, L G / N, M), and b, (H N, M, D)."""
        if block is group.blocks[0]:
            self.total = group.keys.room(self.packed, b.dtype)  # (H G, L, D)
            if block.keys is not None:
                self.total.zero_()
        if block.keys is None:
            torch.bmm(a, b, out=_fold(self.total, b))
        else:
            self.total[:, block.keys].baddbmm_(a, b)
        if block is group.blocks[-1]:
            group.keys.put(self.packed, self.total)

    def finished(self) -> Tensor:
        return finished(self.rows, self.length, self.batch.num_keys, 0)


def _is_plain(q: Tensor, v: Tensor, group: Group) -> bool:
    """Whether every query of a sequence that goes alone sees every key."""
    return group.keys.count == 1 and not group.hides and q.shape[2] == v.shape[2]


def _probabilities(q: Tensor, k: Tensor, batch: Batch, group: Group, block: Block) -> tuple[Tensor, Tensor]:
    """q (H N, M, D), scaled, and k (H G, L, D) -> scores and their softmax over the visible keys, (H G, L, M) both."""
    s = _product(_fold(k, q), q)  # (H N, L G / N, M)
    if s.shape[0] < k.shape[0]:
        s = s.view(k.shape[0], -1, s.shape[2])
    if group.hides:
        batch.hide(s.mT, group, block)
    p = torch.softmax(s, 1) if _keys_lead(q) else torch.softmax(s.mT, 2).mT
    if group.blind_rows:
        p.masked_fill_(s.amax(1, keepdim=True) == -math.inf, 0)
    return s, p


def _blind(p: Tensor) -> Tensor:
    """p (H G, L, M) -> (H G, 1, M): queries that see no key. The others' largest probability is at least 1 / L."""
    return p.amax(1, keepdim=True) == 0


def _score_gradients(p: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """p (H G, L, M), v (H G, L, E), grad_out (H G, M, E) and grad_lse (H G, M, 1) -> (H G, L, M)."""
    ds = _product(v, grad_out).mul_(p)
    delta = ds.sum(1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.mT
    return ds.addcmul_(p, delta, value=-1)


def _product(k: Tensor, q: Tensor) -> Tensor:
    """(.., L, D), (.., M, D) -> (.., L, M)"""
    return torch.bmm(k, q.mT) if _keys_lead(q) else torch.bmm(q, k.mT).mT


def _keys_lead(q: Tensor) -> bool:
    """Whether scores lie in memory as (L, M): faster products, but torch's reductions then want M in full vectors."""
    return q.shape[1] % 32 == 0


def _fold(x: Tensor, q: Tensor) -> Tensor:
    """(H G, L, ..) -> (H N, L G / N, ..): what meets one set of queries, q (H N, M, D), as one matrix."""
    return x if x.shape[0] == q.shape[0] else x.view(q.shape[0], -1, x.shape[2])


def _seen(keys: Tensor, block: Block) -> Tensor:
    return keys if block.keys is None else keys[:, block.keys]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
