"""The Blackwell forward compiles for GPUs that are not there, within the budgets that its configurations state."""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jaggedtensor.kernels.dispatch import GLUON_NEEDS, choose, triton_version
from jaggedtensor.problem import AttentionArgs, AttentionProblem, Device, QueryKind
from jaggedtensor.testing import AttentionCase

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from jaggedtensor.kernels.blackwell.attention_fwd import launch as forward
from jaggedtensor.kernels.blackwell.attention_fwd.config import ROWS, SHARED_MEMORY, select
from jaggedtensor.ops.attention import _window
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.launches import _compiling_for

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
B200 = Device("cuda", (10, 0), 148, 227 << 10)
B300 = Device("cuda", (10, 3), 148, 227 << 10)
B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED
FA4_SOFTMAX = 514  # instructions for each block of 128 keys that FlashAttention-4's softmax has, compiled for sm_100a
OLDER = triton_version() < (3, 9)  # takes a maximum in 26 instructions more


def case_of(query, dim, value_dim=None, **options):
    settings = dict(q_length=128, q_lengths=(5, 0, 400), dtype=torch.bfloat16, dim=dim, value_dim=value_dim or dim)
    return AttentionCase((100, 0, 300), query=query, **settings | options)


CASES = {
    "streams 128": (B200, case_of(B, 128)),
    "streams 128, B300": (B300, case_of(B, 128)),
    "streams 64": (B200, case_of(B, 64, dtype=torch.float16)),
    "streams, 5 rows of 3 heads, causal": (B200, case_of(P, 80, 64, q_length=5, heads=6, kv_heads=2, causal=True)),
    "tiles 128": (B200, case_of(J, 128)),
    "tiles 128, B300": (B300, case_of(J, 128)),
    "tiles 64": (B200, case_of(J, 64, dtype=torch.float16)),
    "tiles 128, causal": (B200, case_of(J, 128, causal=True)),
    "tiles 64, window, groups of 4": (B200, case_of(J, 64, heads=4, kv_heads=1, window=(30, 5))),
    "tiles of a broadcast query": (B200, case_of(B, 128, q_length=256)),
    "wide 256": (B200, case_of(B, 256)),
    "wide 192 and 128, causal": (B200, case_of(J, 192, 128, causal=True)),
}


def compile_forward(monkeypatch, device, case):
    """The compiled kernel that a case would launch, and its configuration."""
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    q_offsets = query.offsets() if isinstance(query, JaggedTensor) else None
    k, v = keys.values().detach(), values.values().detach()
    problem = AttentionProblem.of(q, k, v, q_offsets, *_window(case.causal, case.window), False)
    problem = replace(problem, device=device)
    schedule = [torch.zeros(8, 8, dtype=torch.int32), torch.zeros(device.processors + 1, dtype=torch.int32)]
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
    ((variant, programs, descriptors, args),) = launches
    with _compiling_for(GPUTarget("cuda", device.arch[0] * 10 + device.arch[1], 32)):
        made = variant.kernel.warmup(*descriptors, *args, grid=(programs,), **variant.options)
    return made, select(problem)


def run_tool(name, data, *arguments):
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        done = subprocess.run([str(TOOLS / name), *arguments, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def innermost_loops(cubin):
    """Counts of the instructions of each innermost loop, but for those that only wait."""
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
        if target and end - labels.get(target[0], end) > 12:
            ranges.append((labels[target[0]], end))
    # A wait's second try is out of line, and its jump back into a loop would look like a loop of its own.
    ranges = [(a, b) for a, b in ranges if not any(c < a <= d < b for c, d in ranges)]
    ranges = [r for r in ranges if not any(o != r and r[0] <= o[0] and o[1] <= r[1] for o in ranges)]
    return [Counter(name.split(".")[0] for name, _ in code[a : b + 1]) for a, b in ranges]


@pytest.mark.parametrize(("device", "case"), CASES.values(), ids=CASES.keys())
def test_forward_compiles_within_its_budgets(monkeypatch, device, case):
    """TUN-04: roles get the registers that they ask for, hot loops spill none, memory is what was estimated."""
    made, config = compile_forward(monkeypatch, device, case)
    assert made.metadata.shared <= config.shared_memory <= SHARED_MEMORY
    assert made.metadata.tmem_size == max(config.tensor_columns, 1 << (config.tensor_columns - 1).bit_length()) <= 512
    # Asking for more than there is drops every request, silently.
    asked = set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", made.asm["ptx"])))
    assert {config.correction_registers, config.softmax_registers, config.single_registers} <= asked, asked

    loops = innermost_loops(made.asm["cubin"])
    softmax = [body for body in loops if body["MUFU"] >= config.block_n // 2]
    products = [body for body in loops if body["UTCHMMA"]]
    loads = [body for body in loops if body["UTMALDG"] and not body["UTCHMMA"]]
    fades = [body for body in loops if body["FMUL2"] >= config.block_dv and body["LDTM"] and not body["MUFU"]]
    assert len(softmax) == (1 if config.wide else 2 * (1 + config.windowed + config.left)), loops
    assert len(products) == len(loads) == len(fades) == 1, loops
    for body in softmax + products + loads:
        assert not body["STL"], body
        assert not body["LDL"], body
    assert fades[0]["LDL"] <= 1  # who it is among the threads; no part of O
    assert not fades[0]["STL"]
    bulk = sorted(sum(body.values()) for body in softmax)[:2]
    masks = 256 * (config.wide and config.windowed)  # two for each score; others have them in loops of their own
    assert bulk[-1] <= FA4_SOFTMAX + 26 * OLDER + masks, bulk
    # Two blocks of scores and two of sums, 16 columns of the left operand for each.
    assert products[0]["UTCHMMA"] == 2 * (config.block_d + config.block_n) // 16


def test_a_short_query_is_not_padded_to_two_tiles():
    for rows, group in ((1, 1), (128, 1), (32, 4), (43, 3)):
        problem = AttentionProblem(B, rows // group or 1, group, 1, 128, 128, torch.bfloat16, B200)
        config = select(problem)
        assert config.streams
        assert config.block_m == ROWS
        assert config.kv_stages * config.block_n * config.block_d * 2 >= 64 << 10  # in flight


def test_who_asks_for_blackwell_by_name_gets_it_where_it_runs():
    problem = AttentionProblem(B, 128, 4, 4, 128, 128, torch.bfloat16, B200)
    assert choose(problem, "blackwell").implementation.name == "blackwell"
    for device in (B300, replace(B200, processors=1)):
        assert choose(replace(problem, device=device), "blackwell").implementation.name == "blackwell"
    assert choose(problem).implementation.name != "blackwell"  # not by itself: it has run on no such GPU
    refused = {
        r"compute capability 10\.x, not 9\.0": replace(problem, device=Device("cuda", (9, 0), 132, 227 << 10)),
        r"head dimensions up to 256, not 264": replace(problem, head_dim=264),
        r"multiples of 8\), not 128 and 100": replace(problem, value_dim=100),
        r"up to 128 query heads": replace(problem, q_heads=516),
    }
    for message, lacking in refused.items():
        with pytest.raises(NotImplementedError, match=message):
            choose(lacking, "blackwell")
