"""Compiles for GPUs that need not be there, so outside of the interpreter."""

from pathlib import Path

import pytest

from jaggedtensor import env

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if env.INTERPRETING:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the compiler is not there under TRITON_INTERPRET=1"))
