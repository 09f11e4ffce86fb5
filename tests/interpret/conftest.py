"""The portable kernels in Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest tests/interpret`, which
`make test` runs as a process of its own, since Triton reads the variable when it is imported."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from jaggedtensor import env
from jaggedtensor.problem import Device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if not env.INTERPRETING:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 in a process of its own"))


@contextmanager
def _pretend(processors):
    """Blocks and workers as an H200 would get them, but for the number of its processors."""
    before = Device.__dict__["of"]
    Device.of = classmethod(lambda cls, device: cls("cpu", (9, 0), processors, 227 << 10))
    try:
        yield
    finally:
        Device.of = before


@pytest.fixture(scope="session")
def gpu():
    """`with gpu(processors):` kernels get the blocks and workers that they would get on a smaller H200."""
    return _pretend


@pytest.fixture(autouse=True)
def small_gpu():
    with _pretend(5):
        yield
