"""Which rows of queries, keys and values go through which matrix products.

Shape tags: B sequences, G sequences of a group, H heads of the keys, g query heads that share one of them, m queries,
L keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK, check_block_mask
from jaggedtensor.kernels.cpu.rows import Many, One, Packed, by_heads, new_rows

BLOCK = 1 << 20  # scores of a block of a long sequence
GATHERED = 1 << 19  # elements of the scores and of the rows of a group of short ones
ALONE = 30_000  # multiply-adds per feature from which a sequence is worth calls of its own
FEW = 10  # as many sequences of similar lengths are not worth gathering
SPLIT = 128  # queries per block where blocks of queries see different keys
LEAST = 32  # rows of queries per block, however many keys there are


class Block(NamedTuple):
    """Queries of a sequence, and the keys that some of them see; None stands for all."""

    queries: slice | None = None
    keys: slice | None = None


class Group(NamedTuple):
    """What shares matrix products. Only a sequence that goes alone has several blocks."""

    queries: One | Many  # rows of q
    results: One | Many  # rows of out: not those of q where all sequences share the query
    keys: One | Many
    query_lengths: Tensor | int  # (G, 1, 1, 1), or of the only sequence
    key_lengths: Tensor | int
    blocks: list[Block]
    hides: bool  # whether some scores must not count: those of padding, outside the window, or under the mask
    sequences: Tensor | None = None  # (G,), where there is a mask

    @property
    def blind_rows(self) -> bool:
        """Whether a query may see no key."""
        return self.sequences is not None

    def rows(self, block: Block) -> tuple[One | Many, One | Many]:
        """Rows of q and of out."""
        if block.queries is None:
            return self.queries, self.results
        return self.queries.part(block.queries), self.results.part(block.queries)


class Batch:
    """The sequences of a batch, long ones alone and short ones in groups of similar lengths.

    Windows are aligned at the end of a sequence, so queries that see no key are the first of theirs, and leaving them
    out moves no other query's window. Only where there is a block mask is a row of scores without a visible key.

    Raises:
        ValueError: offsets that do not start at 0, decrease, leave the rows, or are of two batch sizes; a mask with too
            few blocks.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        left: int,
        right: int,
        mask: Tensor | None = None,
    ):
        self.heads, self.group = k.shape[1], q.shape[-2] // k.shape[1]
        self.features = max(k.shape[2], v.shape[2])
        self.left, self.right, self.limited = left, right, left >= 0 or right >= 0
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
        self.result_starts, self.query_lengths = q_offsets[:-1], q_offsets.diff()
        blind = torch.zeros_like(self.key_lengths)
        if right >= 0:
            blind = (self.query_lengths - self.key_lengths - right).clamp(min=0)
        self.result_starts, self.query_lengths = self.result_starts + blind, self.query_lengths - blind
        self.query_starts = blind if self.shared else self.result_starts

        self.live = (self.query_lengths > 0) & (self.key_lengths > 0)
        self.mask, self.blind = None, blind
        if mask is not None:
            longest = (int(x.diff().max()) if len(x) > 1 else 0 for x in (q_offsets, k_offsets))
            check_block_mask(mask, len(k_offsets) - 1, k.device, *longest)
            self.mask = mask.expand(len(k_offsets) - 1, -1, -1)
            self.live &= self._any_block()
        work = self.key_lengths * self.heads * (self.query_lengths * self.group + self.features)
        self.runs = self._runs((self.live & (work <= ALONE)).nonzero().flatten())
        alone = self.live.index_fill(0, torch.cat([self.key_starts[:0], *self.runs]), False)
        numbers = self.query_starts, self.query_lengths, self.result_starts, self.key_starts, self.key_lengths
        self.alone: list[list[int]] = torch.stack([x[alone] for x in numbers], 1).tolist()
        self.sequences_alone = alone.nonzero().flatten()

    def _any_block(self) -> Tensor:
        """(B,) bool: whether the mask leaves a sequence any block that some query and some key are in."""
        assert self.mask is not None
        rows, columns = (MASK_BLOCK * torch.arange(size) for size in self.mask.shape[1:])
        first, lengths = self.blind[:, None], self.query_lengths[:, None]
        of_queries = (rows + MASK_BLOCK > first) & (rows < first + lengths)
        of_keys = columns < self.key_lengths[:, None]
        return (self.mask & of_queries[:, :, None] & of_keys[:, None]).any(2).any(1)

    def _runs(self, sequences: Tensor) -> list[Tensor]:
        """Of these sequences, those of similar lengths."""
        queries, keys = self.query_lengths[sequences], _bucket(self.key_lengths[sequences])
        shape, order = ((_bucket(queries) if self.jagged else queries) * 2**32 + keys).sort(stable=True)
        runs = sequences[order].split(shape.unique_consecutive(return_counts=True)[1].tolist())
        return [run for run in runs if len(run) > FEW]

    def queries(self, x: Tensor) -> Packed:
        return Packed(by_heads(x, self.heads), []) if self.shared else self.results(x)

    def results(self, x: Tensor) -> Packed:
        return Packed(by_heads(x, self.heads), [(start, m) for _, m, start, _, _ in self.alone])

    def keys(self, x: Tensor) -> Packed:
        return Packed(by_heads(x, self.heads), [(start, L) for *_, start, L in self.alone])

    def new_results(self, features: int, dtype: torch.dtype, fill: float = 0) -> Tensor:
        shape = (self.result_rows, self.heads * self.group, features)
        all_written = self.mask is None and int(self.query_lengths[self.live].sum()) == self.num_queries
        return new_rows(shape, dtype, self.num_queries, all_written, fill)

    def new_keys(self, like: Tensor) -> Tensor:
        all_written = self.mask is None and int(self.key_lengths[self.live].sum()) == self.num_keys
        return new_rows(like.shape, like.dtype, self.num_keys, all_written, 0)

    def groups(self) -> Iterator[Group]:
        for number, (query_start, m, _, _, L) in enumerate(self.alone):
            yield from self._one(number, query_start, m, L)
        for run in self.runs:
            m, L = int(self.query_lengths[run].max()) * self.group, int(self.key_lengths[run].max())
            size = self.heads * max(L * m, L * self.features, m * self.features)
            for sequences in run.split(max(1, GATHERED // size)):
                yield self._many(sequences)

    def _one(self, number: int, query_start: int, m: int, L: int) -> Iterator[Group]:
        """A sequence cut first by heads, then by queries, until a block of scores is small."""
        masked = self.mask is not None
        sequences = self.sequences_alone[number : number + 1] if masked else None
        rows = min(m, SPLIT) if self.limited or masked else m
        span = min(L, rows + self.left + self.right) if self.left >= 0 and self.right >= 0 else L
        heads = max(1, BLOCK // (rows * self.group * span))
        if heads == 1:
            rows = min(rows, max(LEAST, BLOCK // span // LEAST * LEAST) // self.group or 1)
        blocks = [Block()]
        if rows < m or self.limited or masked:
            blocks = [self._block(slice(i, min(i + rows, m)), m, L) for i in range(0, m, rows)]
        if masked:
            blocks = [x for x in map(self._narrowed, blocks, [int(self.sequences_alone[number])] * len(blocks)) if x]
        if not blocks:
            return
        for h in range(0, self.heads, heads):
            some = slice(h, h + heads) if heads < self.heads else None
            queries = results = One(number, m, None, some)
            if self.shared:
                queries = One(None, m, query_start, some)
            hides = self.limited or masked
            yield Group(queries, results, One(number, L, None, some), m, L, blocks, hides, sequences)

    def _block(self, queries: slice, m: int, L: int) -> Block:
        first = max(0, queries.start + L - m - self.left) if self.left >= 0 else 0
        last = min(L, queries.stop + L - m + self.right) if self.right >= 0 else L
        return Block(queries, slice(first, last))

    def _narrowed(self, block: Block, sequence: int) -> Block | None:
        """From the first key to the last that the mask lets any query of the block see."""
        assert self.mask is not None
        assert block.queries is not None
        assert block.keys is not None
        first, last = (int(self.blind[sequence]) + i for i in (block.queries.start, block.queries.stop - 1))
        rows = slice(first // MASK_BLOCK, last // MASK_BLOCK + 1)
        seen = (self.mask[sequence, rows].any(0).nonzero() * MASK_BLOCK).flatten().tolist()
        if not seen:
            return None
        keys = slice(max(block.keys.start, seen[0]), min(block.keys.stop, seen[-1] + MASK_BLOCK))
        return Block(block.queries, keys) if keys.start < keys.stop else None

    def _many(self, sequences: Tensor) -> Group:
        query_lengths, key_lengths = self.query_lengths[sequences], self.key_lengths[sequences]
        queries = results = Many(self.result_starts[sequences], query_lengths, self.num_queries)
        if self.shared:
            queries = One(None, results.length, int(self.query_starts[sequences[0]]))
        keys = Many(self.key_starts[sequences], key_lengths, self.num_keys)
        lengths = query_lengths.view(-1, 1, 1, 1), key_lengths.view(-1, 1, 1, 1)
        masked = self.mask is not None
        hides = self.limited or masked or keys.repeated is not None
        return Group(queries, results, keys, *lengths, [Block()], hides, sequences if masked else None)

    def hide(self, s: Tensor, group: Group, block: Block) -> None:
        """Sets scores, (H G, M, L), of padding, outside the window and under the mask to -inf; touches only the edges,
        but for a mask."""
        s = s.unflatten(0, (-1, group.keys.count)).unflatten(2, (self.group, -1))  # (H, G, g, m, L)
        first_query, first_key = (0 if part is None else part.start for part in block)
        query = torch.arange(first_query, first_query + s.shape[3])[:, None]
        key = torch.arange(first_key, first_key + s.shape[4])
        place = query.clamp(max=group.query_lengths - 1) + (group.key_lengths - group.query_lengths)  # (G, 1, m, 1)
        last = group.key_lengths - 1
        if self.right >= 0:
            last = (place + self.right).clamp(max=last)
        if isinstance(last, Tensor):
            edge = max(0, int(last.min()) + 1 - first_key)
            s[..., edge:].masked_fill_(key[edge:] > last, -torch.inf)
        if self.left >= 0:
            first = place - self.left
            edge = max(0, int(first.max()) - first_key)
            s[..., :edge].masked_fill_(key[:edge] < first, -torch.inf)
        if group.sequences is not None:
            assert self.mask is not None
            start, sequence = (x.view(-1, 1, 1, 1) for x in (self.blind[group.sequences], group.sequences))
            rows = (start + query.clamp(max=group.query_lengths - 1)) // MASK_BLOCK  # (G, 1, m, 1)
            columns = key.clamp(max=group.key_lengths - 1) // MASK_BLOCK
            s.masked_fill_(~self.mask[sequence, rows, columns], -torch.inf)


def _checked(offsets: Tensor, rows: int, name: str) -> Tensor:
    offsets = offsets.to(torch.int64)
    if int(offsets[0]) != 0 or int(offsets[-1]) > rows or bool((offsets.diff() < 0).any()):
        expected = f"{name} must start at 0, never decrease and end within the {rows} rows"
        raise ValueError(f"{expected}, got {offsets.tolist()}")
    return offsets


def _bucket(lengths: Tensor) -> Tensor:
    """Lengths rounded up to four sizes per power of two: padding is at most a quarter, and up to 8 there is none."""
    step = torch.exp2((lengths.log2().ceil() - 3).clamp(min=0)).long()
    return (lengths + step - 1) // step * step
