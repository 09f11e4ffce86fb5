"""The Hopper kernels compile for an H200 that is not there, within the budgets that their configurations state."""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jaggedtensor.kernels.dispatch import GLUON_NEEDS, triton_version
from jaggedtensor.problem import AttentionArgs, AttentionProblem, QueryKind
from jaggedtensor.testing import AttentionCase

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Hopper", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from jaggedtensor.kernels.hopper.attention_fwd import launch as forward
from jaggedtensor.kernels.hopper.attention_fwd.config import LOADING, budget, select
from jaggedtensor.ops.attention import _window
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.launches import GPUS, _compiling_for

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
H200 = GPUS[(9, 0)]
B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED


def case_of(query, dim, value_dim=None, **options):
    settings = dict(q_length=128, q_lengths=(5, 0, 400), dtype=torch.bfloat16, dim=dim, value_dim=value_dim or dim)
    return AttentionCase((100, 0, 300), query=query, **settings | options)


CASES = {
    "broadcast 128": case_of(B, 128),
    "broadcast 64": case_of(B, 64, dtype=torch.float16),
    "broadcast 32 rows": case_of(B, 128, q_length=32),
    "broadcast 256": case_of(B, 256),
    "jagged 128": case_of(J, 128),
    "jagged 64": case_of(J, 64),
    "jagged 256": case_of(J, 256),
    "causal 128": case_of(J, 128, causal=True),
    "window 64, groups of 4": case_of(J, 64, heads=4, kv_heads=1, window=(30, 5)),
    "per sequence, 80 and 64": case_of(P, 80, 64, q_length=7),
}


def compile_forward(monkeypatch, case, merges=()):
    """The compiled kernels that a case would launch, and the configuration."""
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    q_offsets = query.offsets() if isinstance(query, JaggedTensor) else None
    k, v = keys.values().detach(), values.values().detach()
    problem = AttentionProblem.of(q, k, v, q_offsets, *_window(case.causal, case.window), False)
    problem = replace(problem, device=H200)
    schedule = [torch.zeros(8, 8, dtype=torch.int32), torch.zeros(H200.processors + 1, dtype=torch.int32)]
    schedule += merges
    launches = []

    class Recorder:
        def __init__(self, kernel, options):
            self.kernel, self.options = kernel, options

        def launch(self, programs, descriptors, args, aligned):
            assert aligned
            launches.append((self, programs, [make() for _, make in descriptors], args))

    monkeypatch.setattr(forward, "Variant", Recorder)
    monkeypatch.setattr(forward, "_CALLS", {})
    forward.forward(AttentionArgs(problem, q, k, v, q_offsets, keys.offsets(), 0.1, False, True, schedule))
    made = []
    for variant, programs, descriptors, args in launches:
        with _compiling_for(GPUTarget("cuda", 90, 32)):
            made.append(variant.kernel.warmup(*descriptors, *args, grid=(programs,), **variant.options))
    return *made, select(problem)


def run_tool(name, data, *arguments):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        done = subprocess.run([str(TOOLS / name), *arguments, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def loops_with_products(cubin):
    """Counts of the instructions of each innermost loop that multiplies matrices."""
    labels, code = {}, []
    for line in run_tool("nvdisasm", cubin, "-c").splitlines():
        label = re.match(r"\s*\.(L_x_\d+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z0-9_.]+)(.*)", line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append((instruction[1], instruction[2]))
    ranges = []
    for end, (name, rest) in enumerate(code):
        target = re.search(r"L_x_\d+", rest) if name.startswith("BRA") else None
        if target and labels.get(target[0], end) < end:
            ranges.append((labels[target[0]], end))
    bodies = [
        Counter(name.split(".")[0] for name, _ in code[begin : end + 1])
        for begin, end in ranges
        if not any((a, b) != (begin, end) and begin <= a and b <= end for a, b in ranges if holds_product(code, a, b))
    ]
    return [body for body in bodies if body["HGMMA"] and not body["UTMASTG"]]  # the loop over tiles stores


def holds_product(code, begin, end):
    return any(name.startswith("HGMMA") for name, _ in code[begin : end + 1])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward_compiles_within_its_budgets(monkeypatch, case):
    """TUN-04: roles get the registers that they ask for, hot loops spill none, shared memory is what was estimated."""
    made, config = compile_forward(monkeypatch, case)
    assert made.metadata.shared <= config.shared_memory <= budget(config.ctas)
    # Asking for more than there is drops every request, silently.
    asked = set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", made.asm["ptx"])))
    assert {config.registers, LOADING} <= asked, asked
    loops = loops_with_products(made.asm["cubin"])
    assert len(loops) >= config.consumers
    for body in loops:
        assert not body["STL"], body
        assert body["LDL"] <= 4 * config.windowed, body
        assert body["HGMMA"] * 16 * 64 >= config.block_n * config.block_dv / 4, body


@pytest.mark.parametrize("name", ["broadcast 128", "jagged 128", "jagged 256"])
def test_products_overlap(monkeypatch, name):
    """ptxas says C75xx where it has to wait for each product before it issues the next."""
    made, _ = compile_forward(monkeypatch, CASES[name])
    tool = "ptxas-blackwell" if (TOOLS / "ptxas-blackwell").exists() else "ptxas"
    said = run_tool(tool, made.asm["ptx"].encode(), "-v", "-arch=sm_90a", "-o", "/dev/null")
    assert "registers" in said
    assert not re.search(r"C75\d\d|wgmma", said), said


def test_kernels_of_cut_tiles_compile(monkeypatch):
    merges = [torch.zeros(H200.processors - 1, 6, dtype=torch.int32)]
    forward_made, merge_made, config = compile_forward(monkeypatch, CASES["broadcast 128"], merges)
    assert forward_made.metadata.shared <= config.shared_memory <= budget(config.ctas)
    assert all(not body["STL"] for body in loops_with_products(forward_made.asm["cubin"]))
    assert ".local" not in merge_made.asm["ptx"]
