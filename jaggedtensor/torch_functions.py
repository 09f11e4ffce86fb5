"""How torch functions act on a JaggedTensor: one table from function to handler.

A handler gets the torch function and its arguments. Functions of single tokens run on the packed values; along a
feature dimension the dimension is shifted; along the ragged dimension the JaggedTensor's own method answers; what is
not in the table raises with the remedy. To teach the library a function, add its name to a list below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jaggedtensor.batch.core import check_same_layout
from jaggedtensor.errors import check_same_device, fail
from jaggedtensor.ops.reductions import zero_slack
from jaggedtensor.tensor import HANDLERS, OPERATORS, JaggedTensor

Function = Callable[..., Any]


def register(names: str, handler: Function, spaces: Iterable[Any] = (torch, Tensor, F)) -> None:
    """Give every function of these names, wherever torch has it, one handler."""
    for name in names.split():
        found = [getattr(space, name) for space in spaces if hasattr(space, name)]
        if not found:
            raise AttributeError(f"torch has no function {name}")
        for function in found:
            HANDLERS[function] = handler


# -- functions of single tokens ----------------------------------------------------------------------------------------


def align(operand: Any, jt: JaggedTensor, name: str = "operand") -> Any:
    """An operand as it stands beside `jt.values()`: contract 9, aligned from the right on `(B, j, *feature)`."""
    if isinstance(operand, JaggedTensor):
        check_same_layout(jt, operand)
        if operand.ndim != jt.ndim:
            fail(
                f"dimensions of {name}",
                f"{jt.ndim}, as (B, j, *feature) of the other",
                f"{operand.ndim}",
                "add a feature axis to the one of fewer dimensions: x.unsqueeze(-1)",
            )
        return operand._tokens_beside(jt)
    if not isinstance(operand, Tensor) or operand.dim() == 0:
        return operand
    check_same_device(operand, name, jt.device)
    feature_dims = jt.ndim - 2
    if operand.dim() <= feature_dims:
        return _for_every_token(operand, jt)
    if operand.dim() > jt.ndim:
        fail(f"dimensions of {name}", f"at most {jt.ndim}, as (B, j, *feature) of the jagged operand", operand)
    per_token, shape = operand.dim() - feature_dims, list(operand.shape)
    if shape[per_token - 1] != 1:
        hint = "x[:, None] to give one entry to each sequence"
        if shape[0] == jt.values().shape[0]:
            hint += ", or jt.with_values(x) if x holds one row for each token"
        fail(f"dimension {per_token - 1} of {name}, which stands on the ragged dimension", "1", operand, f"use {hint}")
    operand = operand.squeeze(per_token - 1)
    if per_token == 1 or operand.shape[0] == 1:
        return _for_every_token(operand if per_token == 1 else operand.squeeze(0), jt)
    if operand.shape[0] != jt.batch_size:
        fail(f"dimension 0 of {name}", f"{jt.batch_size} (batch_size) or 1", f"shape {shape}")
    return jt._expand(operand)


def _for_every_token(feature: Tensor, jt: JaggedTensor) -> Tensor:
    """One entry for all tokens; if trained, a row for each, so that slack (0 / 0!) has no part in its gradient."""
    rows = jt.values().shape[0]
    if not feature.requires_grad or not jt.layout.has_slack(rows):
        return feature
    axes = [1] * (jt.ndim - 2 - feature.dim())
    return zero_slack(feature.expand(rows, *axes, *feature.shape), jt.layout)


def _divisor(operand: Any, jt: JaggedTensor) -> Any:
    """An aligned divisor with 1 in slack: integers must not be divided by 0."""
    if isinstance(operand, Tensor) and operand.dim() == jt.ndim - 1:  # it has rows
        return zero_slack(operand, jt.layout, fill=1)
    return operand


def pointwise(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Operands side by side: aligned on the tokens of the first jagged one."""
    if kwargs.get("out") is not None:
        fail(
            "out", "absent for jagged operands", "a tensor", "use the returned JaggedTensor", error=NotImplementedError
        )
    jt = next(a for a in (*args, *kwargs.values()) if isinstance(a, JaggedTensor))
    if func.__name__ == "where" and len(args) + len(kwargs) < 3:
        fail("the operands of where", "a condition and two to choose from", "one", "see jt.map_values for a function")
    operands = [align(a, jt, f"operand {i}") for i, a in enumerate(args)]
    options = {name: align(value, jt, name) for name, value in kwargs.items()}
    if func.__name__ in DIVISIONS and len(operands) == 2:
        operands[1] = _divisor(operands[1], jt)
    return jt._with_tokens(func(*operands, **options))


DIVISIONS = {
    "div", "divide", "floor_divide", "fmod", "remainder", "true_divide", "__truediv__", "__floordiv__", "__mod__",
}  # fmt: skip


register(
    """
    abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma div divide eq
    erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge greater
    greater_equal gt heaviside hypot isclose isfinite isinf isnan isneginf isposinf ldexp le lerp less
    less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit lt masked_fill maximum minimum mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal
    polygamma positive pow rad2deg reciprocal remainder round rsqrt rsub sigmoid sign signbit sin sinc sinh sqrt
    square sub subtract tan tanh true_divide trunc where xlogy
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 rrelu selu
    silu softplus softshrink softsign tanhshrink threshold dropout alpha_dropout
    empty_like full_like ones_like rand_like randn_like zeros_like
    """,
    pointwise,
)
register("double float half bfloat16 int long bool type_as", pointwise, (Tensor,))
for _name in "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge".split():
    HANDLERS[getattr(Tensor, f"__{_name}__")] = OPERATORS[f"__{_name}__"] = pointwise
OPERATORS["pow"] = pointwise


def reflected(forward: Function) -> Function:
    """`Tensor.__rsub__(a, b)` is b - a: what torch.compile makes of `jt - tensor`."""
    return lambda func, a, b: HANDLERS[forward](forward, b, a)


for _name, _forward in (
    ("radd", torch.add), ("rsub", torch.sub), ("rmul", torch.mul), ("rtruediv", torch.div), ("rdiv", torch.div),
    ("rpow", torch.pow), ("rfloordiv", torch.floor_divide), ("rmod", torch.remainder), ("rand", torch.bitwise_and),
    ("ror", torch.bitwise_or), ("rxor", torch.bitwise_xor), ("rmatmul", torch.matmul),
):  # fmt: skip
    _method = getattr(Tensor, f"__{_name}__")
    HANDLERS[_method] = OPERATORS[_method.__name__] = reflected(_forward)


def on_values(func: Function, jt: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions whose other arguments are parameters, not operands to align."""
    if not isinstance(jt, JaggedTensor) or any(isinstance(a, JaggedTensor) for a in (*args, *kwargs.values())):
        fail(
            "the JaggedTensor",
            f"the first argument of {func.__name__}, and the only jagged one",
            "another argument",
            error=TypeError,
        )
    return jt._with_tokens(func(jt._tokens(), *args, **kwargs))


register("linear one_hot", on_values, (F,))


def embedding(func: Function, jt: JaggedTensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A row of the table for every token; frequencies and norms are those of tokens alone."""
    options = dict(zip(("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"), args, strict=False))
    options.update(kwargs)
    rows = jt.values().shape[0]
    if jt.layout.has_slack(rows) and (options.get("max_norm") is not None or options.get("scale_grad_by_freq")):
        # These look at which tokens there are, and slack is none.
        found = func(jt.values()[: jt.num_tokens], weight, **options)
        return jt._of(torch.cat((found, found.new_zeros(rows - found.shape[0], *found.shape[1:]))), jt.layout)
    return on_values(func, jt, weight, **options)


register("embedding", embedding, (F,))


def normed(func: Function, jt: JaggedTensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Norms over trailing features."""
    dims = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    if dims > jt.ndim - 2:
        fail("normalized_shape", f"of at most {jt.ndim - 2} dimensions (the features)", f"{tuple(normalized_shape)}")
    return on_values(func, jt, normalized_shape, *args, **kwargs)


register("layer_norm rms_norm", normed, (F,))


def prelu(func: Function, jt: JaggedTensor, weight: Tensor) -> Any:
    """One slope, or one for each feature of `[rows, features]`."""
    if weight.numel() > 1 and jt.ndim != 3:
        fail("weight", "of one element unless values are [rows, features]", weight)
    return on_values(func, jt, weight)


register("prelu", prelu)


def matmul(func: Function, left: Any, right: Any) -> Any:
    """Token by token: `[..., D] @ [D, E]`; the batch dimensions of a dense operand stand on features only."""
    jt = left if isinstance(left, JaggedTensor) else right
    if isinstance(left, JaggedTensor) and isinstance(right, JaggedTensor):
        check_same_layout(left, right)
        if left.ndim < 4 or right.ndim < 4:
            fail(
                "jagged operands of matmul",
                "matrices for each token, (B, j, n, m)",
                f"{left.shape} and {right.shape}",
                "for dot products of tokens use (a * b).sum(-1), for attention keys.attend(query)",
            )
        return jt._with_tokens(func(left._tokens(), right._tokens_beside(left)))
    if jt is right and jt.ndim < 4:
        fail("the right operand of matmul", "matrices for each token, (B, j, n, m)", str(jt.shape), "use jt @ W.T")
    dense, allowed = (right, max(jt.ndim - 2, 2)) if jt is left else (left, jt.ndim - 2)
    if dense.dim() > allowed:
        fail(
            "the dense operand of matmul",
            f"of at most {allowed} dimensions, so that none stands on the batch",
            dense,
            "use a matrix [D, E], or jt.unbind()",
        )
    return jt._with_tokens(func(left._tokens() if jt is left else left, right if jt is left else right._tokens()))


def at_operator(func: Function, left: Any, right: Any) -> Any:
    """`left @ right`. torch.compile hands `jt @ w` over as `Tensor.matmul(w, jt)` (torch 2.13, `BuiltinVariable`)."""
    if torch.compiler.is_compiling() and not isinstance(left, JaggedTensor):
        if right.ndim > 3:
            fail("@ under torch.compile", "between jagged operands", "a dense one", "use torch.matmul(left, right)")
        left, right = right, left  # w @ jt would have no meaning
    return matmul(torch.matmul, left, right)


HANDLERS[torch.matmul] = matmul
HANDLERS[Tensor.matmul] = HANDLERS[Tensor.__matmul__] = at_operator


# -- along a dimension -------------------------------------------------------------------------------------------------


def by_method(func: Function, jt: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that JaggedTensor has as methods, ragged dimension included."""
    kwargs.pop("_stacklevel", None)  # F.softmax's own business
    return getattr(jt, func.__name__)(*args, **kwargs)


register("sum mean amax amin logsumexp std softmax log_softmax cumsum", by_method)
register("detach clone contiguous is_floating_point", by_method, (torch, Tensor))
register(
    "split chunk",
    lambda func, jt, n, dim=0: getattr(jt, func.__name__)(n) if dim == 0 else along_feature(func, jt, n, dim=dim),
    (torch, Tensor),
)


def along_feature(func: Function, jt: JaggedTensor, *args: Any, dim: int | None = None, **kwargs: Any) -> Any:
    """Functions along a dimension, which must be named and be a feature."""
    if dim is None:
        if not args or not isinstance(args[-1], int):
            fail(
                f"dim of {func.__name__}",
                f"given: a feature dimension (2..{jt.ndim - 1})",
                "none",
                "name one with dim=",
            )
        *args_, dim = args
        args = tuple(args_)
    result = func(jt._tokens(), *args, dim=jt._feature_dim(dim), **kwargs)
    if isinstance(result, Tensor):
        return jt._with_tokens(result)
    return tuple(jt._with_tokens(part) for part in result)


def along_feature_or_all(func: Function, jt: JaggedTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions that reduce everything when no dimension is named; max and min also take two operands."""
    if not isinstance(jt, JaggedTensor) or (args and isinstance(args[0], (JaggedTensor, Tensor))):
        return pointwise(func, jt, *args, **kwargs)
    if not args and kwargs.get("dim") is None:
        return func(jt.values()[: jt.num_tokens])
    return along_feature(func, jt, *args, **kwargs)


register("all any max min prod var median", along_feature_or_all, (torch, Tensor))
register("argmax argmin argsort cumprod sort", along_feature, (torch, Tensor))
register("topk", lambda func, jt, k, dim=-1, **kw: along_feature(func, jt, k, dim=dim, **kw), (torch, Tensor))
register("normalize", lambda func, jt, p=2.0, dim=1, **kw: along_feature(func, jt, p, dim=dim, **kw), (F,))
register("glu softmin", lambda func, jt, dim=-1, **kw: along_feature(func, jt, dim=dim, **kw), (F,))


def cosine_similarity(func: Function, a: JaggedTensor, b: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Along a feature, of two batches or a batch and a dense operand."""
    if not isinstance(a, JaggedTensor):
        a, b = b, a
    return a._with_tokens(func(a._tokens(), align(b, a, "x2"), dim=a._feature_dim(dim), eps=eps))


register("cosine_similarity", cosine_similarity, (F,))


def joined(func: Function, tensors: Any, dim: int = 0) -> Any:
    """As `JaggedTensor.cat`."""
    return JaggedTensor.cat(list(tensors), dim)


def stacked(func: Function, tensors: Any, dim: int = 0) -> Any:
    """Token by token, along a new feature."""
    new = [x.unsqueeze(dim) for x in tensors]
    return JaggedTensor.cat(new, dim if dim >= 0 else new[0].ndim + dim)


register("cat concat concatenate", joined, (torch,))
register("stack", stacked, (torch,))


# -- the shape of features ---------------------------------------------------------------------------------------------


def unsqueeze(func: Function, jt: JaggedTensor, dim: int) -> Any:
    """A new axis among the features."""
    place = dim if dim >= 0 else jt.ndim + 1 + dim
    if not 2 <= place <= jt.ndim:
        fail("dim", f"a place among the features (2..{jt.ndim})", dim, "features come after (B, j)")
    return jt._of(jt.values().unsqueeze(place - 1), jt.layout)


def flatten(func: Function, jt: JaggedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Features into one."""
    return jt._of(func(jt.values(), jt._feature_dim(start_dim), jt._feature_dim(end_dim)), jt.layout)


def of_two_dims(func: Function, jt: JaggedTensor, dim0: int, dim1: int) -> Any:
    """Functions of two feature dimensions."""
    return jt._of(func(jt.values(), jt._feature_dim(dim0), jt._feature_dim(dim1)), jt.layout)


def of_one_dim(func: Function, jt: JaggedTensor, dim: int, *args: Any, **kwargs: Any) -> Any:
    """Functions of one feature dimension."""
    return jt._of(func(jt.values(), jt._feature_dim(dim), *args, **kwargs), jt.layout)


register("unsqueeze", unsqueeze, (torch, Tensor))
register("flatten", flatten, (torch, Tensor))
register("transpose swapaxes movedim", of_two_dims, (torch, Tensor))
register("squeeze unflatten", of_one_dim, (torch, Tensor))


# -- losses ------------------------------------------------------------------------------------------------------------


def loss(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Over tokens only: a mean divides by their number, never by rows of slack. `reduction="none"` is jagged."""
    named = {**dict(zip(("input", "target", "weight"), args, strict=False)), **kwargs}
    jt = next(named[name] for name in ("input", "target") if isinstance(named[name], JaggedTensor))
    of_classes = func in (F.cross_entropy, F.nll_loss)
    if of_classes and not isinstance(named["target"], JaggedTensor):
        fail(
            "target",
            "a JaggedTensor",
            named["target"],
            "for a row for each token use input.with_values(target)",
            error=TypeError,
        )
    names = ("input", "target") if of_classes else ("input", "target", "weight")
    beside = {name: _beside(named.pop(name), jt, name) for name in names if named.get(name) is not None}
    if named.get("reduction", "mean") == "none":
        return jt._with_tokens(func(**beside, **named))
    rows, tokens = jt.values().shape[0], jt.layout.known_num_tokens
    if tokens is not None:
        return func(**{name: x[:tokens] for name, x in beside.items()}, **named)
    # The host does not know the number of tokens, as in a CUDA graph: slack is masked rather than cut off.
    target = beside["target"]
    if of_classes and not target.is_floating_point():
        mask = jt.layout.row_mask(rows).view(-1, *[1] * (target.dim() - 1))
        beside["target"] = torch.where(mask, target, named.get("ignore_index", -100))
        return func(**beside, **named)
    each = jt._with_tokens(func(**beside, **{**named, "reduction": "none"}))
    return each.sum() if named.get("reduction") == "sum" else each.mean()


def _beside(operand: Any, jt: JaggedTensor, name: str) -> Tensor:
    """A row for each of `jt`; a jagged one may have other features, as class numbers have beside logits."""
    if isinstance(operand, JaggedTensor):
        check_same_layout(jt, operand)
        return operand._tokens_beside(jt)
    return torch.as_tensor(align(operand, jt, name)).expand(jt.values().shape)


register(
    "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy huber_loss l1_loss mse_loss nll_loss "
    "smooth_l1_loss soft_margin_loss poisson_nll_loss",
    loss,
    (F,),
)
