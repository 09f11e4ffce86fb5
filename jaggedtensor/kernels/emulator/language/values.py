"""Scalars, blocks and pointers as a kernel sees them: Triton's types and promotion, torch's arithmetic.

A compile-time value (`constexpr`) is the plain Python value. A run-time scalar is a `Scalar`, which wraps as its type
does and divides as C does; plain Python integers would hide errors of sign and width.
"""

import struct
from typing import Any, NamedTuple

import greenlet
import torch
import triton.language as tl

from jaggedtensor.kernels.emulator.errors import UnknownBuiltin

# Registers hold unsigned types wider than a byte in the next wider signed one, since torch has few operations on them.
REGISTER = {
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
STORAGE = REGISTER | {"int1": torch.uint8, "uint16": torch.int16, "uint32": torch.int32}
FROM_TORCH = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_UNSIGNED_MASK = {"uint16": 0xFFFF, "uint32": 0xFFFFFFFF}
_FLOAT = struct.Struct("f")


def torch_dtype(dtype) -> torch.dtype:
    """The torch type that registers hold `dtype` in."""
    try:
        return REGISTER[dtype.name]
    except KeyError:
        raise UnknownBuiltin(f"dtype {dtype}", "language/values.py") from None


def to_storage(data: torch.Tensor, dtype) -> torch.Tensor:
    """Registers to the type that memory holds."""
    return data.to(STORAGE[dtype.name]) if STORAGE[dtype.name] != data.dtype else data


def from_storage(data: torch.Tensor, dtype) -> torch.Tensor:
    """What memory holds to registers."""
    if dtype.name in _UNSIGNED_MASK:
        return data.to(REGISTER[dtype.name]) & _UNSIGNED_MASK[dtype.name]
    return data.to(REGISTER[dtype.name]) if REGISTER[dtype.name] != data.dtype else data


class BlockType(NamedTuple):
    """The type of a block, as `x.type` gives it."""

    element_ty: Any
    shape: list
    layout: Any

    @property
    def scalar(self):
        return self.element_ty

    def is_block(self):
        return True

    def get_block_shapes(self):
        return self.shape


class Opaque:
    """A register layout that nothing depends on here: it absorbs every question."""

    rank = 2

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __repr__(self):
        return "<register layout>"


OPAQUE = Opaque()
METHODS: dict[str, Any] = {}  # what language/builtins.py registers as methods of blocks and scalars


class Value:
    """What scalars, blocks and pointers share: operators go to `binary`, methods to the builtins."""

    __slots__ = ()

    def __getattr__(self, name):
        method = METHODS.get(name)
        if method is None:
            if name.startswith("__"):
                raise AttributeError(name)
            raise UnknownBuiltin(f"tensor.{name}", "language/builtins.py")
        return lambda *args, **kwargs: method(self, *args, **kwargs)

    def __iter__(self):
        raise TypeError("a block cannot be iterated over")

    __hash__ = None  # type: ignore[assignment]


class InFlight:
    """What stands for a block that an engine has not made yet: any use of it is a finding."""

    def used(self, *args):
        raise NotImplementedError


class Scalar(Value):
    """A run-time scalar: a Python number and its type."""

    __slots__ = ("dtype", "value")

    def __init__(self, value, dtype):
        self.value = value
        self.dtype = dtype

    shape: tuple = ()
    numel = 1

    @property
    def type(self):
        return self.dtype

    def __bool__(self):
        return bool(self.value)

    def __repr__(self):
        return f"{self.value}:{self.dtype}"


class Tensor(Value):
    """A block in registers: `data` (torch), its type, a layout, and which CTA of the cluster holds which part.

    `part` is None where every CTA could compute all of it, else the bases of the layout's split over CTAs. `origin`
    is what a model of cost must know of how it was made: the number of the event that loads it, "product", or None.
    """

    __slots__ = ("data", "dtype", "layout", "origin", "part")

    def __init__(self, data, dtype, layout=OPAQUE, part=None):
        self.origin = None
        self.data = data
        self.dtype = dtype
        self.layout = layout
        self.part = part

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def numel(self):
        return self.data.numel()

    @property
    def type(self):
        return BlockType(self.dtype, self.shape, self.layout)

    @property
    def T(self):
        return METHODS["permute"](self, (1, 0))

    def __bool__(self):
        raise TypeError("the truth of a block is not defined: reduce it, or use & and |")

    def __getitem__(self, index):
        return METHODS["__getitem__"](self, index)

    def __repr__(self):
        return f"block {self.shape} of {self.dtype}"


class PointerType(NamedTuple):
    """The type of a pointer, as `p.dtype` gives it."""

    element_ty: Any

    @property
    def scalar(self):
        return self

    def is_ptr(self):
        return True

    def is_block(self):
        return False


class Pointer(Value):
    """Addresses in one global tensor: an element offset, or a block of them (int64)."""

    __slots__ = ("buffer", "element", "offset")

    def __init__(self, buffer, offset, element):
        self.buffer = buffer
        self.offset = offset
        self.element = element

    @property
    def dtype(self):
        return PointerType(self.element)

    @property
    def type(self):
        return PointerType(self.element) if not self.is_block else BlockType(self.dtype, self.shape, OPAQUE)

    @property
    def is_block(self):
        return isinstance(self.offset, torch.Tensor)

    @property
    def shape(self):
        return list(self.offset.shape) if self.is_block else []

    def _shifted(self, other, sign):
        if isinstance(other, Pointer):
            raise TypeError("two pointers cannot be added")
        step = other.data.to(torch.int64) if isinstance(other, Tensor) else number(other)
        here = self.offset
        if isinstance(here, torch.Tensor) and isinstance(step, torch.Tensor) and here.dim() != step.dim():
            raise ValueError(f"cannot broadcast, rank mismatch: {list(here.shape)}, {list(step.shape)}")
        return Pointer(self.buffer, here + sign * step, self.element)

    def __add__(self, other):
        return self._shifted(other, 1)

    __radd__ = __add__

    def __sub__(self, other):
        return self._shifted(other, -1)

    def __getitem__(self, index):
        return METHODS["__getitem__"](self, index)

    def __repr__(self):
        return f"pointer into {self.buffer.name}"


def note_work(kind: str, elements: int, *operands) -> None:
    """Tells the role at work what arithmetic on a block takes, for a model of cost: instructions of each of its warps.

    `kind` is the pipe: "float", "packed" (two fp32 in an instruction), "integer" (also comparisons, conversions,
    choices), "special" (exponentials and the like), or "extreme" (a reduction that all that follows must wait for).
    """
    role = getattr(greenlet.getcurrent(), "role", None)
    if role is None or not role.cluster.report.keep_events:
        return
    ctas = 1
    for x in operands:
        if type(x) is Tensor:
            if x.origin.__class__ is int:
                role.work.append(["after", x.origin])
            if x.part is not None:  # this CTA has only a share of it
                ctas = max(ctas, 2 ** sum(any(basis) for basis in x.part))
    count = -(-elements // (32 * role.num_warps * ctas))
    if role.work and role.work[-1][0] == kind:
        role.work[-1][1] += count
    else:
        role.work.append([kind, count])


def number(x):
    """The Python number of a literal or a scalar."""
    if isinstance(x, InFlight):
        x.used()
    return x.value if isinstance(x, Scalar) else x


def literal_type(x):
    """The type that Triton gives a Python number."""
    if isinstance(x, InFlight):
        x.used()
    if isinstance(x, bool):
        return tl.int1
    if isinstance(x, int):
        if -(2**31) <= x < 2**31:
            return tl.int32
        return tl.uint32 if 2**31 <= x < 2**32 else tl.int64 if x < 2**63 else tl.uint64
    if isinstance(x, float):
        return tl.float32
    raise TypeError(f"expected a number, a scalar or a block, got {type(x).__name__}: {x!r}")


def type_of(x):
    return x.dtype if isinstance(x, Value) else literal_type(x)


def wrap(value, dtype):
    """A Python number as `dtype` would hold it."""
    if dtype.is_floating():
        if dtype.name == "fp32":
            try:
                return _FLOAT.unpack(_FLOAT.pack(value))[0]
            except OverflowError:
                return float("inf") if value > 0 else float("-inf")
        if dtype.name == "fp64":
            return float(value)
        return torch.tensor(value, dtype=torch_dtype(dtype)).item()
    if dtype.name == "int1":
        return bool(value)
    bits = dtype.int_bitwidth
    value = int(value) & ((1 << bits) - 1)
    return value - (1 << bits) if dtype.is_int_signed() and value >> (bits - 1) else value


def as_scalar(x, dtype=None) -> Scalar:
    if isinstance(x, Scalar) and (dtype is None or dtype == x.dtype):
        return x
    dtype = dtype or literal_type(x)
    return Scalar(wrap(number(x), dtype), dtype)


def trim(data: torch.Tensor, dtype) -> torch.Tensor:
    """A result in registers, cut to the width of an unsigned type."""
    mask = _UNSIGNED_MASK.get(dtype.name)
    return data if mask is None else data & mask


_FLOATS = ("fp64", "fp32", "fp16", "bf16")


_PROMOTED: dict[tuple, Any] = {}


def promote(a, a_literal, b, b_literal, division=False):
    """The type that two operands are computed in."""
    key = (a.name, a_literal, b.name, b_literal, division)
    dtype = _PROMOTED.get(key)
    if dtype is None:
        dtype = _PROMOTED[key] = _promoted(a, a_literal, b, b_literal, division)
    return dtype


def _promoted(a, a_literal, b, b_literal, division):
    """The type that two operands are computed in (triton.language.semantic.computation_type_impl)."""
    if a_literal != b_literal:
        literal, other = (a, b) if a_literal else (b, a)
        if literal.kind().value <= other.kind().value:
            return tl.float32 if division and other.name in ("fp16", "bf16") else other
    names = (a.name, b.name)
    if "fp64" in names:
        return tl.float64
    if "fp32" in names:
        return tl.float32
    if "fp16" in names:
        return tl.float32 if division else tl.float16
    if "bf16" in names:
        both = a.name == b.name
        return tl.bfloat16 if both and not division else tl.float32
    if a.is_fp8() and b.is_fp8():
        return a if a == b else tl.float16
    if not a.is_int() or not b.is_int():
        raise TypeError(f"no common type of {a} and {b}")
    if division and a.is_int_signed() != b.is_int_signed():
        raise TypeError(f"cannot divide or take the remainder of {a} and {b}: their signs differ")
    if a.is_int_signed() == b.is_int_signed():
        return a if a.int_bitwidth > b.int_bitwidth else b
    unsigned, signed = (b, a) if a.is_int_signed() else (a, b)
    return unsigned if unsigned.int_bitwidth >= signed.int_bitwidth else signed


def _truncated_quotient(a, b):
    if isinstance(a, int):
        q = abs(a) // abs(b)
        return q if (a < 0) == (b < 0) else -q
    return a / b


def _truncated_remainder(a, b):
    if isinstance(a, int):
        return a - b * _truncated_quotient(a, b)
    return torch.fmod(torch.tensor(a), b).item()


class Operator(NamedTuple):
    """One operator: on Python numbers, on torch tensors, and the kind of its result."""

    scalar: Any
    block: Any
    kind: str = "arithmetic"  # or "compare", "divide", "bits"


OPERATORS = {
    "add": Operator(lambda a, b: a + b, torch.add),
    "sub": Operator(lambda a, b: a - b, torch.sub),
    "mul": Operator(lambda a, b: a * b, torch.mul),
    "truediv": Operator(lambda a, b: a / b if b else torch.div(torch.tensor(float(a)), b).item(), torch.div, "divide"),
    "floordiv": Operator(_truncated_quotient, lambda a, b: torch.div(a, b, rounding_mode="trunc"), "remainder"),
    "mod": Operator(_truncated_remainder, torch.fmod, "remainder"),
    "and": Operator(lambda a, b: a & b, torch.bitwise_and, "bits"),
    "or": Operator(lambda a, b: a | b, torch.bitwise_or, "bits"),
    "xor": Operator(lambda a, b: a ^ b, torch.bitwise_xor, "bits"),
    "lshift": Operator(lambda a, b: a << b, torch.bitwise_left_shift, "bits"),
    "rshift": Operator(lambda a, b: a >> b, torch.bitwise_right_shift, "bits"),
    "lt": Operator(lambda a, b: a < b, torch.lt, "compare"),
    "le": Operator(lambda a, b: a <= b, torch.le, "compare"),
    "gt": Operator(lambda a, b: a > b, torch.gt, "compare"),
    "ge": Operator(lambda a, b: a >= b, torch.ge, "compare"),
    "eq": Operator(lambda a, b: a == b, torch.eq, "compare"),
    "ne": Operator(lambda a, b: a != b, torch.ne, "compare"),
}


# What int32 scalars, by which kernels count, are spared the long way for.
_QUICK = {name: OPERATORS[name].scalar for name in "add sub mul and or xor floordiv mod lt le gt ge eq ne".split()}


def same_rank(a, b):
    """Gluon broadcasts blocks of equal rank only."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.data.dim() != b.data.dim():
        raise ValueError(f"cannot broadcast, rank mismatch: {a.shape}, {b.shape}")


def joint_part(*values):
    """How results of an elementwise operation are split over the CTAs."""
    return next((v.part for v in values if isinstance(v, Tensor) and v.part is not None), None)


def as_torch(x, dtype):
    """An operand of a torch operation in `dtype`: a tensor, or a number."""
    if isinstance(x, Tensor):
        wanted = torch_dtype(dtype)
        if x.data.dtype == wanted and x.dtype == dtype:
            return x.data
        return trim(x.data.to(wanted), dtype)
    value = wrap(number(x), dtype)
    return value


def binary(name, a, b, packed=False):
    """`a name b` with Triton's promotion and C's integer arithmetic."""
    if type(a) is Scalar and a.dtype is tl.int32 and name in _QUICK:
        other = b if type(b) is int else b.value if type(b) is Scalar and b.dtype is tl.int32 else None
        if other is not None and -(2**31) <= other < 2**31:
            result = _QUICK[name](a.value, other)
            if result.__class__ is bool:
                return Scalar(result, tl.int1)
            return Scalar((result + 2**31 & 0xFFFFFFFF) - 2**31, tl.int32)
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return NotImplemented
    op = OPERATORS[name]
    a_literal, b_literal = not isinstance(a, Value), not isinstance(b, Value)
    try:
        a_type, b_type = type_of(a), type_of(b)
    except TypeError:
        return NotImplemented
    dtype = promote(a_type, a_literal, b_type, b_literal, op.kind in ("divide", "remainder"))
    if op.kind == "divide" and dtype.is_int():
        dtype = tl.float32
    result = tl.int1 if op.kind == "compare" else dtype
    if op.kind == "bits" and dtype.is_floating():
        raise TypeError(f"{name} of {a_type} and {b_type}: integers are needed")
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        x, y = wrap(number(a), dtype), wrap(number(b), dtype)
        return Scalar(wrap(op.scalar(x, y), result), result)
    same_rank(a, b)
    x, y = as_torch(a, dtype), as_torch(b, dtype)
    if op.kind == "arithmetic" and isinstance(x, bool | torch.Tensor) and dtype.name == "int1":
        raise TypeError(f"{name} of booleans")
    if not isinstance(x, torch.Tensor):
        x = torch.tensor(x, dtype=torch_dtype(dtype))
    data = op.block(x, y)
    first = a if isinstance(a, Tensor) else b
    made = Tensor(trim(data, result), result, first.layout, joint_part(a, b))
    if not dtype.is_floating() or op.kind == "compare":
        note_work("integer", data.numel(), a, b)
    elif name not in ("add", "sub") or not any(isinstance(x, Tensor) and x.origin == "product" for x in (a, b)):
        note_work("packed" if packed else "float", data.numel() // (1 + packed), a, b)  # else one multiply-add
    if name == "mul":
        made.origin = "product"
    return made


def _negative(x):
    return binary("sub", 0, x) if x.dtype.is_int() else binary("mul", x, -1.0)


def _inverse(x):
    return binary("xor", x, True if x.dtype.name == "int1" else -1)


def _install():
    """Python's operators on values."""

    def forward(name):
        return lambda self, other: binary(name, self, other)

    def backward(name):
        return lambda self, other: binary(name, other, self)

    for kind in (Scalar, Tensor):
        for name in OPERATORS:
            setattr(kind, f"__{name}__", forward(name))
            if OPERATORS[name].kind != "compare":
                setattr(kind, f"__r{name}__", backward(name))
        for name, method in {"neg": _negative, "pos": lambda x: x, "invert": _inverse}.items():
            setattr(kind, f"__{name}__", method)


_install()
