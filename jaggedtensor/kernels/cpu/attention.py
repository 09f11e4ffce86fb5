"""Attention of packed sequences on the CPU, forward and backward, in plain torch operations.

A long sequence goes alone, as a view of its packed rows. Short ones of similar lengths are gathered into groups, so that
ten thousand tiny sequences are a few dozen batched matrix products, not ten thousand calls. All kinds of query take the
same path: `_Batch` says which rows go together, `_scores` to `_gradients` are the mathematics of one block.

Sizes in shape tags: B sequences, G sequences of a group, H heads of the keys, g query heads that share one of them,
m queries, M = g m rows of queries, L keys, D features of a key, E features of a value. N is the number of different sets
of queries in a group: 1 where its sequences share the query, else G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements that the scores of one block may hold, and the gathered rows of one group
ALONE = 100_000  # multiply-adds per feature from which a sequence is worth calls of its own
SPLIT = 128  # queries per block where a block need not see every key
ALL = slice(None)


@dataclass(frozen=True)
class _Rows:
    """Rows of `count` sequences as a grid of `length` each; a shorter sequence repeats its last row."""

    count: int
    length: int
    source: slice | Tensor  # rows to read, (G n,)
    target: slice | Tensor  # rows to write: `source`, but repeated rows go to the row after the last token
    repeated: Tensor | None  # (G, n), None if no row is
    heads: slice

    @classmethod
    def of_one(cls, start: int, length: int, heads: slice) -> _Rows:
        rows = slice(start, start + length)
        return cls(1, length, rows, rows, None, heads)

    @classmethod
    def of_many(cls, starts: Tensor, lengths: Tensor, total: int) -> _Rows:
        place, last = torch.arange(int(lengths.max())), lengths[:, None] - 1
        source = starts[:, None] + torch.minimum(place, last)
        repeated = place > last
        target = source.masked_fill(repeated, total)
        return cls(*source.shape, source.flatten(), target.flatten(), repeated if repeated.any() else None, ALL)

    def part(self, rows: slice) -> _Rows:
        if rows.stop - rows.start == self.length:
            return self
        rows = slice(self.source.start + rows.start, self.source.start + rows.stop)
        return replace(self, length=rows.stop - rows.start, source=rows, target=rows)

    def take(self, x: Tensor, dtype: torch.dtype, repeat: bool = True) -> Tensor:
        """(rows, H, g, D) -> (H, G, g n, D); of one sequence a view if dtype and g allow. `repeat=False` pads with 0."""
        if isinstance(self.source, slice):
            x = x[self.source, self.heads].permute(1, 2, 0, 3).unsqueeze(1)
        else:
            x = x.index_select(0, self.source).unflatten(0, (self.count, self.length))
            x = x.permute(2, 0, 3, 1, 4).contiguous()
            if not repeat and self.repeated is not None:
                x.masked_fill_(self.repeated[:, None, :, None], 0)
        return x.flatten(2, 3).to(dtype)

    def put(self, y: Tensor, value: Tensor) -> None:
        """Writes value, (H G, g n, D) in any grouping of these axes, to y, (rows, H, g, D)."""
        value = value.view(-1, self.count, y.shape[2], self.length, y.shape[3]).permute(1, 3, 0, 2, 4)
        if isinstance(self.target, slice):
            y[self.target, self.heads] = value[0]
        else:
            y.index_copy_(0, self.target, value.to(y.dtype).contiguous().flatten(0, 1))


class _Block(NamedTuple):
    queries: slice
    keys: slice


class _Group(NamedTuple):
    """Sequences that share matrix products; more than one block only where it is one sequence."""

    queries: _Rows  # of q
    results: _Rows  # of out: the same, unless all sequences share the query
    keys: _Rows
    query_lengths: Tensor  # (G, 1)
    key_lengths: Tensor  # (G, 1)
    blocks: list[_Block]


class _Batch:
    """Which rows of q, k and v go through which matrix products.

    Windows are aligned at the end of a sequence, so queries that see no key are the first of theirs, and leaving them
    out moves no other query's window. No row of scores is without a visible key.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        scale: float,
        left: int,
        right: int,
    ):
        self.heads, self.group = k.shape[1], q.shape[-2] // k.shape[1]
        self.features = max(k.shape[2], v.shape[2])
        self.scale, self.left, self.right = scale, left, right
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.jagged, self.shared = q_offsets is not None, q_offsets is None and q.dim() == 3

        k_offsets = _checked(k_offsets, min(len(k), len(v)), "keys")
        if q_offsets is None:
            q_offsets = torch.arange(len(k_offsets)) * q.shape[-3]
        else:
            q_offsets = _checked(q_offsets, len(q), "queries")
        if len(q_offsets) != len(k_offsets) or (q.dim() == 4 and len(q) != len(k_offsets) - 1):
            raise ValueError(
                f"queries and keys must have one batch size, got {len(q_offsets) - 1} and {len(k_offsets) - 1}"
            )
        self.num_queries, self.num_keys = int(q_offsets[-1]), int(k_offsets[-1])
        self.result_rows = len(q) if self.jagged else self.num_queries
        self.key_starts, self.key_lengths = k_offsets[:-1], k_offsets.diff()
        lengths = q_offsets.diff()
        blind = (lengths - self.key_lengths - right).clamp(min=0) if right >= 0 else torch.zeros_like(lengths)
        self.query_lengths = lengths - blind
        self.result_starts = q_offsets[:-1] + blind
        self.query_starts = blind if self.shared else self.result_starts
        self.live = (self.query_lengths > 0) & (self.key_lengths > 0)

    def split_heads(self, x: Tensor) -> Tensor:
        """(.., rows, Hq, D) -> (rows, H, g, D); a copy where the last dimension is not contiguous."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        return x.flatten(0, -3).unflatten(1, (self.heads, -1))

    def new_results(self, features: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        shape = (self.result_rows, self.heads, self.group, features)
        return _new_rows(shape, dtype, self.num_queries, self.query_lengths[self.live], fill)

    def new_keys(self, like: Tensor) -> Tensor:
        return _new_rows(like.shape, like.dtype, self.num_keys, self.key_lengths[self.live])

    def groups(self) -> Iterator[_Group]:
        work = self.key_lengths * self.heads * (self.query_lengths * self.group + self.features)
        alone = self.live & (work > ALONE)
        for b in alone.nonzero().flatten().tolist():
            yield from self._one(b)
        rest = (self.live & ~alone).nonzero().flatten()
        if len(rest) == 0:
            return
        queries, keys = self.query_lengths[rest], self.key_lengths[rest]
        shape, order = ((_bucket(queries) if self.jagged else queries) * 2**32 + _bucket(keys)).sort(stable=True)
        for run in rest[order].split(shape.unique_consecutive(return_counts=True)[1].tolist()):
            M, L = int(self.query_lengths[run].max()) * self.group, int(self.key_lengths[run].max())
            for sequences in run.split(max(1, BLOCK // (self.heads * max(L * M, (L + M) * self.features)))):
                yield self._many(sequences)

    def _one(self, b: int) -> Iterator[_Group]:
        m, L = int(self.query_lengths[b]), int(self.key_lengths[b])
        rows = m if self.left < 0 and self.right < 0 else min(m, SPLIT)
        span = L if self.left < 0 or self.right < 0 else min(L, rows + self.left + self.right)
        heads = min(self.heads, max(1, BLOCK // (min(rows, 64) * self.group * span)))
        rows = min(rows, max(1, BLOCK // (heads * self.group * span)))
        rows -= rows % 32 if rows > 32 else 0
        blocks = []
        for i in range(0, m, rows):
            end = min(i + rows, m)
            first = max(0, i + L - m - self.left) if self.left >= 0 else 0
            last = min(L, end + L - m + self.right) if self.right >= 0 else L
            blocks.append(_Block(slice(i, end), slice(first, last)))
        for h in range(0, self.heads, heads):
            some = slice(h, h + heads)
            queries = _Rows.of_one(int(self.query_starts[b]), m, some)
            results = _Rows.of_one(int(self.result_starts[b]), m, some)
            keys = _Rows.of_one(int(self.key_starts[b]), L, some)
            yield _Group(
                queries, results, keys, self.query_lengths[b, None, None], self.key_lengths[b, None, None], blocks
            )

    def _many(self, sequences: Tensor) -> _Group:
        query_lengths, key_lengths = self.query_lengths[sequences], self.key_lengths[sequences]
        results = queries = _Rows.of_many(self.result_starts[sequences], query_lengths, self.num_queries)
        if self.shared:
            queries = _Rows.of_one(int(self.query_starts[sequences[0]]), results.length, ALL)
        keys = _Rows.of_many(self.key_starts[sequences], key_lengths, self.num_keys)
        blocks = [_Block(slice(0, results.length), slice(0, keys.length))]
        return _Group(queries, results, keys, query_lengths[:, None], key_lengths[:, None], blocks)

    def queries(self, q: Tensor, group: _Group, rows: _Rows) -> Tensor:
        """(H, N, M, D), scaled. A shared query is copied for each sequence where one product for all would not pay."""
        q = rows.take(q, self.dtype) * self.scale
        return q if _keys_lead(q) else q.expand(-1, group.keys.count, -1, -1)

    def probabilities(self, q: Tensor, k: Tensor, group: _Group, block: _Block) -> tuple[Tensor, Tensor]:
        """q (H, N, M, D) scaled, k (H, G, L, D) -> scores and their softmax over the visible keys, (H G, M, L) both."""
        s = _product(q.flatten(0, 1), _fold(k, q).mT)  # (H N, M, L G / N)
        s = s.mT.reshape(-1, k.shape[2], q.shape[2]).mT
        if group.keys.repeated is not None or self.left >= 0 or self.right >= 0:
            self._hide(s.unflatten(0, (-1, k.shape[1])).unflatten(2, (self.group, -1)), group, block)
        return s, torch.softmax(s.mT, -2).mT if _keys_lead(s) else torch.softmax(s, -1)

    def _hide(self, s: Tensor, group: _Group, block: _Block) -> None:
        """Sets scores, (H, G, g, m, L), of padding and of keys outside the window to -inf; touches only the edges."""
        query = torch.arange(block.queries.start, block.queries.stop)
        key = torch.arange(block.keys.start, block.keys.stop)
        place = torch.minimum(query, group.query_lengths - 1) + group.key_lengths - group.query_lengths  # (G, m)
        last = group.key_lengths - 1
        if self.right >= 0:
            last = torch.minimum(last, place + self.right)
        edge = int(last.min()) + 1 - block.keys.start
        s[..., edge:].masked_fill_(key[edge:] > last[:, None, :, None], -torch.inf)
        if self.left >= 0:
            first = place - self.left
            edge = max(0, int(first.max()) - block.keys.start)
            s[..., :edge].masked_fill_(key[:edge] < first[:, None, :, None], -torch.inf)


def _keys_lead(s: Tensor) -> bool:
    """Whether scores lie in memory as (L, M): faster products, but torch's reductions then want M in full vectors."""
    return s.shape[-2] % 32 == 0


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(b.mT, a.mT).mT if _keys_lead(a) else torch.bmm(a, b)


def _fold(k: Tensor, q: Tensor) -> Tensor:
    """(H, G, L, D) -> (H N, L G / N, D): what meets one set of queries, as one matrix."""
    return k.reshape(q.shape[0] * q.shape[1], -1, k.shape[-1])


def _gradients(p, q, k, v, grad_out, grad_lse, needs):
    """Gradients of one block with respect to q (H N, M, D), k (H N, L G / N, D) and v (H G, L, E), None if not needed."""
    grad_out = grad_out.flatten(0, 1)
    dv = torch.bmm(p.mT, grad_out) if needs[2] else None
    if not (needs[0] or needs[1]):
        return None, None, dv
    ds = _product(grad_out, v.flatten(0, 1).mT).mul_(p)
    delta = ds.sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.flatten(0, 1)
    ds = ds.addcmul_(p, delta, value=-1).mT.reshape(q.shape[0] * q.shape[1], -1, q.shape[2]).mT
    dq = torch.bmm(ds, _fold(k, q)) if needs[0] else None
    dk = torch.bmm(ds.mT, q.flatten(0, 1)) if needs[1] else None
    return dq, dk, dv


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
) -> tuple[Tensor, Tensor]:
    """Output, and the natural logarithm of the sum of the exponentials of the scaled scores.

    q is (m, Hq, D) shared by all sequences, (B, m, Hq, D), or with `q_offsets` (rows, Hq, D); k is (rows, H, D) and v is
    (rows, H, E). Query i sees key j when i + L - m - left <= j <= i + L - m + right; -1 is no limit. Returns out,
    (B, m, Hq, E) or (rows, Hq, E), and lse, (B, Hq, m) or (rows, Hq), which are 0 and -inf where a query sees no key.
    Raises ValueError for offsets that leave the rows.
    """
    batch = _Batch(q, k, v, q_offsets, k_offsets, scale, left, right)
    shape = (*q.shape[:-1], v.shape[2]) if not batch.shared else (len(k_offsets) - 1, *q.shape[:-1], v.shape[2])
    q, k, v = batch.split_heads(q), batch.split_heads(k), batch.split_heads(v)
    out = batch.new_results(v.shape[3], q.dtype)
    lse = batch.new_results(1, batch.dtype, -torch.inf)
    for group in batch.groups():
        keys, values = group.keys.take(k, batch.dtype), group.keys.take(v, batch.dtype)
        for block in group.blocks:
            results = group.results.part(block.queries)
            queries = batch.queries(q, group, group.queries.part(block.queries))
            s, p = batch.probabilities(queries, keys[:, :, block.keys], group, block)
            results.put(out, torch.bmm(p, values[:, :, block.keys].flatten(0, 1)))
            results.put(lse, s.amax(-1) - p.amax(-1).log_())
    out = _finish(out, batch.result_rows, batch.num_queries).view(shape)
    lse = _finish(lse, batch.result_rows, batch.num_queries, -torch.inf).view(shape[:-1])
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
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k and v, those in `needs`, for the gradients of both of `forward`'s results.

    Probabilities are worked out anew with the whole of each row at hand, which costs less than reading `out` and `lse`
    and keeps their sum at 1 where scores are so large that `lse` has no digits left for it.
    """
    batch = _Batch(q, k, v, q_offsets, k_offsets, scale, left, right)
    like = q, k, v
    q, k, v, grad_out = (batch.split_heads(x) for x in (q, k, v, grad_out))
    if grad_lse is not None:
        grad_lse = batch.split_heads((grad_lse if batch.jagged else grad_lse.transpose(1, 2)).unsqueeze(-1))
    if batch.shared:
        dq = torch.zeros(q.shape, dtype=batch.dtype)  # summed over the batch before it is rounded
    else:
        dq = batch.new_results(q.shape[3], q.dtype)
    dk, dv = batch.new_keys(k), batch.new_keys(v)
    for group in batch.groups():
        keys, values = group.keys.take(k, batch.dtype), group.keys.take(v, batch.dtype)
        dkeys = dvalues = None
        for block in group.blocks:
            rows, results = group.queries.part(block.queries), group.results.part(block.queries)
            queries, seen = batch.queries(q, group, rows), keys[:, :, block.keys]
            _, p = batch.probabilities(queries, seen, group, block)
            go = results.take(grad_out, batch.dtype, repeat=False)
            gl = None if grad_lse is None else results.take(grad_lse, batch.dtype, repeat=False)
            part = _gradients(p, queries, seen, values[:, :, block.keys], go, gl, needs)
            if needs[0]:
                dqueries = part[0].view(queries.shape) * scale
                if batch.shared:
                    dqueries = dqueries.sum(1, keepdim=True) + rows.take(dq, batch.dtype)
                rows.put(dq, dqueries)
            dkeys = _accumulate(dkeys, part[1], block.keys, keys)
            dvalues = _accumulate(dvalues, part[2], block.keys, values)
        if needs[1]:
            group.keys.put(dk, dkeys)
        if needs[2]:
            group.keys.put(dv, dvalues)
    dq = dq.flatten(1, 2).to(q.dtype) if batch.shared else _finish(dq, batch.result_rows, batch.num_queries)
    dk, dv = _finish(dk, len(k), batch.num_keys), _finish(dv, len(v), batch.num_keys)
    return tuple(x.view(y.shape) if need else None for x, y, need in zip((dq, dk, dv), like, needs))


def _accumulate(total: Tensor | None, part: Tensor | None, rows: slice, like: Tensor) -> Tensor | None:
    """Adds a block's gradient to that of its group; where one block sees all keys its gradient is the group's."""
    if part is None:
        return None
    part = part.view(*like.shape[:2], -1, like.shape[3])
    if total is None and part.shape == like.shape:
        return part
    total = torch.zeros(like.shape, dtype=like.dtype) if total is None else total
    total[:, :, rows] += part
    return total


def _checked(offsets, rows, name):
    offsets = offsets.to(torch.int64)
    if offsets[0] != 0 or int(offsets[-1]) > rows or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"offsets of {name} must start at 0, never decrease and end within the {rows} rows, got {offsets}"
        )
    return offsets


def _bucket(n):
    """Lengths rounded up so that padding is at most a quarter"""
    step = torch.exp2((n.float().log2().floor() - 2).clamp(min=0)).long()
    return (n + step - 1) // step * step


def _new_rows(shape, dtype, total, written, fill=0.0):
    y = torch.empty(max(shape[0], total + 1), *shape[1:], dtype=dtype)
    return y if int(written.sum()) == total else y.fill_(fill)


def _finish(y, rows, total, fill=0.0):
    y[total:] = fill
    return y[:rows].flatten(1, 2)
