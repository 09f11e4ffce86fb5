"""The examples in the documentation run and give what they say."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest
import torch

import jaggedtensor
from jaggedtensor.testing import make_jagged

ROOT = Path(jaggedtensor.__file__).parent


def modules_with_examples():
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if ">>> " in text and any(">>> " in (ast.get_docstring(node) or "") for node in documented(ast.parse(text))):
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def documented(tree):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def names_for_examples():
    """What every example may use without saying so."""
    return {
        "torch": torch,
        "F": torch.nn.functional,
        "jt": make_jagged([3, 0, 2], 4, dtype=torch.float32),
        "keys": make_jagged([300, 0, 20], 4, 64, dtype=torch.float32),
        "query": torch.randn(128, 4, 64),
        **{name: value for name, value in vars(jaggedtensor).items() if not name.startswith("_")},
    }


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_of(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    module = importlib.import_module(name)
    torch.manual_seed(0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, extraglobs=names_for_examples(), optionflags=flags, raise_on_error=False)
    assert not result.failed
