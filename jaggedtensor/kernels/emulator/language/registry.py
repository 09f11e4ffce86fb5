"""Which emulated function stands for which object of Triton: by identity, so that any import finds it."""

import importlib
from typing import Any

from jaggedtensor.kernels.emulator.language.values import METHODS

PREFIXES = {
    "gl": ["triton.experimental.gluon.language"],
    "tl": ["triton.language"],
    "both": ["triton.experimental.gluon.language", "triton.language"],
    "hopper": ["triton.experimental.gluon.language.nvidia.hopper"],
    "ampere": ["triton.experimental.gluon.language.nvidia.ampere"],
    "blackwell": ["triton.experimental.gluon.language.nvidia.blackwell"],
    "nvidia": [f"triton.experimental.gluon.language.nvidia.{chip}" for chip in ("ampere", "hopper", "blackwell")],
}
KNOWN: dict[int, Any] = {}  # id of Triton's object (or of a jit function's Python function): what stands for it
_KEPT: list = []  # so that ids stay theirs


def find(path: str) -> list:
    """Triton's objects of that name; older versions lack some, and several modules may share one."""
    prefix, *names = path.split(".")
    found = []
    for module_name in PREFIXES[prefix]:
        here: Any = importlib.import_module(module_name)
        for name in names:
            here = getattr(here, name, None)
            if here is None:
                break
        else:
            found.append(here)
    return found


def emulates(*paths: str, methods: str = ""):
    """Decorator: stands for these objects of Triton, and for these methods (names, separated by spaces) of values."""

    def register(function):
        for path in paths:
            for original in find(path):
                _KEPT.append(original)
                KNOWN[id(original)] = function
                inner = getattr(original, "fn", None)
                if inner is not None:
                    KNOWN[id(inner)] = function
        for method in methods.split():
            METHODS[method] = function
        return function

    return register


def lookup(original) -> Any:
    """What stands for an object, or None."""
    known = KNOWN.get(id(original))
    if known is None and (inner := getattr(original, "fn", None)) is not None:
        known = KNOWN.get(id(inner))
    return known
