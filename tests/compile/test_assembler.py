"""Which ptxas assembles a Gluon kernel: with Triton 3.8 one of its own, whatever the environment says."""

import os
import sys

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

from triton import knobs

from jaggedtensor.kernels.shared import dsl
from jaggedtensor.kernels.shared.direct import Variant
from jaggedtensor.kernels.shared.dsl import gl

TOOLS = vars(type(knobs.nvidia))
OWN, OF_BLACKWELL = TOOLS["ptxas"].default_path, TOOLS["ptxas_blackwell"].default_path
OPTIONS = {"num_warps": 4, "newest_assembler": True}


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Makes Triton one of before 3.9, and its ptxas one of a version, named by the environment."""

    def tell(version):
        path = tmp_path / "ptxas"
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.93'\n")
        path.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        monkeypatch.setattr(dsl, "REINTERPRETS", gl.constexpr(False))
        return str(path)

    return tell


def test_a_kernel_is_assembled_by_the_ptxas_of_triton(told):
    other = told("12.8")
    for options, path in ((OPTIONS, OF_BLACKWELL), ({"num_warps": 4}, OWN)):
        with dsl.assembling(options) as known:
            assert known == {"num_warps": 4}
            assert knobs.nvidia.ptxas.path == path
        assert knobs.nvidia.ptxas.path == os.environ["TRITON_PTXAS_PATH"] == other
    assert OPTIONS["newest_assembler"]


def test_where_triton_has_none_another_will_do_if_it_is_new_enough(told, monkeypatch):
    for name in ("ptxas", "ptxas_blackwell"):
        monkeypatch.setattr(TOOLS[name], "default_path", "nowhere")
    path = told("12.9")
    with dsl.assembling(OPTIONS):
        assert knobs.nvidia.ptxas.path == path
    knobs.NvidiaTool.from_path.cache_clear()
    told("12.8")
    with pytest.raises(RuntimeError, match=r"12\.9 or newer.*12\.8 at .*TRITON_PTXAS_PATH"), dsl.assembling(OPTIONS):
        pass


def test_later_versions_of_triton_choose_by_themselves(told, monkeypatch):
    other = told("12.8")
    monkeypatch.setattr(dsl, "REINTERPRETS", gl.constexpr(True))
    with dsl.assembling(OPTIONS) as known:
        assert known == {"num_warps": 4}
        assert knobs.nvidia.ptxas.path == other


def test_a_launch_compiles_by_the_assembler_that_it_asks_for(told):
    seen = []
    told("12.8")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args, options, knobs.nvidia.ptxas.path))

    Variant(Kernel(), {"num_warps": 4, "newest_assembler": True}).launch(3, [], [7], aligned=False)
    assert seen == [((3,), (7,), {"num_warps": 4}, OF_BLACKWELL)]
