"""Elementwise mathematics, shapes, reductions and scans of blocks."""

import math

import torch
import triton.language as tl
from triton.language import standard

from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language.registry import emulates
from jaggedtensor.kernels.emulator.language.values import (
    OPAQUE,
    STORAGE,
    InFlight,
    Pointer,
    PointerType,
    Scalar,
    Tensor,
    Value,
    as_scalar,
    as_torch,
    binary,
    from_storage,
    joint_part,
    note_work,
    number,
    promote,
    same_rank,
    to_storage,
    torch_dtype,
    type_of,
    wrap,
)

# Making values ------------------------------------------------------------------------------------------------------


@emulates("both.to_tensor")
def to_tensor(x):
    return x if isinstance(x, Value) else as_scalar(x)


@emulates("both.full")
def full(shape, value, dtype, layout=OPAQUE):
    if isinstance(value, Tensor):
        raise TypeError("full takes a scalar")
    shape = [number(n) for n in shape]
    if not shape:
        return Scalar(wrap(number(value), dtype), dtype)
    return Tensor(torch.full(shape, wrap(number(value), dtype), dtype=torch_dtype(dtype)), dtype, layout or OPAQUE)


@emulates("both.zeros")
def zeros(shape, dtype, layout=OPAQUE):
    return full(shape, 0, dtype, layout)


@emulates("gl.full_like")
def full_like(x, value, shape=None, dtype=None, layout=None):
    return full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


@emulates("both.zeros_like")
def zeros_like(x, shape=None, dtype=None, layout=None):
    return full_like(x, 0, shape, dtype, layout)


@emulates("both.arange")
def arange(start, end, layout=OPAQUE):
    return Tensor(torch.arange(number(start), number(end), dtype=torch.int32), tl.int32, layout or OPAQUE)


# Types --------------------------------------------------------------------------------------------------------------


@emulates("both.cast", methods="to cast")
def cast(x, dtype, fp_downcast_rounding=None, bitcast=False):
    if isinstance(x, Pointer):
        if isinstance(dtype, PointerType):
            return Pointer(x.buffer, x.offset, dtype.element_ty)
        element = getattr(dtype, "element_ty", None)
        if element is None:
            raise UnknownBuiltin("a cast from pointer to integer", "language/arithmetic.py")
        return Pointer(x.buffer, x.offset, element)
    x = to_tensor(x)
    if dtype == x.dtype:
        return x
    if bitcast:
        return _bitcast(x, dtype)
    if isinstance(x, Scalar):
        value = x.value
        if dtype.is_int() and isinstance(value, float):
            value = bool(value) if dtype.name == "int1" else 0 if math.isnan(value) or math.isinf(value) else int(value)
        return Scalar(wrap(value, dtype), dtype)
    data = x.data
    if dtype.is_fp8():
        largest = torch.finfo(torch_dtype(dtype)).max
        data = data.float().clamp(-largest, largest)  # cvt.satfinite
    narrow = dtype.primitive_bitwidth < x.dtype.primitive_bitwidth  # two at a time
    note_work("integer", data.numel() // (1 + narrow), x)
    return Tensor(as_torch(Tensor(data, x.dtype), dtype), dtype, x.layout, x.part)


def _bitcast(x, dtype):
    source, target = STORAGE[x.dtype.name], STORAGE[dtype.name]
    if source.itemsize != target.itemsize:
        raise ValueError(f"bitcast of {x.dtype} to {dtype}: their sizes differ")
    data = x.data if isinstance(x, Tensor) else torch.tensor([x.value], dtype=torch_dtype(x.dtype))
    bits = from_storage(to_storage(data, x.dtype).contiguous().view(target), dtype)
    if isinstance(x, Scalar):
        return Scalar(bits.item(), dtype)
    return Tensor(bits, dtype, x.layout, x.part)


# Elementwise --------------------------------------------------------------------------------------------------------


def _unary(block, scalar, dtypes=("fp32", "fp64")):
    def apply(x):
        x = to_tensor(x)
        if x.dtype.name not in dtypes:
            raise TypeError(f"expected one of {dtypes}, got {x.dtype}")
        if isinstance(x, Scalar):
            return Scalar(wrap(scalar(x.value), x.dtype), x.dtype)
        note_work("special", x.data.numel(), x)
        return Tensor(block(x.data), x.dtype, x.layout, x.part)

    return apply


def _by_torch(function):
    return lambda value: function(torch.tensor(value, dtype=torch.float64)).item()


for _name, _function in {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "sqrt_rn": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "floor": torch.floor,
    "ceil": torch.ceil,
}.items():
    emulates(f"both.{_name}", f"tl.math.{_name}", methods=_name)(_unary(_function, _by_torch(_function)))


@emulates("both.abs", "tl.math.abs", methods="abs")
def absolute(x):
    x = to_tensor(x)
    if isinstance(x, Scalar):
        return Scalar(wrap(abs(x.value), x.dtype), x.dtype)
    return Tensor(x.data.abs(), x.dtype, x.layout, x.part)


def _elementwise(operands, function, dtype, result=None, kind="integer"):
    """`function` of torch operands in `dtype`; scalars in, scalar out. `kind` as in `note_work`."""
    result = result or dtype
    if not any(isinstance(x, Tensor) for x in operands):
        tensors = [torch.tensor(wrap(number(x), dtype), dtype=torch_dtype(dtype)) for x in operands]
        return Scalar(wrap(function(*tensors).item(), result), result)
    first = next(x for x in operands if isinstance(x, Tensor))
    for other in operands:
        same_rank(first, other)
    tensors = []
    for x in operands:
        value = as_torch(x, dtype)
        tensors.append(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch_dtype(dtype)))
    data = function(*tensors)
    note_work(kind, data.numel() // (1 + (kind == "packed")), *operands)
    return Tensor(data, result, first.layout, joint_part(*operands))


def _common(*operands):
    dtype, literal = type_of(operands[0]), not isinstance(operands[0], Value)
    for x in operands[1:]:
        dtype = promote(dtype, literal, type_of(x), not isinstance(x, Value))
        literal = literal and not isinstance(x, Value)
    return dtype


def _keeps_nan(propagate_nan):
    return propagate_nan is not None and getattr(propagate_nan, "name", "NONE") == "ALL"


@emulates("both.maximum", methods="maximum")
def maximum(x, y, propagate_nan=None):
    """The greater; a number rather than NaN unless `propagate_nan` is ALL, as max.f32 does."""
    dtype = _common(x, y)
    return _elementwise((x, y), torch.maximum if _keeps_nan(propagate_nan) or dtype.is_int() else torch.fmax, dtype)


@emulates("both.minimum", methods="minimum")
def minimum(x, y, propagate_nan=None):
    dtype = _common(x, y)
    return _elementwise((x, y), torch.minimum if _keeps_nan(propagate_nan) or dtype.is_int() else torch.fmin, dtype)


@emulates("both.clamp", methods="clamp")
def clamp(x, min, max, propagate_nan=None):
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


@emulates("both.where")
def where(condition, x, y):
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        raise UnknownBuiltin("where of pointers", "language/arithmetic.py")
    dtype = _common(x, y)
    operands = [v for v in (condition, x, y) if isinstance(v, Tensor)]
    if not operands:
        chosen = x if number(condition) else y
        return Scalar(wrap(number(chosen), dtype), dtype)
    for other in operands[1:]:
        same_rank(operands[0], other)
    test = condition.data if isinstance(condition, Tensor) else torch.tensor(bool(number(condition)))
    left, right = (
        v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=torch_dtype(dtype))
        for v in (as_torch(x, dtype), as_torch(y, dtype))
    )
    data = torch.where(test != 0, left, right)
    note_work("integer", data.numel(), *operands)
    return Tensor(data, dtype, operands[0].layout, joint_part(*operands))


def _fused(x, y, z):
    """x * y + z, rounded once."""
    if x.dtype == torch.float64:
        return torch.addcmul(z, x, y)
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    return torch.addcmul(z.to(wide), x.to(wide), y.to(wide)).to(x.dtype)


@emulates("both.fma", "tl.math.fma")
def fma(x, y, z, dtype=None):
    return _elementwise((x, y, z), _fused, dtype or _common(x, y, z), kind="float")


@emulates("blackwell.fma2")
def fma2(x, y, z):
    return _elementwise((x, y, z), _fused, _common(x, y, z), kind="packed")


for _name in ("add", "sub", "mul"):

    def _plain(x, y, dtype=None, sanitize_overflow=True, _operation=_name):
        return binary(_operation, x, y)

    def _packed(x, y, _operation=_name):
        return binary(_operation, x, y, packed=True)

    emulates(f"both.{_name}")(_plain)
    emulates(f"blackwell.{_name}2")(_packed)
emulates("blackwell.max2")(lambda x, y, dtype=None: maximum(x, y))
emulates("blackwell.min2")(lambda x, y, dtype=None: minimum(x, y))


@emulates("both.fdiv", "both.div_rn", "tl.math.fdiv", "tl.math.div_rn")
def fdiv(x, y, ieee_rounding=False):
    return binary("truediv", x, y)


@emulates("both.cdiv", "tl.cdiv", methods="cdiv")
def cdiv(x, div):
    if not isinstance(x, Value) and not isinstance(div, Value):
        return (x + div - 1) // div
    return (x + (div - 1)) // div


@emulates("both.umulhi", "tl.math.umulhi")
def umulhi(x, y):
    def high(a, b):
        return (((a.to(torch.int64) & 0xFFFFFFFF) * (b.to(torch.int64) & 0xFFFFFFFF)) >> 32) & 0xFFFFFFFF

    return _elementwise((x, y), high, _common(x, y))


def logical_and(x, y):
    return binary("and", binary("ne", x, 0), binary("ne", y, 0))


emulates(methods="logical_and")(logical_and)
emulates(methods="logical_or")(lambda x, y: binary("or", binary("ne", x, 0), binary("ne", y, 0)))


# Shapes -------------------------------------------------------------------------------------------------------------


def _part(x, change):
    return None if x.part is None else tuple(tuple(change(list(basis))) for basis in x.part)


def _sizes(given) -> list:
    """f(2, 3) and f([2, 3]) alike."""
    return list(given[0]) if len(given) == 1 and not isinstance(given[0], int) else list(given)


@emulates("both.expand_dims", methods="expand_dims")
def expand_dims(x, axis):
    if isinstance(x, Pointer):
        return Pointer(x.buffer, x.offset.unsqueeze(axis), x.element)
    axis = axis if axis >= 0 else axis + x.data.dim() + 1
    return Tensor(x.data.unsqueeze(axis), x.dtype, OPAQUE, _part(x, lambda b: b[:axis] + [0] + b[axis:]))


@emulates(methods="__getitem__")
def getitem(x, index):
    """x[:, None] and the like."""
    index = index if isinstance(index, tuple) else (index,)
    for axis, part in enumerate(index):
        if part is None:
            x = expand_dims(x, axis)
        elif not (isinstance(part, slice) and part == slice(None)):
            raise TypeError("a block is indexed by `:` and `None` only")
    return x


@emulates("both.broadcast_to", methods="broadcast_to")
def broadcast_to(x, *sizes):
    shape = _sizes(sizes)
    if isinstance(x, Scalar):
        return full(shape, x, x.dtype)
    return Tensor(x.data.expand(shape), x.dtype, x.layout, x.part)


@emulates("both.broadcast")
def broadcast(x, y):
    same_rank(x, y)
    shape = torch.broadcast_shapes(tuple(x.shape), tuple(y.shape))
    return broadcast_to(x, list(shape)), broadcast_to(y, list(shape))


@emulates("both.permute", "tl.trans", methods="permute trans")
def permute(x, *dims):
    order = _sizes(dims) or list(range(x.data.dim()))[::-1]
    return Tensor(x.data.permute(order), x.dtype, OPAQUE, _part(x, lambda b: [b[d] for d in order]))


@emulates("both.reshape", "tl.view", methods="reshape view")
def reshape(x, *sizes, can_reorder=False):
    shape = _sizes(sizes)
    part = x.part
    if part is not None:
        if shape[0] != x.shape[0] or any(any(basis[1:]) for basis in part):
            raise UnknownBuiltin("reshape of a dimension that is split over CTAs", "language/arithmetic.py")
        part = tuple((basis[0], *([0] * (len(shape) - 1))) for basis in part)
    if math.prod(shape) != x.data.numel():
        raise ValueError(f"reshape of {x.shape} to {shape}")
    return Tensor(x.data.reshape(shape), x.dtype, OPAQUE, part)


@emulates("both.ravel", methods="ravel")
def ravel(x, can_reorder=False):
    return reshape(x, [x.data.numel()])


@emulates("both.join")
def join(x, y):
    x, y = broadcast(x, y)
    return Tensor(torch.stack((x.data, y.data), -1), x.dtype, OPAQUE, _part(x, lambda b: b + [0]))


@emulates("both.split", methods="split")
def split(x):
    if x.shape[-1] != 2:
        raise ValueError(f"split needs a last dimension of 2, got {x.shape}")
    part = _part(x, lambda b: b[:-1])
    return tuple(Tensor(x.data[..., i].contiguous(), x.dtype, OPAQUE, part) for i in (0, 1))


@emulates("gl.convert_layout", "gl.set_auto_layout")
def convert_layout(x, layout, assert_trivial=False):
    if isinstance(x, InFlight):
        x.used()
    if not isinstance(x, Tensor):
        raise TypeError(f"convert_layout needs a block, got {type(x).__name__}")
    if not assert_trivial:
        note_work("integer", 0, x)
    return Tensor(x.data, x.dtype, layout, x.part)


@emulates("both.gather", methods="gather")
def gather(x, index, axis):
    return Tensor(torch.gather(x.data, axis, index.data.to(torch.int64)), x.dtype, index.layout, joint_part(x, index))


@emulates("both.histogram", methods="histogram")
def histogram(x, num_bins, mask=None, layout=OPAQUE):
    data = x.data if mask is None else x.data[mask.data]
    counts = torch.bincount(data.to(torch.int64), minlength=num_bins)[:num_bins]
    return Tensor(counts.to(torch.int32), tl.int32, layout)


# Reductions ---------------------------------------------------------------------------------------------------------


def _axis(x, axis):
    """The block, its axis from the front, the split of what remains."""
    if axis is None:
        x, axis = ravel(x), 0
    axis = axis if axis >= 0 else axis + x.data.dim()
    if x.part is not None and any(basis[axis] for basis in x.part):
        raise UnknownBuiltin("a reduction across the CTAs of a cluster", "language/arithmetic.py")
    return x, axis, _part(x, lambda b: b[:axis] + b[axis + 1 :])


def _reduced(data, x, axis, dtype, part, keep_dims):
    if keep_dims:
        return Tensor(data.unsqueeze(axis), dtype, OPAQUE, _part(x, lambda b: b[:axis] + [0] + b[axis + 1 :]))
    if data.dim() == 0:
        return Scalar(data.item(), dtype)
    return Tensor(data, dtype, OPAQUE, part)


def _extreme(x, axis, largest):
    """amax or amin that takes a number rather than NaN."""
    data = x.data
    if not data.dtype.is_floating_point:
        return data.amax(axis) if largest else data.amin(axis)
    result = data.amax(axis) if largest else data.amin(axis)
    if bool(torch.isnan(result).any()):
        edge = float("-inf") if largest else float("inf")
        cleaned = torch.where(torch.isnan(data), edge, data)
        best = cleaned.amax(axis) if largest else cleaned.amin(axis)
        result = torch.where(torch.isnan(data).all(axis), float("nan"), best)
    return result


def _narrow_to_32(x):
    if x.dtype.primitive_bitwidth >= 32:
        return x
    return cast(x, tl.float32 if x.dtype.is_floating() else tl.int32)


def _reducer(largest):
    def reduce_extreme(
        input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False, propagate_nan=None
    ):
        x, axis, part = _axis(input, axis)
        if return_indices:
            values = x.data.amax(axis) if largest else x.data.amin(axis)
            first = (x.data == values.unsqueeze(axis)).to(torch.int8).argmax(axis).to(torch.int32)
            return (
                _reduced(values, x, axis, x.dtype, part, keep_dims),
                _reduced(first, x, axis, tl.int32, part, keep_dims),
            )
        x = _narrow_to_32(x)
        note_work("extreme", x.data.numel(), x)
        return _reduced(_extreme(x, axis, largest), x, axis, x.dtype, part, keep_dims)

    return reduce_extreme


reduce_max = emulates("both.max", methods="max")(_reducer(True))
reduce_min = emulates("both.min", methods="min")(_reducer(False))


@emulates("tl.argmax", methods="argmax")
def argmax(input, axis, tie_break_left=True, keep_dims=False):
    return reduce_max(input, axis, True, tie_break_left, keep_dims)[1]


@emulates("tl.argmin", methods="argmin")
def argmin(input, axis, tie_break_left=True, keep_dims=False):
    return reduce_min(input, axis, True, tie_break_left, keep_dims)[1]


def _sum_dtype(dtype, asked):
    if asked is not None:
        return asked
    if dtype.is_int() and dtype.int_bitwidth < 32:
        return tl.int32 if dtype.is_int_signed() else tl.uint32
    return dtype


@emulates("both.sum", methods="sum")
def reduce_sum(input, axis=None, keep_dims=False, dtype=None):
    x = cast(input, _sum_dtype(input.dtype, dtype))
    x, axis, part = _axis(x, axis)
    note_work("float", x.data.numel(), x)
    return _reduced(x.data.sum(axis).to(x.data.dtype), x, axis, x.dtype, part, keep_dims)


@emulates("both.xor_sum", methods="xor_sum")
def xor_sum(input, axis=None, keep_dims=False):
    return reduce(input, axis, lambda a, b: a ^ b, keep_dims)


@emulates("both.reduce_or", methods="reduce_or")
def reduce_or(input, axis=None, keep_dims=False):
    return reduce(input, axis, lambda a, b: a | b, keep_dims)


_NATIVE = {
    id(standard._sum_combine.fn): reduce_sum,
    id(standard._elementwise_max.fn): reduce_max,
    id(standard._elementwise_min.fn): reduce_min,
}


@emulates("both.reduce", methods="reduce")
def reduce(input, axis, combine_fn, keep_dims=False):
    """Pairs of halves, again and again: the order of a tree, as on the chip though not the same."""
    several = isinstance(input, tuple)
    inputs = tuple(input) if several else (input,)
    native = _NATIVE.get(getattr(combine_fn, "original", None) or 0)
    if native is not None and not several:
        return native(input, axis, keep_dims=keep_dims)
    prepared = [_axis(x, axis) for x in inputs]
    axis = prepared[0][1]
    parts = [part for _, _, part in prepared]
    inputs = tuple(x for x, _, _ in prepared)
    values = [Tensor(x.data, x.dtype, OPAQUE, x.part) for x in inputs]
    while (n := values[0].data.shape[axis]) > 1:
        half = n // 2
        low = [Tensor(v.data.narrow(axis, 0, half), v.dtype, OPAQUE, v.part) for v in values]
        high = [Tensor(v.data.narrow(axis, half, half), v.dtype, OPAQUE, v.part) for v in values]
        out = combine_fn(*low, *high)
        values = list(out) if isinstance(out, tuple) else [out]
    results = tuple(
        _reduced(v.data.squeeze(axis), x, axis, v.dtype, part, keep_dims)
        for v, x, part in zip(values, inputs, parts, strict=True)
    )
    return results if several else results[0]


@emulates("both.associative_scan", methods="associative_scan")
def associative_scan(input, axis, combine_fn, reverse=False):
    several = isinstance(input, tuple)
    inputs = tuple(input) if several else (input,)
    prepared = [_axis(x, axis) for x in inputs]
    axis = prepared[0][1]
    values = [x.data.flip(axis) if reverse else x.data for x, _, _ in prepared]
    steps = [[v.narrow(axis, 0, 1) for v in values]]
    for i in range(1, values[0].shape[axis]):
        left = [Tensor(v, x.dtype) for v, x in zip(steps[-1], inputs, strict=True)]
        right = [Tensor(v.narrow(axis, i, 1), x.dtype) for v, x in zip(values, inputs, strict=True)]
        out = combine_fn(*left, *right)
        steps.append([v.data for v in (out if isinstance(out, tuple) else (out,))])
    results = []
    for k, x in enumerate(inputs):
        data = torch.cat([step[k] for step in steps], axis)
        results.append(Tensor(data.flip(axis) if reverse else data, x.dtype, x.layout, x.part))
    return tuple(results) if several else results[0]


@emulates("both.cumsum", methods="cumsum")
def cumsum(input, axis=0, reverse=False, dtype=None):
    x = cast(input, _sum_dtype(input.dtype, dtype))
    data = x.data.flip(axis).cumsum(axis).flip(axis) if reverse else x.data.cumsum(axis)
    return Tensor(data.to(x.data.dtype), x.dtype, x.layout, x.part)


@emulates("both.cumprod", methods="cumprod")
def cumprod(input, axis=0, reverse=False):
    data = input.data.flip(axis).cumprod(axis).flip(axis) if reverse else input.data.cumprod(axis)
    return Tensor(data.to(input.data.dtype), input.dtype, input.layout, input.part)


@emulates("gl.dot_fma")
def dot_fma(a, b, acc):
    return Tensor(
        (a.data.to(torch.float32) @ b.data.to(torch.float32) + acc.data).to(acc.data.dtype), acc.dtype, acc.layout
    )


@emulates("both.map_elementwise")
def map_elementwise(*args, **kwargs):
    raise UnknownBuiltin("map_elementwise", "language/arithmetic.py")
