"""What a batch holds, and the same structure with other values: the base of `JaggedTensor`'s rooms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.errors import check_same_device, check_tensor, fail, is_readable
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops.reductions import zero_slack
from jaggedtensor.ops.segment import segment_expand


class Batch:
    """Packed values, and the layout that says where each sequence begins; what users see is `JaggedTensor`."""

    def __init__(self, values: Tensor, offsets: Tensor | JaggedLayout, *, validate: bool = True) -> None:
        check_tensor(values, "values", "for a list of tensors use JaggedTensor.from_list")
        if values.dim() == 0:
            fail("values", "of shape [rows, *feature]", values)
        layout = offsets if isinstance(offsets, JaggedLayout) else JaggedLayout(offsets, validate=validate)
        check_same_device(layout._offsets, "offsets", values.device)
        self._values = values
        self._layout = layout
        check_rows(values, layout, "values")

    @classmethod
    def _of(cls, values: Tensor, layout: JaggedLayout) -> Self:
        """Without checks, for rows known to fit."""
        jt = cls.__new__(cls)
        jt._values = values
        jt._layout = layout
        return jt

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
            check_rows(new_values, self._layout, "new_values")
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

    def _tokens_beside(self, other: Batch) -> Tensor:
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

    # -- dimensions ---------------------------------------------------------------------------------------------------

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
        args = tuple(a._values if isinstance(a, Batch) else a for a in args)
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


def check_rows(values: Tensor, layout: JaggedLayout, name: str) -> None:
    """Refuse values with fewer rows than a layout has tokens; on a GPU whose lengths nobody knows, in the graph."""
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


def check_same_layout(first: Batch, other: Batch) -> None:
    """Refuse operands whose sequences are not as long as each other."""
    if not first._layout.same_as(other._layout):
        fail(
            "jagged operands",
            "of the same layout (equal offsets)",
            f"{first._layout} and {other._layout}",
            "make one from the other with with_values, or rebuild both on one JaggedLayout",
        )
