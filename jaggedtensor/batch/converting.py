"""A batch from other forms, and to other forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.batch.core import Batch
from jaggedtensor.errors import check_integers, check_same_device, check_tensor, fail
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops import conversions

if TYPE_CHECKING:
    import pyarrow


class Converting(Batch):
    """`from_list` and the like, `to_list` and the like."""

    @classmethod
    def from_list(
        cls,
        tensors: Sequence[Any],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> Self:
        """A batch of the given sequences: tensors `[L_i, *feature]`, or anything `torch.as_tensor` takes.

        >>> JaggedTensor.from_list([[1, 2, 3], [], [4]]).lengths()
        tensor([3, 0, 1])

        An empty list gives a batch of no sequences, values `[0]`. Gradients flow to the tensors.

        Raises:
            ValueError: the feature shapes, dtypes or devices of the tensors differ.
        """
        if isinstance(tensors, Tensor):
            fail(
                "tensors",
                "a list of tensors",
                tensors,
                "for a padded tensor use JaggedTensor.from_padded",
                error=TypeError,
            )
        rows = [torch.as_tensor(x) for x in tensors]
        # An empty Python list has no dtype or features of its own: it takes those of the others.
        typed = [r for r, x in zip(rows, tensors, strict=True) if isinstance(x, Tensor) or r.numel()]
        like = typed[0] if typed else torch.empty(0)
        for i, row in enumerate(rows):
            if row.numel() == 0 and not isinstance(tensors[i], Tensor):
                rows[i] = row = like.new_empty(0, *like.shape[1:])
            if row.dim() == 0:
                fail(f"tensors[{i}]", "of shape [L, *feature]", row, "use x[None] for a single token")
            if row.shape[1:] != like.shape[1:]:
                fail(f"tensors[{i}]", f"of feature shape {list(like.shape[1:])}, as the first", row)
            if row.device != like.device:
                fail(f"tensors[{i}]", f"on {like.device}, as the first", row)
            if dtype is None and row.dtype != like.dtype:
                fail(f"tensors[{i}]", f"{like.dtype}, as the first", row, "name one with dtype=", error=TypeError)
        lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        layout = JaggedLayout.from_lengths(lengths)
        values = torch.cat([row.to(dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)
        jt = cls._of(values, layout.to(values.device))
        if pin_memory:
            jt = jt.pin_memory()
        return jt if device is None else jt.to(device, non_blocking=pin_memory)

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Self:
        """Packed `values` `[rows, *feature]` with the length of each sequence, int32 or int64 `[B]`.

        >>> JaggedTensor.from_lengths(torch.arange(5), torch.tensor([3, 0, 2])).to_list()
        [tensor([0, 1, 2]), tensor([], dtype=torch.int64), tensor([3, 4])]
        """
        check_tensor(values, "values")
        check_integers(lengths, "lengths")
        check_same_device(lengths, "lengths", values.device)
        return cls(values, JaggedLayout.from_lengths(lengths))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor | None = None, *, mask: Tensor | None = None) -> Self:
        """The tokens of a padded `[B, L, *feature]`: the first `lengths[i]` of row i, or those where `mask` is true.

        >>> JaggedTensor.from_padded(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([2, 1])).values()
        tensor([1, 2, 3])

        Without either, every sequence has length L. On a GPU this synchronises once, for the number of tokens.

        Raises:
            ValueError: a length is negative or exceeds L; the mask is not bool `[B, L]`.
        """
        return cls._of(*conversions.from_padded(padded, lengths, mask))

    @classmethod
    def from_nested(cls, nt: Tensor) -> Self:
        """From a `torch.nested` tensor, sharing the storage of one of layout `torch.jagged` without holes."""
        return cls(*conversions.from_nested(nt))

    @classmethod
    def from_arrow(cls, array: pyarrow.Array | pyarrow.ChunkedArray) -> Self:
        """From a pyarrow list array, such as a parquet column of lists, without a Python loop over rows.

        >>> import pyarrow as pa
        >>> JaggedTensor.from_arrow(pa.array([[1, 2], [], [3]])).values()
        tensor([1, 2, 3])

        Lists of fixed-size lists give features. A null list becomes an empty sequence.

        Raises:
            TypeError: not a list array, or its elements are not numbers.
            ValueError: nulls among the elements.
        """
        return cls._of(*conversions.from_arrow(array))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def to_list(self) -> list[Tensor]:
        """The sequences, `[L_i, *feature]` each, as views."""
        lengths = self._layout.host_offsets().diff().tolist()
        return list(self._values[: self.num_tokens].split(lengths)) if lengths else []

    def unbind(self) -> tuple[Tensor, ...]:
        """The sequences as a tuple of views."""
        return tuple(self.to_list())

    def to_padded(self, fill: float | int | bool = 0, max_length: int | None = None) -> Tensor:
        """`[B, max_length, *feature]`, `fill` where a sequence has ended.

        Args:
            max_length: width, at least the longest length (the default).

        Raises:
            ValueError: a sequence is longer than `max_length`; no token is dropped silently.
        """
        return conversions.to_padded(self._values, self._layout, fill, max_length)

    def mask(self, max_length: int | None = None) -> Tensor:
        """Bool `[B, max_length]`: true where `to_padded` has a token."""
        return conversions.mask(self._layout, max_length)

    def to_nested(self) -> Tensor:
        """A `torch.nested` tensor of layout `torch.jagged` that shares the values."""
        return conversions.to_nested(self._values, self._layout)

    def to_arrow(self) -> pyarrow.Array:
        """A pyarrow list array on the CPU; features become fixed-size lists, bf16 becomes float32."""
        return conversions.to_arrow(self._values, self._layout)
