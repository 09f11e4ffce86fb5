"""Attention of packed sequences on the CPU, forward and backward, in plain torch operations.

A long sequence goes alone, as a view of its packed rows. Short ones of similar lengths are gathered into groups, so that
ten thousand tiny sequences are a few hundred matrix products and not ten thousand calls. All kinds of query take the
same path: `_Batch` says which rows go together, `_probabilities` and `_gradients` are the mathematics of one block.

Sizes in shape tags: B sequences, G sequences of a group, H heads of the keys, g query heads that share one of them,
m queries, M = g m rows of queries, L keys, D features of a key, E features of a value. N is the number of different sets
of queries in a group: 1 where its sequences share the query, else G.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from jaggedtensor.kernels.cpu.memory import ask_for_huge_pages

BLOCK = 1 << 18  # elements of the scores of one block, and of the gathered rows of one group: they stay in the cache
ALONE = 30_000  # multiply-adds per feature from which a sequence is worth calls of its own
SPLIT = 128  # queries per block where blocks of queries see different keys
LEAST = 32  # rows of queries per block, however many keys there are


class _Rows:
    """Rows of `count` sequences of a packed tensor as a grid of `length` each; a shorter sequence repeats its last row."""

    def __init__(self, start: int, length: int):
        self.count, self.start, self.length = 1, start, length
        self.source: Tensor | None = None  # rows to read, (G, n), of several sequences
        self.target: Tensor | None = None  # rows to write: `source`, but repeated rows go to the row after the last token
        self.repeated: Tensor | None = None  # (G, n), None if no row is
        self.places: dict[tuple[int, ...], Tensor] = {}  # by strides

    @classmethod
    def of_many(cls, starts: Tensor, lengths: Tensor, total: int) -> _Rows:
        rows = cls(0, int(lengths.max()))
        place, last = torch.arange(rows.length), lengths[:, None] - 1
        rows.count, rows.source = len(starts), starts[:, None] + torch.minimum(place, last)
        rows.target = rows.source
        if int(lengths.min()) < rows.length:
            rows.repeated = place > last
            rows.target = rows.source.masked_fill(rows.repeated, total)
        return rows

    def part(self, rows: slice | None) -> _Rows:
        return self if rows is None else _Rows(self.start + rows.start, rows.stop - rows.start)

    def take(self, x: Tensor, dtype: torch.dtype, repeat: bool = True) -> Tensor:
        """(H, g, rows, D) -> (H G, g n, D); of one sequence a view if dtype and g allow. `repeat=False` pads with 0."""
        if self.source is None:
            x = x.narrow(-2, self.start, self.length)
            x = x if x.dim() == 3 else x.flatten(1, 2)
        else:
            x = self._gather(x if x.dim() == 4 else x[:, None])
            if self.repeated is not None and not repeat:
                x.masked_fill_(self.repeated[:, None, :, None], 0)
            x = x.view(x.shape[0] * self.count, -1, x.shape[4])
        return x if x.dtype == dtype else x.to(dtype)

    def _gather(self, x: Tensor) -> Tensor:
        """(H, g, rows, D) -> (H, G, g, n, D): one copy of features that lie together, whatever the other strides."""
        heads, group, length, features = x.shape
        unit = math.gcd(*x.stride()[:3]) or 1
        steps = tuple(step // unit for step in x.stride()[:3])
        if steps not in self.places:
            place = (torch.arange(heads) * steps[0])[:, None, None, None] + (torch.arange(group) * steps[1])[:, None]
            self.places[steps] = place + (self.source * steps[2])[:, None]
        place = self.places[steps]
        last = sum((size - 1) * step for size, step in zip((heads, group, length), steps, strict=True))
        table = x.as_strided((last + 1, features), (unit, 1))
        return table.index_select(0, place.flatten()).view(*place.shape, features)

    def put(self, y: Tensor, value: Tensor) -> None:
        """Writes value, (H G, g n, D), to y, (H, g, rows, D)."""
        if self.target is None:
            y = y.narrow(-2, self.start, self.length)
            if y.data_ptr() != value.data_ptr():  # not worked out in place, see `room`
                y.copy_(value.view(y.shape))
        else:
            y = y.movedim(-2, 0)  # (rows, H, g, D), contiguous
            value = value.view(y.shape[1], self.count, -1, self.length, y.shape[-1]).permute(1, 3, 0, 2, 4)
            value = value.to(y.dtype).contiguous().view(-1, y[0].numel())
            y.flatten(1).index_copy_(0, self.target.flatten(), value)

    def add(self, y: Tensor, value: Tensor, scale: float) -> None:
        """Adds value, (H N, g n, D), summed over N and scaled, to rows of y, (H, g, rows, D), that all sequences share."""
        y = y.narrow(-2, self.start, self.length)
        value = value.view(y.shape[0], -1, *y.shape[1:])
        y.add_(value[:, 0] if value.shape[1] == 1 else value.sum(1), alpha=scale)

    def room(self, y: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
        """Where to work out rows of y, (H G, n, D): in place if possible. It is 0 to begin with if it is a sum of parts."""
        if self.target is None and y.dtype == dtype:
            room = y.narrow(-2, self.start, self.length)
        else:
            room = torch.empty(y.shape[0] * self.count, self.length, y.shape[-1], dtype=dtype)
        return room.zero_() if parts > 1 else room


class _Block(NamedTuple):
    """Queries of a group and the keys that some of them see; None stands for all."""

    queries: slice | None = None
    keys: slice | None = None


class _Group(NamedTuple):
    """Sequences that share matrix products; only one sequence has several blocks, or less than all heads."""

    queries: _Rows  # of q
    results: _Rows  # of out: the same, unless all sequences share the query
    keys: _Rows
    query_lengths: Tensor | int  # (G, 1, 1, 1), or of the only sequence
    key_lengths: Tensor | int
    blocks: list[_Block]
    heads: slice | None = None


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

        k_offsets = _checked(k_offsets, min(len(k), len(v)), "k_offsets")
        if q_offsets is None:
            q_offsets = torch.arange(len(k_offsets)) * q.shape[-3]
        else:
            q_offsets = _checked(q_offsets, len(q), "q_offsets")
        size = len(q) if q.dim() == 4 else len(q_offsets) - 1
        if size != len(k_offsets) - 1:
            raise ValueError(f"queries and keys must have one batch size, got {size} and {len(k_offsets) - 1}")
        self.num_queries, self.num_keys = int(q_offsets[-1]), int(k_offsets[-1])
        self.result_rows = len(q) if self.jagged else self.num_queries
        self.key_starts, self.key_lengths = k_offsets[:-1], k_offsets.diff()
        self.query_lengths, self.result_starts = q_offsets.diff(), q_offsets[:-1]
        self.query_starts = self.result_starts * (not self.shared)
        if right >= 0:
            blind = (self.query_lengths - self.key_lengths - right).clamp(min=0)
            self.query_lengths = self.query_lengths - blind
            self.result_starts, self.query_starts = self.result_starts + blind, self.query_starts + blind
        self.live = (self.query_lengths > 0) & (self.key_lengths > 0)
        self._last: tuple = (None, None)  # the last rows of a shared query, which most groups have in common

    def split_heads(self, x: Tensor) -> Tensor:
        """(.., Hq, D) -> (H, g, rows, D), g left out if it is 1; a copy where the last dimension is not contiguous."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        return _split(x.flatten(0, -3), self.heads)

    def new_results(self, features: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
        shape = (self.result_rows, self.heads * self.group, features)
        return _split(_new_rows(shape, dtype, self.num_queries, self.query_lengths[self.live], fill), self.heads)

    def new_queries(self, like: Tensor) -> Tensor:
        if not self.shared:
            return self.new_results(like.shape[-1], like.dtype)
        # Summed over the batch before it is rounded.
        shape = (like.shape[-2], self.heads * self.group, like.shape[-1])
        return _split(torch.zeros(shape, dtype=self.dtype), self.heads)

    def new_keys(self, like: Tensor) -> Tensor:
        shape = (like.shape[1], self.heads, like.shape[2])
        return _split(_new_rows(shape, like.dtype, self.num_keys, self.key_lengths[self.live]), self.heads)

    def groups(self) -> Iterator[_Group]:
        work = self.key_lengths * self.heads * (self.query_lengths * self.group + self.features)
        alone = self.live & (work > ALONE)
        numbers = self.query_starts, self.result_starts, self.key_starts, self.query_lengths, self.key_lengths
        for one in torch.stack(numbers, 1)[alone].tolist():
            yield from self._one(*one)
        rest = (self.live & ~alone).nonzero().flatten()
        if len(rest) == 0:
            return
        queries, keys = self.query_lengths[rest], self.key_lengths[rest]
        shape, order = ((_bucket(queries) if self.jagged else queries) * 2**32 + _bucket(keys)).sort(stable=True)
        for run in rest[order].split(shape.unique_consecutive(return_counts=True)[1].tolist()):
            M, L = int(self.query_lengths[run].max()) * self.group, int(self.key_lengths[run].max())
            size = self.heads * max(L * M, L * self.features, M * self.features)
            for sequences in run.split(max(1, BLOCK // size)):
                yield self._many(sequences)

    def _one(self, query_start: int, result_start: int, key_start: int, m: int, L: int) -> Iterator[_Group]:
        """A long sequence, cut first by heads, then by queries, until a block of scores is small."""
        limited = self.left >= 0 or self.right >= 0
        rows = min(m, SPLIT) if limited else m
        span = min(L, rows + self.left + self.right) if self.left >= 0 and self.right >= 0 else L
        heads = max(1, BLOCK // (rows * self.group * span))
        if heads == 1:
            rows = min(rows, max(LEAST, BLOCK // span // LEAST * LEAST) // self.group or 1)
        blocks = [_Block()]
        if rows < m or limited:
            blocks = [self._block(slice(i, min(i + rows, m)), m, L) for i in range(0, m, rows)]
        queries, results, keys = _Rows(query_start, m), _Rows(result_start, m), _Rows(key_start, L)
        for h in range(0, self.heads, heads):
            yield _Group(queries, results, keys, m, L, blocks, slice(h, h + heads) if heads < self.heads else None)

    def _block(self, queries: slice, m: int, L: int) -> _Block:
        first = max(0, queries.start + L - m - self.left) if self.left >= 0 else 0
        last = min(L, queries.stop + L - m + self.right) if self.right >= 0 else L
        return _Block(queries, slice(first, last))

    def _many(self, sequences: Tensor) -> _Group:
        query_lengths, key_lengths = self.query_lengths[sequences], self.key_lengths[sequences]
        results = queries = _Rows.of_many(self.result_starts[sequences], query_lengths, self.num_queries)
        if self.shared:
            queries = _Rows(int(self.query_starts[sequences[0]]), results.length)
        keys = _Rows.of_many(self.key_starts[sequences], key_lengths, self.num_keys)
        return _Group(
            queries, results, keys, query_lengths.view(-1, 1, 1, 1), key_lengths.view(-1, 1, 1, 1), [_Block()]
        )

    def queries(self, q: Tensor, group: _Group, rows: _Rows) -> Tensor:
        """(H N, M, D), scaled. A shared query is copied for each sequence where one product for all would not pay."""
        if not self.shared:
            return rows.take(q, self.dtype) * self.scale
        which = rows.start, rows.length, group.heads
        if which != self._last[0]:
            self._last = which, rows.take(q, self.dtype) * self.scale
        q = self._last[1]
        if group.keys.count > 1 and not _keys_lead(q):
            q = q[:, None].expand(-1, group.keys.count, -1, -1).flatten(0, 1)
        return q

    def probabilities(self, q: Tensor, k: Tensor, group: _Group, block: _Block) -> tuple[Tensor, Tensor]:
        """q (H N, M, D) and k (H G, L, D) -> scores and their softmax over the visible keys, (H G, L, M) both."""
        s = _product(_fold(k, q), q)  # (H N, L G / N, M)
        if q.shape[0] < k.shape[0]:
            s = s.view(k.shape[0], -1, q.shape[1])
        if self.left >= 0 or self.right >= 0 or group.keys.repeated is not None:
            self._hide(s.mT.unflatten(0, (-1, group.keys.count)).unflatten(2, (self.group, -1)), group, block)
        return s, torch.softmax(s, 1) if _keys_lead(q) else torch.softmax(s.mT, 2).mT

    def _hide(self, s: Tensor, group: _Group, block: _Block) -> None:
        """Sets scores, (H, G, g, m, L), of padding and of keys outside the window to -inf; touches only the edges."""
        first_query, first_key = (0 if part is None else part.start for part in block)
        query = torch.arange(first_query, first_query + s.shape[3])[:, None]
        key = torch.arange(first_key, first_key + s.shape[4])
        place = query.clamp(max=group.query_lengths - 1) + (group.key_lengths - group.query_lengths)  # (G, 1, m, 1)
        last = group.key_lengths - 1
        if self.right >= 0:
            last = (place + self.right).clamp(max=last)
        if isinstance(last, Tensor):
            edge = int(last.min()) + 1 - first_key
            s[..., edge:].masked_fill_(key[edge:] > last, -torch.inf)
        if self.left >= 0:
            first = place - self.left
            edge = max(0, int(first.max()) - first_key)
            s[..., :edge].masked_fill_(key[:edge] < first, -torch.inf)


def _keys_lead(q: Tensor) -> bool:
    """Whether scores lie in memory as (L, M): faster products, but torch's reductions then want M in full vectors."""
    return q.shape[1] % 32 == 0


def _product(k: Tensor, q: Tensor) -> Tensor:
    """(.., L, D), (.., M, D) -> (.., L, M)"""
    return torch.bmm(k, q.mT) if _keys_lead(q) else torch.bmm(q, k.mT).mT


def _fold(k: Tensor, q: Tensor) -> Tensor:
    """(H G, L, D) -> (H N, L G / N, D): what meets one set of queries, as one matrix."""
    return k if k.shape[0] == q.shape[0] else k.view(q.shape[0], -1, k.shape[2])


def _score_gradients(p: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """p (H G, L, M), v (H G, L, E), grad_out (H G, M, E), grad_lse (H G, M, 1) -> (H G, L, M)"""
    ds = _product(v, grad_out).mul_(p)
    delta = ds.sum(1, keepdim=True)
    if grad_lse is not None:
        delta -= grad_lse.mT
    return ds.addcmul_(p, delta, value=-1)


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

    Raises:
        ValueError: offsets that do not start at 0, decrease, or leave the rows.
    """
    batch = _Batch(q, k, v, q_offsets, k_offsets, scale, left, right)
    shape = (len(k_offsets) - 1,) * batch.shared + q.shape[:-1]
    q, k, v = batch.split_heads(q), batch.split_heads(k), batch.split_heads(v)
    out, lse = batch.new_results(v.shape[-1], q.dtype), batch.new_results(1, batch.dtype, -torch.inf)
    for group in batch.groups():
        q_, k_, v_, out_, lse_ = _of_heads(group.heads, q, k, v, out, lse)
        keys, values = group.keys.take(k_, batch.dtype), group.keys.take(v_, batch.dtype)
        for block in group.blocks:
            queries = batch.queries(q_, group, group.queries.part(block.queries))
            s, p = batch.probabilities(queries, _part(keys, block), group, block)
            results = group.results.part(block.queries)
            results.put(out_, torch.bmm(p.mT, _part(values, block)))
            results.put(lse_, s.amax(1) - p.amax(1).log_())
    out = _finished(out, batch.result_rows, batch.num_queries).view(*shape, v.shape[-1])
    lse = _finished(lse, batch.result_rows, batch.num_queries, -torch.inf).view(shape)
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
    """Gradients of q, k and v, those that `needs` asks for, from the gradients of both results of `forward`.

    Probabilities are worked out anew from whole rows of scores. That is as fast as from `lse`, and their sum is 1 even
    where scores are so large that `lse` has no digits left for it; `out` and `lse` are not read.
    """
    batch = _Batch(q, k, v, q_offsets, k_offsets, scale, left, right)
    inputs = q, k, v
    q, k, v, grad_out = (batch.split_heads(x) for x in (q, k, v, grad_out))
    if grad_lse is not None:
        grad_lse = batch.split_heads((grad_lse if batch.jagged else grad_lse.transpose(1, 2)).unsqueeze(-1))
    dq = batch.new_queries(q) if needs[0] else None
    dk, dv = (batch.new_keys(x) if need else None for x, need in zip((k, v), needs[1:], strict=True))
    for group in batch.groups():
        q_, k_, v_, go_, gl_, dq_, dk_, dv_ = _of_heads(group.heads, q, k, v, grad_out, grad_lse, dq, dk, dv)
        keys, values = group.keys.take(k_, batch.dtype), group.keys.take(v_, batch.dtype)
        parts = len(group.blocks) if group.blocks[0].keys is None else 2
        dkeys, dvalues = (y if y is None else group.keys.room(y, batch.dtype, parts) for y in (dk_, dv_))
        for block in group.blocks:
            rows, results = group.queries.part(block.queries), group.results.part(block.queries)
            queries, seen = batch.queries(q_, group, rows), _part(keys, block)
            _, p = batch.probabilities(queries, seen, group, block)
            go = results.take(go_, batch.dtype, repeat=False)
            if dvalues is not None:
                _accumulate(dvalues, block, p, go)
            if dq_ is None and dkeys is None:
                continue
            gl = None if gl_ is None else results.take(gl_, batch.dtype, repeat=False)
            ds = _fold(_score_gradients(p, _part(values, block), go, gl), queries)  # (H N, L G / N, M)
            if dkeys is not None:
                _accumulate(_fold(dkeys, queries), block, ds, queries)
            if dq_ is not None:
                dqueries = torch.bmm(ds.mT, _fold(seen, queries))
                if batch.shared:
                    rows.add(dq_, dqueries, scale)
                else:
                    rows.put(dq_, dqueries.mul_(scale))
        for y, total in ((dk_, dkeys), (dv_, dvalues)):
            if y is not None:
                group.keys.put(y, total)
    ends = q.shape[-2] if batch.shared else batch.num_queries, batch.num_keys, batch.num_keys
    return tuple(
        None if y is None else _finished(y, x.flatten(0, -3).shape[0], end).to(x.dtype).view(x.shape)
        for y, x, end in zip((dq, dk, dv), inputs, ends, strict=True)
    )


def _of_heads(heads: slice | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tensors if heads is None else tuple(x if x is None else x[heads] for x in tensors)


def _part(keys: Tensor, block: _Block) -> Tensor:
    return keys if block.keys is None else keys[:, block.keys]


def _accumulate(total: Tensor, block: _Block, a: Tensor, b: Tensor) -> None:
    """total (.., L, D), of all keys, and the product of a (.., L, M) and b (.., M, D), of those that a block sees."""
    if block.keys is None:
        torch.bmm(a, b, out=total)
    else:
        _part(total, block).baddbmm_(a, b)


def _checked(offsets: Tensor, rows: int, name: str) -> Tensor:
    offsets = offsets.to(torch.int64)
    if int(offsets[0]) != 0 or int(offsets[-1]) > rows or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name} must start at 0, never decrease and end within the {rows} rows, got {offsets.tolist()}"
        )
    return offsets


def _bucket(lengths: Tensor) -> Tensor:
    """Rounds lengths up to four sizes per power of two, so that padding is at most a quarter; up to 8 they are exact."""
    step = torch.exp2((lengths.log2().ceil() - 3).clamp(min=0)).long()
    return (lengths + step - 1) // step * step


def _split(x: Tensor, heads: int) -> Tensor:
    """(rows, Hq, D) -> (H, g, rows, D), with g left out if it is 1."""
    return x.transpose(0, 1) if x.shape[1] == heads else x.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)


def _new_rows(shape: tuple[int, ...], dtype: torch.dtype, total: int, written: Tensor, fill: float = 0.0) -> Tensor:
    """Uninitialised rows, and a spare one after `total` for padding; filled if not every row will be written."""
    rows, *features = shape
    y = ask_for_huge_pages(torch.empty(max(rows, total + 1), *features, dtype=dtype))
    return y if int(written.sum()) == total else y.fill_(fill)


def _finished(y: Tensor, rows: int, total: int, fill: float = 0.0) -> Tensor:
    """(H, g, rows, D) -> (rows, Hq, D), with all rows after the last token filled."""
    y = y.movedim(-2, 0)
    y[total:] = fill
    return y[:rows].flatten(1, -2)
