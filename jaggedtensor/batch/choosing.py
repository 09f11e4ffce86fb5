"""Choosing sequences, cutting them, joining batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.batch.core import Batch, check_same_layout
from jaggedtensor.errors import check_same_device, fail
from jaggedtensor.ops import indexing

if TYPE_CHECKING:
    from jaggedtensor.tensor import JaggedTensor


class Choosing(Batch):
    """Indexing as of a list of tensors; `cat`, `split`, `chunk`."""

    def __getitem__(self, index: Any) -> Any:
        """As of a list of tensors.

        `jt[i]` is sequence i and `jt[i:j]` a batch of sequences, both views; `jt[tensor]` picks or masks sequences;
        `jt[:, a:b]` cuts every sequence by Python's rules (`jt[:, -20:]` keeps the last 20 tokens); further indices
        apply to features.

        Raises:
            IndexError: outside the batch.
            TypeError: an int in dimension 1, which not every sequence may have: use `first()` or `last()`.
        """
        if index is Ellipsis or (isinstance(index, tuple) and not index):
            return self
        if not isinstance(index, tuple):
            return self._choose(index)
        if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
            where = next(n for n, i in enumerate(index) if i is Ellipsis)
            missing = self.ndim - (len(index) - 1 - sum(i is None for i in index))
            index = (*index[:where], *[slice(None)] * missing, *index[where + 1 :])
        if len(index) - sum(i is None for i in index) > self.ndim:
            fail("index", f"of at most {self.ndim} dimensions", f"{len(index)}", error=IndexError)
        chosen = self._choose(index[0])
        if isinstance(chosen, Tensor):
            return chosen[index[1:]]
        if len(index) > 1:
            cut = index[1]
            if not isinstance(cut, slice):
                remedy = (
                    "use jt.first() or jt.last(), or a slice such as jt[:, 3:4]"
                    if isinstance(cut, int)
                    else "use jt.map_values"
                )
                fail("the index of dimension 1 (ragged)", "a slice", cut, remedy, error=TypeError)
            chosen = self._of(*indexing.cut_sequences(chosen._values, chosen._layout, cut))
        if len(index) > 2:
            features = (slice(None), *index[2:])
            values = chosen._values[features]
            copied = any(isinstance(i, (Tensor, list)) for i in features)
            chosen = chosen._with_tokens(values) if copied else self._of(values, chosen._layout)
        return chosen

    def _choose(self, index: Any) -> Any:
        if isinstance(index, (list, range)) or (hasattr(index, "__array__") and not isinstance(index, Tensor)):
            empty = isinstance(index, (list, range)) and not index
            index = torch.as_tensor(index, dtype=torch.int64 if empty else None)
        if isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool:
            index = int(index)
        if isinstance(index, int) and not isinstance(index, bool):
            return indexing.one_sequence(self._values, self._layout, index)
        if isinstance(index, slice):
            begin, end, step = index.indices(self.batch_size)
            if step != 1:
                index = torch.tensor(range(begin, end, step), dtype=torch.int64, device=self.device)
            elif begin == 0 and end == self.batch_size:
                return self
            else:
                return self._of(*indexing.sequence_range(self._values, self._layout, begin, max(begin, end)))
        if isinstance(index, Tensor):
            return self._of(*indexing.pick_sequences(self._values, self._layout, index))
        fail("index", "an int, a slice, or a tensor of sequence numbers or of bool", index, error=TypeError)

    def first(self) -> Tensor:
        """`[B, *feature]`: the first token of each sequence, 0 where there is none."""
        return indexing.first_tokens(self._values, self._layout)

    def last(self) -> Tensor:
        """`[B, *feature]`: the last token of each sequence, 0 where there is none."""
        return indexing.last_tokens(self._values, self._layout)

    @staticmethod
    def cat(tensors: Sequence[JaggedTensor], dim: int = 0) -> JaggedTensor:
        """Join batches: `dim=0` batch after batch, `dim=1` sequence by sequence, further ones along a feature.

        >>> a, b = JaggedTensor.from_list([[1], [2, 3]]), JaggedTensor.from_list([[4], [5]])
        >>> JaggedTensor.cat([a, b], dim=1).to_list()
        [tensor([1, 4]), tensor([2, 3, 5])]

        Raises:
            ValueError: nothing to join; batch sizes differ (`dim=1`) or layouts do (a feature dimension).
        """
        for i, jt in enumerate(tensors):
            if not isinstance(jt, Choosing):
                fail(f"tensors[{i}]", "a JaggedTensor", jt, error=TypeError)
        if not tensors:
            fail("tensors", "at least one JaggedTensor", "none")
        first = tensors[0]
        dim = first._dimension(dim)
        if dim >= 2:
            for jt in tensors[1:]:
                check_same_layout(first, jt)
            return first._with_tokens(torch.cat([jt._tokens_beside(first) for jt in tensors], dim - 1))
        for i, jt in enumerate(tensors):
            if dim == 1 and jt.batch_size != first.batch_size:
                fail(f"tensors[{i}]", f"of batch size {first.batch_size}, as the first", str(jt.batch_size))
            if jt._values.shape[1:] != first._values.shape[1:]:
                fail(f"tensors[{i}]", f"of feature shape {list(first._values.shape[1:])}, as the first", jt._values)
            check_same_device(jt._values, f"tensors[{i}]", first.device)
        join = indexing.join_batches if dim == 0 else indexing.join_sequences
        return first._of(*join([(jt._values, jt._layout) for jt in tensors]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Along the batch: `sizes` sequences in each part, or a list of part sizes; views. From `dim=2`: a feature.

        Raises:
            ValueError: the sizes do not add up to the batch.
        """
        if dim != 0:
            return torch.split(self, sizes, dim)  # type: ignore[arg-type,return-value]
        if isinstance(sizes, int):
            if sizes < 1:
                fail("sizes", "at least 1", sizes)
            sizes = [min(sizes, self.batch_size - i) for i in range(0, self.batch_size, sizes)] or [0]
        if sum(sizes) != self.batch_size or any(size < 0 for size in sizes):
            fail("sizes", f"non-negative with sum {self.batch_size} (batch_size)", str(list(sizes)))
        parts, begin = [], 0
        for size in sizes:
            parts.append(self[begin : begin + size])
            begin += size
        return tuple(parts)

    def chunk(self, n: int, dim: int = 0) -> tuple[Self, ...]:
        """At most `n` parts of equal batch size (the last may be smaller), as torch.chunk. From `dim=2`: a feature."""
        if dim != 0:
            return torch.chunk(self, n, dim)  # type: ignore[arg-type,return-value]
        if n < 1:
            fail("n", "at least 1", n)
        return self.split(-(-self.batch_size // n) if self.batch_size else [0] * n)
