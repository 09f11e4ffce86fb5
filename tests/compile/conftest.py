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


@pytest.fixture(scope="session")
def compile_within_rules():
    """Compiles the kernels of a pass of a case, holds them to the rules, and gives them."""
    from jaggedtensor.testing.compile_cases import CASES
    from jaggedtensor.testing.compile_rules import assert_within_rules, recorded_peers
    from jaggedtensor.testing.compiled import Pass, compiled

    peers = recorded_peers(HERE.parents[1] / "benchmarks" / "results" / "compiled_peers.json")

    def make(name, arch, which):
        kernels = compiled(CASES[name], arch, Pass(which))
        assert kernels, f"no Gluon kernel does {which} of {name!r} for {arch}"
        for kernel in kernels:
            assert_within_rules(kernel, arch, Pass(which), peers)
        return kernels

    return make
