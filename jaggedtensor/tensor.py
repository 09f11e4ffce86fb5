"""JaggedTensor: a batch of sequences of different lengths, packed without padding."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.batch.choosing import Choosing
from jaggedtensor.batch.converting import Converting
from jaggedtensor.batch.reducing import Reducing
from jaggedtensor.errors import fail, is_readable
from jaggedtensor.layout import JaggedLayout

if TYPE_CHECKING:
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


class JaggedTensor(Converting, Choosing, Reducing):
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
