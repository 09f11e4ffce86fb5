"""Imports point down, importing the library costs no more than torch, and what is public is documented."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaggedtensor

ROOT = Path(jaggedtensor.__file__).parent

# From the bottom up: a module imports from its own layer and those before it. The longest prefix counts.
LAYERS = [
    ["errors", "env", "version"],
    ["problem", "kernels.shared", "kernels.toolchain", "block_masks"],
    ["schedules"],
    ["layout"],
    ["schedules.valid_tiles", "schedules.last_round", "schedules.deal", "schedules.stream_k", "schedules.build"],
    ["kernels.cpu", "kernels.portable", "kernels.hopper", "kernels.blackwell", "kernels.emulator"],
    ["kernels.dispatch"],
    ["ops.segment", "ops.reductions", "ops.indexing", "ops.conversions", "ops.reference", "ops.contract"],
    ["batch", "tensor"],
    ["torch_functions", "interop", "ops.attention", "ops.fp8"],
    ["ops.plan", "schedules.plot"],
    ["nn", "data", "distributed", "explain"],
    ["testing"],
    ["doctor"],
]
# Methods that hand over to what is built on their class, and import it when they are called.
UPWARD_WHEN_CALLED = {("tensor", "ops.attention"), ("tensor", "ops.plan"), ("layout", "schedules.build")}
UPWARD_WHEN_CALLED |= {("tensor", "distributed"), ("ops.attention", "distributed"), ("kernels.dispatch", "doctor")}
FAMILIES = {"kernels.cpu", "kernels.portable", "kernels.hopper", "kernels.blackwell"}
PACKAGES = {"", "ops", "kernels"}  # packages that hold layers rather than belong to one


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text())


def layer_of(name):
    best = max((p for layer in LAYERS for p in layer if name == p or name.startswith(p + ".")), key=len, default=None)
    return best, next((i for i, layer in enumerate(LAYERS) if best in layer), None)


def imports_of(tree):
    """Our modules that are imported, and whether at the top; imports for type checkers alone are left out."""
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    known = {name for name, _ in MODULES}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if inside(name) in known else node.module for name in whole]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "jaggedtensor":
                yield inside(name), node in tree.body


def inside(name):
    return name.removeprefix("jaggedtensor").lstrip(".")


MODULES = list(modules())


def test_every_module_has_a_layer():
    for name, _ in MODULES:
        assert name in PACKAGES or layer_of(name)[1] is not None, f"{name} has no layer in LAYERS"


def test_imports_point_down():
    wrong = []
    for name, tree in MODULES:
        own, rank = layer_of(name)
        for other, at_top in imports_of(tree) if name not in PACKAGES else ():
            prefix, other_rank = layer_of(other)
            allowed = other in PACKAGES or other_rank <= rank or (not at_top and (own, prefix) in UPWARD_WHEN_CALLED)
            if not allowed:
                wrong.append(f"{name} imports {other}")
    assert not wrong, wrong


def test_kernel_families_do_not_import_one_another():
    for name, tree in MODULES:
        own, _ = layer_of(name)
        if own in FAMILIES:
            others = {layer_of(other)[0] for other, _ in imports_of(tree)} & FAMILIES
            assert others <= {own}, f"{name} imports {others - {own}}"


@pytest.mark.parametrize("apart", ["kernels.emulator", "testing"])
def test_the_library_does_not_need_what_is_for_tests(apart):
    for name, tree in MODULES:
        for other, _ in imports_of(tree):
            # What is for tests may use the emulator; nothing else may use either.
            assert not other.startswith(apart) or name.startswith((apart, "testing", "doctor")), (
                f"{name} imports {other}"
            )


@pytest.mark.parametrize("module", ["jaggedtensor", "jaggedtensor.testing"])
def test_the_import_loads_nothing_heavy_beyond_torch(module):
    code = f"""
import json, sys
import torch, torch.utils.data
before = set(sys.modules)
import {module}
print(json.dumps(sorted({{name.split('.')[0] for name in set(sys.modules) - before}})))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    heavy = {"triton", "numpy", "pyarrow", "matplotlib", "einops", "hypothesis", "pytest", "greenlet"}
    assert not loaded & heavy
    assert loaded - set(sys.stdlib_module_names) <= {"jaggedtensor", "typing_extensions"}


def public():
    """Functions, classes and their methods that a user may come across."""
    for info in pkgutil.walk_packages(jaggedtensor.__path__, "jaggedtensor."):
        parts = info.name.split(".")
        if "kernels" not in parts and not any(part.startswith("_") for part in parts):
            yield from of_module(importlib.import_module(info.name))


def of_module(module):
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value
        elif inspect.isclass(value):
            yield f"{module.__name__}.{name}", value
            yield from of_class(f"{module.__name__}.{name}", value)


def of_class(path, cls):
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{path}.{name}", function


def test_what_is_public_is_documented():
    missing = [name for name, value in public() if not value.__doc__]
    assert not missing, missing


def test_every_module_says_what_it_is():
    missing = [name for name, tree in MODULES if not ast.get_docstring(tree) and name != "version"]
    assert not missing, missing
