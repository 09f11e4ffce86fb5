"""Processes that want the same kernel at the same time."""

import os
import subprocess
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

PROGRAM = """
import sys, time
from pathlib import Path
import torch, triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from jaggedtensor.testing.compile_once import compile_once
from jaggedtensor.testing.launches import compiling_for

@triton.jit
def double_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) * 2)

folder, me, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
compile_once(folder / "locks")
knobs.compilation.listener = lambda *, cache_hit, **_: print("found" if cache_hit else "compiled")
(folder / me).touch()
while len(list(folder.glob("process*"))) < count:
    time.sleep(0.01)
with compiling_for(GPUTarget("cuda", 90, 32)):
    for n in (16, 32):
        double_kernel.warmup(torch.empty(64), torch.empty(64), n, grid=(1,))
"""


def test_one_compiles_and_others_find_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(tmp_path)]
    processes = [
        subprocess.Popen([*command, f"process{i}", "3"], env=environment, stdout=subprocess.PIPE, text=True)
        for i in range(3)
    ]
    said = [line for process in processes for line in process.communicate(timeout=120)[0].split()]
    assert sorted(said) == ["compiled"] * 2 + ["found"] * 4
