"""JaggedTensor: a batch of sequences of different lengths, packed without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.errors import check_floating, check_integers, check_same_device, check_tensor, fail, is_readable
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops import conversions, indexing, reductions
from jaggedtensor.ops.reductions import zero_slack
from jaggedtensor.ops.segment import segment_expand

if TYPE_CHECKING:
    import pyarrow

    from jaggedtensor.ops.plan import Plan

# torch function -> how it acts on jagged tensors; filled by jaggedtensor.torch_functions
HANDLERS: dict[Any, Callable[..., Any]] = {}
# name -> the same for what Tensor defines in Python, such as __rsub__: torch.compile does not find it by identity
OPERATORS: dict[str, Callable[..., Any]] = {}


def _through(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """A method that does what the torch function does to a JaggedTensor."""

    def method(self: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
        if swapped:
            return HANDLERS[function](function, args[0], self)
        return HANDLERS[function](function, self, *args, **kwargs)

    method.__name__ = function.__name__
    method.__doc__ = f"As `torch.{function.__name__}`, token by token."
    return method


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for == and !=, which leave what is neither tensor nor number to Python: it is not equal."""
    compare = _through(function)

    def method(self: JaggedTensor, other: Any) -> Any:
        return compare(self, other) if isinstance(other, (JaggedTensor, Tensor, Number)) else NotImplemented

    method.__name__, method.__doc__ = compare.__name__, compare.__doc__
    return method


class JaggedTensor:
    """A batch of sequences of different lengths: `values` packed one after the other, and where each begins.

    >>> jt = JaggedTensor.from_list([torch.tensor([1., 2., 3.]), torch.tensor([]), torch.tensor([4., 5.])])
    >>> jt.sum(1)
    tensor([6., 0., 9.])
    >>> (jt * 2).to_padded()
    tensor([[ 2.,  4.,  6.],
            [ 0.,  0.,  0.],
            [ 8., 10.,  0.]])

    The shape is `(B, None, *feature)`. Functions of single tokens (arithmetic, `nn.Linear`, norms, activations, losses)
    apply as to a tensor. Other operands are aligned from the right on `(B, j, *feature)`: `[*feature]` for every token,
    `[B, 1, *feature]` per sequence; nothing is aligned by chance. An operation along dimension 1 acts on each sequence.

    Args:
        values: `[rows, *feature]`, any dtype and strides. Rows past `offsets[-1]` are slack: never read, and 0 in
            results and gradients.
        offsets: int32 or int64 `[B + 1]` on the device of `values`, or a `JaggedLayout` to share.
        validate: check the values of `offsets`; on a GPU this synchronises once (see `JaggedLayout`).

    Raises:
        TypeError: values are not a tensor, or offsets not an int32 or int64 tensor.
        ValueError: offsets do not start at 0, decrease, or end past the rows of values; devices differ.
    """

    def __init__(self, values: Tensor, offsets: Tensor | JaggedLayout, *, validate: bool = True) -> None:
        check_tensor(values, "values", "for a list of tensors use JaggedTensor.from_list")
        if values.dim() == 0:
            fail("values", "of shape [rows, *feature]", values)
        layout = offsets if isinstance(offsets, JaggedLayout) else JaggedLayout(offsets, validate=validate)
        check_same_device(layout._offsets, "offsets", values.device)
        self._values = values
        self._layout = layout
        _check_rows(values, layout, "values")

    @classmethod
    def _of(cls, values: Tensor, layout: JaggedLayout) -> Self:
        """Without checks, for rows known to fit."""
        jt = cls.__new__(cls)
        jt._values = values
        jt._layout = layout
        return jt

    # -- constructors -------------------------------------------------------------------------------------------------

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

    # -- what it holds ------------------------------------------------------------------------------------------------

    def values(self) -> Tensor:
        """`[rows, *feature]`, the packed tokens (and slack, if there is any), as given."""
        return self._values

    def offsets(self) -> Tensor:
        """`[B + 1]` int32 or int64: sequence i is `values()[offsets[i]:offsets[i + 1]]`."""
        return self._layout.offsets()

    def lengths(self) -> Tensor:
        """`[B]`: tokens of each sequence."""
        return self._layout.lengths()

    @property
    def layout(self) -> JaggedLayout:
        """The structure, shared with every tensor made from this one token by token."""
        return self._layout

    @property
    def batch_size(self) -> int:
        """Sequences, empty ones included."""
        return self._layout.batch_size

    @property
    def num_tokens(self) -> int:
        """Rows that belong to a sequence; reads a GPU (once) if the host does not know it yet."""
        return self._layout.num_tokens

    @property
    def max_length(self) -> int:
        """The longest length, or the bound that the layout declares."""
        return self._layout.max_length

    @property
    def dtype(self) -> torch.dtype:
        """Of values; offsets have their own."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Where values and offsets are."""
        return self._values.device

    @property
    def shape(self) -> tuple[int | None, ...]:
        """`(B, None, *feature)`: the ragged dimension has no one size."""
        return (self.batch_size, None, *self._values.shape[1:])

    @property
    def ndim(self) -> int:
        """Dimensions of `(B, j, *feature)`."""
        return self._values.dim() + 1

    def dim(self) -> int:
        """Dimensions of `(B, j, *feature)`."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`; None for the ragged dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.batch_size

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def is_floating_point(self) -> bool:
        """As `Tensor.is_floating_point`."""
        return self._values.is_floating_point()

    # -- same structure, other values ---------------------------------------------------------------------------------

    def with_values(self, new_values: Tensor) -> Self:
        """Other packed values `[rows, *feature]` on the very same layout; nothing is derived again.

        Raises:
            ValueError: fewer rows than tokens, or another device.
        """
        check_tensor(new_values, "new_values")
        if new_values.dim() == 0:
            fail("new_values", "of shape [rows, *feature]", new_values)
        check_same_device(new_values, "new_values", self.device)
        if new_values.shape[0] != self._values.shape[0]:
            _check_rows(new_values, self._layout, "new_values")
        return self._of(new_values, self._layout)

    def map_values(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Any token-wise function `[rows, *feature]` -> `[rows, *other]` that torch dispatch does not know.

        >>> jt, w = JaggedTensor.from_list([torch.ones(3, 2), torch.ones(1, 2)]), torch.ones(2, 5)
        >>> jt.map_values(lambda x: torch.einsum("td,de->te", x, w)).shape
        (2, None, 5)
        """
        result = check_tensor(fn(self._tokens()), "the result of fn")
        if result.dim() == 0 or result.shape[0] != self._values.shape[0]:
            fail(
                "the result of fn",
                f"of {self._values.shape[0]} rows",
                result,
                "map_values is for functions of single tokens",
            )
        return self._with_tokens(result)

    def _tokens(self) -> Tensor:
        """Values to compute on: slack replaced by 0, so that what is there cannot matter, not even 0 * NaN."""
        return zero_slack(self._values, self._layout)

    def _tokens_beside(self, other: JaggedTensor) -> Tensor:
        """The same with as many rows as `other`, a tensor on the same layout that may have other slack."""
        tokens, rows = self._tokens(), other._values.shape[0]
        if tokens.shape[0] < rows:
            return torch.cat((tokens, tokens.new_zeros(rows - tokens.shape[0], *tokens.shape[1:])))
        return tokens if tokens.shape[0] == rows else tokens[:rows]

    def _with_tokens(self, values: Tensor) -> Self:
        """A result of a token-wise function: on this layout (moved along with the values), slack 0 again."""
        layout = self._layout if values.device == self._layout.device else self._layout.to(values.device)
        return self._of(zero_slack(values, layout), layout)

    def _expand(self, per_sequence: Tensor) -> Tensor:
        """`[B, *feature]` -> `[rows, *feature]`: each token gets its sequence's entry."""
        return segment_expand(per_sequence, self.offsets(), self._layout.sequence_ids(self._values.shape[0]))

    # -- to other forms -----------------------------------------------------------------------------------------------

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

    # -- choosing, cutting, joining -----------------------------------------------------------------------------------

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
            if not isinstance(jt, JaggedTensor):
                fail(f"tensors[{i}]", "a JaggedTensor", jt, error=TypeError)
        if not tensors:
            fail("tensors", "at least one JaggedTensor", "none")
        first = tensors[0]
        dim = first._dimension(dim)
        if dim >= 2:
            for jt in tensors[1:]:
                _check_same_layout(first, jt)
            return first._with_tokens(torch.cat([jt._tokens_beside(first) for jt in tensors], dim - 1))
        for i, jt in enumerate(tensors):
            if dim == 1 and jt.batch_size != first.batch_size:
                fail(f"tensors[{i}]", f"of batch size {first.batch_size}, as the first", str(jt.batch_size))
            if jt._values.shape[1:] != first._values.shape[1:]:
                fail(f"tensors[{i}]", f"of feature shape {list(first._values.shape[1:])}, as the first", jt._values)
            check_same_device(jt._values, f"tensors[{i}]", first.device)
        join = indexing.join_batches if dim == 0 else indexing.join_sequences
        return first._of(*join([(jt._values, jt._layout) for jt in tensors]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[JaggedTensor, ...]:
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

    def chunk(self, n: int, dim: int = 0) -> tuple[JaggedTensor, ...]:
        """At most `n` parts of equal batch size (the last may be smaller), as torch.chunk. From `dim=2`: a feature."""
        if dim != 0:
            return torch.chunk(self, n, dim)  # type: ignore[arg-type,return-value]
        if n < 1:
            fail("n", "at least 1", n)
        return self.split(-(-self.batch_size // n) if self.batch_size else [0] * n)

    # -- along a dimension --------------------------------------------------------------------------------------------

    def sum(self, dim: int | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
        """`dim=1`: per sequence, Tensor `[B, *feature]`, 0 for an empty one. None: over all. From 2: a feature."""
        return self._reduce(torch.sum, reductions.sum, dim, keepdim, dtype=dtype)

    def mean(self, dim: int | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
        """As `sum`; the mean of an empty sequence is 0, as of an empty bag in `torch.nn.EmbeddingBag`."""
        return self._reduce(torch.mean, reductions.mean, dim, keepdim, dtype=dtype)

    def amax(self, dim: int | None = None, *, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence. Equal maxima share the gradient."""
        return self._reduce(torch.amax, reductions.amax, dim, keepdim)

    def amin(self, dim: int | None = None, *, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence. Equal minima share the gradient."""
        return self._reduce(torch.amin, reductions.amin, dim, keepdim)

    def logsumexp(self, dim: int, *, keepdim: bool = False) -> Any:
        """As `sum`; -inf for an empty sequence."""
        return self._reduce(torch.logsumexp, reductions.logsumexp, dim, keepdim)

    def std(self, dim: int | None = None, *, correction: float = 1, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence, NaN for one of at most `correction` tokens, as in torch."""
        return self._reduce(torch.std, reductions.std, dim, keepdim, correction=correction)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> JaggedTensor:
        """`dim=1`: over each sequence; from 2: over a feature."""
        return self._scan(torch.softmax, reductions.softmax, dim, dtype)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> JaggedTensor:
        """`dim=1`: over each sequence; from 2: over a feature."""
        return self._scan(torch.log_softmax, reductions.log_softmax, dim, dtype)

    def cumsum(self, dim: int, dtype: torch.dtype | None = None) -> JaggedTensor:
        """`dim=1`: from the start of each sequence; from 2: along a feature."""
        return self._scan(torch.cumsum, reductions.cumsum, dim, dtype)

    def _reduce(
        self,
        dense: Callable[..., Tensor],
        ragged: Callable[..., Tensor],
        dim: int | None,
        keepdim: bool,
        **options: Any,
    ) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        if dim is None:
            return self._reduce_all(dense, **options)
        dim = self._dimension(dim)
        if dim == 1:
            result = ragged(self._values, self._layout, **options)
            return result.unsqueeze(1) if keepdim else result
        return self._with_tokens(dense(self._tokens(), dim=self._feature_dim(dim), keepdim=keepdim, **options))

    def _reduce_all(self, dense: Callable[..., Tensor], **options: Any) -> Tensor:
        if self._layout.known_num_tokens is None and dense in (torch.sum, torch.mean):
            # As in a CUDA graph: slack is 0 for the sum, and the count stays on the device.
            if dense is torch.sum:
                return torch.sum(self._tokens(), **options)
            tokens = self._tokens().to(options.get("dtype"))
            check_floating(tokens, "values", "mean")
            entries = self.offsets()[-1] * tokens.shape[1:].numel()
            wide = torch.float32 if tokens.dtype in (torch.float16, torch.bfloat16) else tokens.dtype
            return (tokens.sum(dtype=wide) / entries).to(tokens.dtype)
        return dense(self._values[: self.num_tokens], **options)

    def _scan(
        self, dense: Callable[..., Tensor], ragged: Callable[..., Tensor], dim: int, dtype: torch.dtype | None
    ) -> JaggedTensor:
        values = self._values if dtype is None else self._values.to(dtype)
        if self._dimension(dim) == 1:
            result = self._of(ragged(values, self._layout), self._layout)
        else:
            result = self._with_tokens(dense(zero_slack(values, self._layout), dim=self._feature_dim(dim)))
        return result if dtype is None else result.to(dtype)  # of integers, cumsum is int64

    def _dimension(self, dim: int) -> int:
        """A dimension of `(B, j, *feature)` counted from 0."""
        if not isinstance(dim, int) or isinstance(dim, bool):
            fail("dim", "an int", dim, error=TypeError)
        if not -self.ndim <= dim < self.ndim:
            fail("dim", f"in -{self.ndim}..{self.ndim - 1}", dim, error=IndexError)
        return dim % self.ndim

    def _feature_dim(self, dim: int) -> int:
        """The dimension of `values` that a feature dimension of the batch is."""
        dim = self._dimension(dim)
        if dim < 2:
            what = "the batch" if dim == 0 else "the ragged dimension"
            remedy = (
                "reduce each sequence first, e.g. jt.sum(1)"
                if dim == 0
                else "it is defined for features (dim >= 2); see jt.unbind()"
            )
            fail("dim", f"a feature dimension (2..{self.ndim - 1})", f"{dim} ({what})", remedy)
        return dim - 1

    # -- dtype, device, autograd --------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As `Tensor.to`; offsets move along and keep their dtype."""
        args = tuple(a._values if isinstance(a, JaggedTensor) else a for a in args)
        values = self._values.to(*args, **kwargs)
        if values is self._values:
            return self
        layout = self._layout
        if values.device != layout.device:
            layout = layout.to(values.device, non_blocking=bool(kwargs.get("non_blocking", False)))
        return self._of(values, layout)

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Self:
        """As `Tensor.cuda`."""
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self.to(target, non_blocking=non_blocking)

    def cpu(self) -> Self:
        """As `Tensor.cpu`."""
        return self.to("cpu")

    def pin_memory(self) -> Self:
        """Values and offsets in page-locked memory, for `.to("cuda", non_blocking=True)`."""
        return self._of(self._values.pin_memory(), self._layout.pin_memory())

    def is_pinned(self) -> bool:
        """Whether values are in page-locked memory."""
        return self._values.is_pinned()

    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that everything reachable from here is in use on `stream`."""
        if self._values.is_cuda:
            self._values.record_stream(stream)
        self._layout.record_stream(stream)

    def detach(self) -> Self:
        """As `Tensor.detach`, on the same layout."""
        return self._of(self._values.detach(), self._layout)

    def clone(self) -> Self:
        """As `Tensor.clone`, on the same layout."""
        return self._of(self._values.clone(), self._layout)

    def contiguous(self) -> Self:
        """As `Tensor.contiguous`, on the same layout."""
        return self._of(self._values.contiguous(), self._layout)

    @property
    def requires_grad(self) -> bool:
        """Of values."""
        return self._values.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As `Tensor.requires_grad_`, of values."""
        self._values.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Self | None:
        """The gradient of `values`, on the same layout."""
        return None if self._values.grad is None else self._of(self._values.grad, self._layout)

    # -- arithmetic and token-wise functions, through the table of jaggedtensor.torch_functions -----------------------

    __add__, __radd__ = _through(torch.add), _through(torch.add, swapped=True)
    __sub__, __rsub__ = _through(torch.sub), _through(torch.sub, swapped=True)
    __mul__, __rmul__ = _through(torch.mul), _through(torch.mul, swapped=True)
    __truediv__, __rtruediv__ = _through(torch.div), _through(torch.div, swapped=True)
    __floordiv__, __rfloordiv__ = _through(torch.floor_divide), _through(torch.floor_divide, swapped=True)
    __mod__, __rmod__ = _through(torch.remainder), _through(torch.remainder, swapped=True)
    __pow__, __rpow__ = _through(torch.pow), _through(torch.pow, swapped=True)
    __matmul__, __rmatmul__ = _through(torch.matmul), _through(torch.matmul, swapped=True)
    __and__, __rand__ = _through(torch.bitwise_and), _through(torch.bitwise_and, swapped=True)
    __or__, __ror__ = _through(torch.bitwise_or), _through(torch.bitwise_or, swapped=True)
    __xor__, __rxor__ = _through(torch.bitwise_xor), _through(torch.bitwise_xor, swapped=True)
    __eq__, __ne__ = _comparison(torch.eq), _comparison(torch.ne)  # elementwise, as of Tensor
    __lt__, __le__, __gt__, __ge__ = (_through(f) for f in (torch.lt, torch.le, torch.gt, torch.ge))
    __neg__, __abs__, __invert__ = _through(torch.neg), _through(torch.abs), _through(torch.bitwise_not)
    __hash__ = object.__hash__
    __array_ufunc__ = None  # numpy's numbers leave arithmetic to the methods above

    add, sub, mul, div, pow = (_through(f) for f in (torch.add, torch.sub, torch.mul, torch.div, torch.pow))
    eq, ne, lt, le = (_through(f) for f in (torch.eq, torch.ne, torch.lt, torch.le))
    gt, ge, maximum, minimum = (_through(f) for f in (torch.gt, torch.ge, torch.maximum, torch.minimum))
    exp, log, sqrt, rsqrt, square = (_through(f) for f in (torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.square))
    abs, neg, sign, round, floor, ceil = (
        _through(f) for f in (torch.abs, torch.neg, torch.sign, torch.round, torch.floor, torch.ceil)
    )
    relu, sigmoid, tanh, clamp = (_through(f) for f in (torch.relu, torch.sigmoid, torch.tanh, torch.clamp))
    masked_fill, logical_not = _through(torch.masked_fill), _through(torch.logical_not)
    isnan, isfinite = _through(torch.isnan), _through(torch.isfinite)
    all, any, max, min, prod, var = (
        _through(f) for f in (torch.all, torch.any, torch.max, torch.min, torch.prod, torch.var)
    )
    argmax, argmin, topk = _through(torch.argmax), _through(torch.argmin), _through(torch.topk)
    unsqueeze, squeeze, transpose = _through(torch.unsqueeze), _through(torch.squeeze), _through(torch.transpose)
    flatten, unflatten = _through(torch.flatten), _through(torch.unflatten)
    matmul = _through(torch.matmul)
    half, bfloat16, double, long = (_through(f) for f in (Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.long))

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor | JaggedTensor,
        values: JaggedTensor | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        return_lse: bool = False,
        backend: str | None = None,
        deterministic: bool = False,
        group: Any = None,
        block_mask: Tensor | None = None,
    ) -> Any:
        """Attention of `query` to every sequence, this tensor being the keys; see `jaggedtensor.attend`.

        >>> keys = JaggedTensor.from_list([torch.randn(n, 2, 16) for n in (5, 0, 3)])  # [tokens, heads, D]
        >>> keys.attend(torch.randn(4, 2, 16)).shape  # one query for every sequence
        torch.Size([3, 4, 2, 16])
        """
        from jaggedtensor.ops.attention import attend

        return attend(
            query,
            self,
            values,
            scale=scale,
            causal=causal,
            window=window,
            return_lse=return_lse,
            backend=backend,
            deterministic=deterministic,
            group=group,
            block_mask=block_mask,
        )

    def prepare(
        self,
        *,
        q_len: int | JaggedTensor | JaggedLayout,
        num_heads: int,
        broadcast: bool = True,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype | None = None,
        train: bool = True,
        backend: str | None = None,
        device: str | None = None,
        block_mask: Tensor | None = None,
    ) -> Self:
        """Build ahead of time the schedules that `attend` on this batch will take. They stay with the layout, so that
        every layer uses them, and move along with `to` and from a DataLoader's worker.

        >>> keys = keys.prepare(q_len=128, num_heads=4, device="h200")
        >>> keys.cuda()  # moved in one transfer  # doctest: +SKIP

        Without it the first `attend` does the same. Nothing is built for kernels that need no schedules, such as the
        CPU's.

        Args:
            q_len: queries of each sequence, or the jagged query (these keys, for self-attention) or its layout.
            num_heads: heads of the query.
            broadcast: one query for all sequences rather than one for each.
            causal, window, backend: as in `attend`.
            value_dim: Dv, if it isn't D.
            dtype: what attention computes in, if it isn't the dtype of this tensor, for example under autocast.
            train: also for the backward pass.
            device: "h200" or "b200", for a batch on a CPU that will be moved there.
            block_mask: as in `attend`, the very tensor. Schedules with a mask do not move along.

        Raises:
            TypeError, ValueError: an argument of a wrong type or out of range.
            NotImplementedError: no backend serves such a call.
        """
        from jaggedtensor.ops.plan import prepare

        prepare(
            self,
            q_len,
            num_heads,
            broadcast=broadcast,
            causal=causal,
            window=window,
            dtype=dtype,
            value_dim=value_dim,
            train=train,
            backend=backend,
            device=device,
            block_mask=block_mask,
        )
        return self

    def explain(
        self,
        query: Tensor | JaggedTensor,
        values: JaggedTensor | None = None,
        *,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        backend: str | None = None,
        device: str | None = None,
        block_mask: Tensor | None = None,
    ) -> Plan:
        """What `attend` would do, without doing it: which kernels and why, how much of a padded batch, how well
        balanced, how much work and what bounds it. Print it, or `plot` it.

        >>> keys.explain(query, device="h200")  # doctest: +SKIP
        Plan for h200: 1,024 sequences, 2,067,608 tokens, longest 4,096
        ...
        >>> keys.explain(query, device="h200").plot("plan.png")

        Reads the lengths, so a GPU is waited for once.

        Args:
            query, values, causal, window, backend, block_mask: as in `attend`.
            device: "h200" or "b200"; the GPU that holds the tensors if left out, for tensors on a CPU their kernels and
                the figures of an H200.
        """
        from jaggedtensor.ops.plan import explain

        return explain(
            self,
            query,
            values,
            causal=causal,
            window=window,
            backend=backend,
            device=device,
            block_mask=block_mask,
        )

    # -- several ranks ------------------------------------------------------------------------------------------------

    def shard(self, mesh: Any, dim: int = 1, *, cost: Callable[[Tensor], Tensor] | None = None) -> Self:
        """This rank's part of a batch that every rank of a one-dimensional mesh (or process group) has.

        `dim=1` cuts each sequence into consecutive parts of equal size, for `keys.attend(query, group=mesh)`; a short
        sequence has empty parts. `dim=0` deals whole sequences, by `cost` of their lengths (tokens if left out).
        The gradient is that of the whole batch, on every rank.

        Raises:
            ValueError: the mesh does not fit, or the batches of the ranks differ; on every rank.
        """
        from jaggedtensor.distributed.shards import shard

        return shard(self, mesh, dim, cost)  # type: ignore[return-value]

    def gather(self) -> Self:
        """The whole batch on every rank, in its order, from what `shard` gave or what was made of it by token."""
        from jaggedtensor.distributed.shards import gather

        return gather(self)  # type: ignore[return-value]

    # -- Python -------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_name = torch.compiler.is_compiling() and func.__name__ in OPERATORS
        handler = OPERATORS[func.__name__] if by_name else HANDLERS.get(func)
        if handler is None:
            fail(
                f"torch function {getattr(func, '__name__', func)!r}",
                "one with a meaning for each token of a JaggedTensor",
                "another",
                "use jt.map_values(fn) for a token-wise function, or jt.unbind() or jt.to_padded()",
                error=NotImplementedError,
            )
        return handler(func, *args, **(kwargs or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._values, self._layout)

    def __repr__(self) -> str:
        feature = "".join(f", {n}" for n in self._values.shape[1:])
        head = f"JaggedTensor(shape=({self.batch_size}, j{feature}), dtype={self.dtype}, device='{self.device}'"
        if not is_readable(self._layout._offsets) or self._layout.known_num_tokens is None:
            return f"{head})"
        picture = picture_of_lengths(self._layout.host_offsets().diff())
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{head}, tokens={self.num_tokens}, longest={self.max_length}, lengths={picture}{grad})"


# Named like builtin types, which the annotations of the class body need.
for _cast in (Tensor.float, Tensor.int, Tensor.bool):
    setattr(JaggedTensor, _cast.__name__, _through(_cast))


def picture_of_lengths(lengths: Tensor, width: int = 24) -> str:
    """Lengths on the CPU as a row of bars; of more than `width`, the longest in each part."""
    bars = " ▁▂▃▄▅▆▇█"
    parts = [int(part.max()) for part in lengths.tensor_split(min(width, max(lengths.numel(), 1))) if part.numel()]
    top = max(parts, default=0)
    drawn = "".join(bars[-(-8 * length // top)] if top else bars[0] for length in parts)
    return f"|{drawn}|"


def _rebuild(values: Tensor, layout: JaggedLayout) -> JaggedTensor:
    return JaggedTensor(values, layout)


def _check_rows(values: Tensor, layout: JaggedLayout, name: str) -> None:
    rows, tokens = values.shape[0], layout.known_num_tokens
    if tokens is not None:
        if tokens > rows:
            fail(
                "offsets[-1]",
                f"at most {rows} (rows of {name})",
                tokens,
                "build offsets with JaggedTensor.from_lengths",
            )
    elif layout.is_static:
        if layout.capacity is not None and rows != layout.capacity:
            fail(
                f"rows of {name}",
                f"{layout.capacity} (max_tokens of the layout)",
                rows,
                "allocate the declared capacity",
            )
    elif not is_readable(layout._offsets) and not layout._offsets.is_meta:
        torch._assert_async(layout._offsets[-1] <= rows, f"offsets[-1] must be at most the rows of {name}")


def _check_same_layout(first: JaggedTensor, other: JaggedTensor) -> None:
    if not first._layout.same_as(other._layout):
        fail(
            "jagged operands",
            "of the same layout (equal offsets)",
            f"{first._layout} and {other._layout}",
            "make one from the other with with_values, or rebuild both on one JaggedLayout",
        )
