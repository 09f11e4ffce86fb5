"""Unmodified device functions as Python: each is rebuilt over globals in which Triton's names mean emulated ones.

Jit functions become functions, aggregates become classes that lock after `__init__`, modules become proxies,
compile-time values become plain ones. Functions marked `constexpr_function` run as they are, on the host's own names.
"""

import types
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITCallable

from jaggedtensor.kernels.emulator.errors import UnknownBuiltin
from jaggedtensor.kernels.emulator.language import control, shared
from jaggedtensor.kernels.emulator.language.registry import emulates, lookup
from jaggedtensor.kernels.emulator.language.values import Pointer, Scalar, Tensor, Value


class _Kind(type):
    """A class of Triton's in isinstance: what of ours is one of it."""

    test: Callable[[Any], bool]

    def __instancecheck__(cls, value):
        return cls.test(value)


class AnyTensor(metaclass=_Kind):
    test = staticmethod(lambda value: isinstance(value, Scalar | Tensor | Pointer))


class Constexpr(metaclass=_Kind):
    """`gl.constexpr(x)` is x; a compile-time value is whatever is not a run-time one."""

    test = staticmethod(lambda value: not isinstance(value, Value | shared.SharedDescriptor))

    def __new__(cls, value):
        return plain(value)


for _path, _stand_in in {"both.tensor": AnyTensor, "both.constexpr": Constexpr, "both.tuple": tuple}.items():
    emulates(_path)(_stand_in)
emulates("gl.shared_memory_descriptor")(shared.SharedDescriptor)


def plain(value):
    """A compile-time value without Triton's wrappers."""
    while isinstance(value, tl.constexpr):
        value = value.value
    if type(value) is list:
        return [plain(v) for v in value]
    if isinstance(value, tl.tuple):
        return tuple(plain(v) for v in value.values)
    if isinstance(value, tuple):
        items = [plain(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class ModuleProxy:
    """A module in a kernel: its names, translated when asked for."""

    def __init__(self, module: types.ModuleType, translator: "Translator"):
        self.__dict__["_module"] = module
        self.__dict__["_translator"] = translator

    def __getattr__(self, name):
        try:
            value = getattr(self._module, name)
        except AttributeError:
            raise AttributeError(f"module {self._module.__name__} has no attribute {name}") from None
        translated = self._translator(value)
        self.__dict__[name] = translated
        return translated


_OBJECTS = object.__setattr__


def _lock(self, name, value):
    cls = type(self)
    if name not in cls.__fields__:
        raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
    if self.__dict__.get("_done"):
        raise AttributeError(f"cannot assign to field {name!r} of immutable aggregate {cls.__name__}")
    _OBJECTS(self, name, plain(value))


class Translator:
    """Translates objects of a kernel's module, once each."""

    def __init__(self):
        self.memo: dict[int, Any] = {}
        self.kept: list = []  # so that ids stay theirs
        self.builtins = self._builtins()

    @staticmethod
    def _builtins() -> dict:
        names = dict(vars(__import__("builtins")))
        names.update(range=control.loop, min=control.least, max=control.greatest, print=control.device_print)
        return names

    def __call__(self, value):
        """What stands for `value` in a kernel."""
        if isinstance(value, int | float | str | bytes | bool | type(None) | Value | tl.dtype):
            return value
        key = id(value)
        if key in self.memo:
            return self.memo[key]
        known = lookup(value) if not isinstance(value, tl.constexpr) else None
        translated = known if known is not None else self._new(value)
        self.memo[key] = translated
        self.kept.append(value)
        return translated

    def _new(self, value):
        if isinstance(value, tl.constexpr | tl.tuple):
            return self(plain(value))
        if isinstance(value, types.ModuleType):
            return ModuleProxy(value, self)
        if isinstance(value, ConstexprFunction):
            return self._host(value.fn)
        if isinstance(value, JITCallable) or (hasattr(value, "fn") and hasattr(value, "arg_names")):
            return self._function(value.fn, value)
        if isinstance(value, type):
            if getattr(value, "__triton_aggregate__", False):
                return self._aggregate(value)
            return value
        if getattr(value, "__triton_builtin__", False):
            return self._unknown(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, value)
        if type(value) in (list, tuple):
            return type(value)(self(v) for v in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self(v) for v in value))
        return value

    @staticmethod
    def _unknown(value):
        name = f"{getattr(value, '__module__', '?')}.{getattr(value, '__name__', value)}"
        for prefix, short in (
            ("triton.experimental.gluon.language.nvidia.", "gl.nvidia."),
            ("triton.experimental.gluon.language._core.", "gl."),
            ("triton.experimental.gluon.language.", "gl."),
            ("triton.language.core.", "tl."),
            ("triton.language.", "tl."),
        ):
            if name.startswith(prefix):
                name = short + name[len(prefix) :]
                break

        def unknown(*args, **kwargs):
            raise UnknownBuiltin(name)

        return unknown

    def _host(self, function) -> Callable:
        """A constexpr function: on the host's names, compile-time values in and out."""

        def run(*args, **kwargs):
            kwargs.pop("_semantic", None)
            return self(plain(function(*args, **kwargs)))

        run.__name__ = function.__name__
        return run

    def _function(self, function: types.FunctionType, original) -> Callable:
        """The same code over translated globals; names are looked up when the function is first needed."""
        code = function.__code__
        names: dict[str, Any] = {"__builtins__": self.builtins, "__name__": function.__module__}
        cells = tuple(types.CellType() for _ in code.co_freevars)
        rebuilt = types.FunctionType(code, names, function.__name__, None, cells)
        rebuilt.original = id(function)  # type: ignore[attr-defined]
        self.memo[id(original)] = self.memo[id(function)] = rebuilt
        self.kept += [original, function]
        for cell, source in zip(cells, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self(source.cell_contents)
            except ValueError:  # not yet bound
                continue
        for name in _global_names(code):
            if name in function.__globals__:
                names[name] = self(function.__globals__[name])
        if function.__defaults__:
            rebuilt.__defaults__ = tuple(self(d) for d in function.__defaults__)
        if function.__kwdefaults__:
            rebuilt.__kwdefaults__ = {k: self(d) for k, d in function.__kwdefaults__.items()}
        return rebuilt

    def _aggregate(self, cls):
        """An aggregate as a plain class: same fields, same methods, immutable after `__init__`."""
        fields = tuple(cls.__annotations__)
        init = cls.hash_attrs[0]
        defaults = {k: self(v) for k, v in getattr(cls, "__aggregate_defaults__", {}).items()}
        members = {"__fields__": fields, "__setattr__": _lock, "__slots__": ("__dict__",), "__doc__": cls.__doc__}
        new = type(cls.__name__, (), members)
        self.memo[id(cls)] = new
        self.kept.append(cls)
        written = self._function(init.fn if isinstance(init, JITCallable) else init, init) if _by_user(init) else None
        if isinstance(init, ConstexprFunction):
            written = init.fn

        def __init__(instance, *args, **kwargs):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("_semantic", "_generator")}
            if written is not None:
                written(instance, *args, **kwargs)
            else:
                values = dict(defaults)
                values.update(zip(fields, args, strict=False))
                values.update(kwargs)
                if len(args) > len(fields) or set(values) - set(fields):
                    raise TypeError(f"{cls.__name__} has the fields {fields}")
                for name in fields:
                    if name not in values:
                        raise TypeError(f"{cls.__name__}: {name} is missing")
                    setattr(instance, name, values[name])
            for name in fields:
                if name not in instance.__dict__:
                    raise AttributeError(f"constructor for {cls.__name__} did not initialize attribute {name!r}")
            instance.__dict__["_done"] = True

        type.__setattr__(new, "__init__", __init__)
        for name in dir(cls):
            member = getattr(cls, name, None)
            jitted = isinstance(member, ConstexprFunction | JITCallable)
            if jitted or (isinstance(member, types.FunctionType) and not _inherited(name)):
                setattr(new, name, self(member))
        return new


def _inherited(name: str) -> bool:
    """Members that every aggregate has from Python or Triton."""
    return hasattr(object, name) or hasattr(tl.core.base_value, name) or name == "_get_instance"


def _by_user(init) -> bool:
    """Whether an aggregate's `__init__` was written by its author, not made by Triton."""
    function = init.fn if isinstance(init, JITCallable) else init
    return function.__module__ != tl.core.__name__ and not getattr(init, "__triton_builtin__", False)


def _global_names(code: types.CodeType):
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


@emulates("both.aggregate_replace")
def aggregate_replace(instance, **changes):
    values = {name: getattr(instance, name) for name in type(instance).__fields__}
    unknown = set(changes) - set(values)
    if unknown:
        raise TypeError(f"{type(instance).__name__} has no field {sorted(unknown)}")
    return type(instance)(**{**values, **changes})
