"""The Hopper backward kernels compile without a GPU: no spills, no serialised products, budgets kept."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from jaggedtensor.kernels.hopper.attention_bwd import config as general
from jaggedtensor.kernels.hopper.attention_bwd.device import backward_kernel
from jaggedtensor.kernels.hopper.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.hopper.attention_bwd_broadcast.device import broadcast_kernel
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.testing.launches import GPUS, Launch, _compiling_for


def problem_of(
    q_len=128, heads=4, kv_heads=4, dim=128, value_dim=None, dtype=torch.bfloat16, device=GPUS[9, 0], **more
):
    value_dim = dim if value_dim is None else value_dim
    return AttentionProblem(QueryKind.BROADCAST, q_len, heads, kv_heads, dim, value_dim, dtype, device, **more)


def launch_of(problem):
    """Of tensors that are on the CPU: nothing runs."""
    config = broadcast.select(problem)
    q = torch.zeros(problem.q_len, problem.q_heads, problem.head_dim, dtype=problem.dtype)
    k = torch.zeros(64, problem.kv_heads, problem.head_dim, dtype=problem.dtype)
    v = torch.zeros(64, problem.kv_heads, problem.value_dim, dtype=problem.dtype)
    grad_out = torch.zeros(2 * problem.q_len, problem.q_heads, problem.value_dim, dtype=problem.dtype)
    rows, n = broadcast.ROWS // config.group, config.block_n
    blocks = (
        (q, rows, config.group, config.block_d),
        (k, n, 1, config.block_d),
        (v, n, 1, config.block_dv),
        (grad_out, rows, config.group, config.block_dv),
        (k, n, 1, config.block_d),
        (v, n, 1, config.block_dv),
    )
    numbers, whole = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    args = (numbers, numbers, grad_out, numbers, whole, whole, whole, whole.long(), problem.q_len, 0.1, 0.2, config)
    return Launch(broadcast_kernel, (132,), (*(ragged(*block)[1]() for block in blocks), *args), config.options)


def tool(name, *options, text):
    """What one of the tools that come with Triton says about a file."""
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(text)
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name), *options, file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def complaints(ptx):
    """What the assembler says of products that it had to make wait for each other (C7510 to C7514)."""
    said = tool("ptxas-blackwell", "-arch=sm_90a", "-v", "-o", "/dev/null", text=ptx.encode())
    assert "registers" in said
    return re.findall(r".*C75\d\d.*", said)


def hot_loops(cubin):
    """Instructions of each loop without a loop of products inside."""
    lines = tool("nvdisasm", "-c", text=cubin).splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    ends = [(i, m[1]) for i, line in enumerate(lines) if (m := re.search(r"BRA.*(\.L_x_\d+)", line))]
    loops = sorted((labels[label], i) for i, label in ends if labels[label] < i)
    # What comes after the kernel's end are waits that did not succeed at once, and lead back.
    loops = [(a, b) for a, b in loops if not any(" EXIT" in line for line in lines[a:b])]
    loops = [(a, b) for a, b in loops if any("HGMMA" in line for line in lines[a:b])]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [lines[a:b] for a, b in inner]


PROBLEMS = {
    "128 rows": problem_of(),
    "512 rows": problem_of(512),
    "groups, fp16": problem_of(32, heads=8, kv_heads=2, dtype=torch.float16),
    "D 64": problem_of(128, dim=64),
    "D 72, Dv 40": problem_of(17, dim=72, value_dim=40),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_no_hot_loop_spills_and_no_product_is_serialised(problem):
    launch, config = launch_of(problem), broadcast.select(problem)
    with _compiling_for(GPUTarget("cuda", 90, 32)):
        made = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
    assert made.metadata.shared <= config.shared_memory <= broadcast.SHARED_MEMORY
    loops = hot_loops(made.asm["cubin"])
    assert len(loops) == 2  # one of each consumer
    for loop in loops:
        assert sum("HGMMA" in line for line in loop) >= 16
        assert sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in loop) <= 4  # none with Triton 3.9
    assert complaints(made.asm["ptx"]) == []
    # The memory of a barrier that no role uses is given to a buffer, which its initial value then spoils.
    code = tool("nvdisasm", "-c", text=made.asm["cubin"])
    barriers = re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+(?:\+0x([0-9a-f]+))?\]", code)
    assert len(barriers) == 4 + 2 * (config.k_stages + config.v_stages) + 12
    assert min(int(place or "0", 16) for place in barriers) >= config.buffers
    # An over-request of registers drops every one of these without a word.
    asked = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", made.asm["ptx"])}
    assert {240, 24} <= asked


@pytest.mark.parametrize(("group", "jagged", "right"), [(1, True, -1), (4, False, 0)])
def test_the_general_kernel_spills_in_no_loop_without_a_mask(group, jagged, right):
    kind = QueryKind.JAGGED if jagged else QueryKind.PER_SEQUENCE
    problem = AttentionProblem(kind, 70, 8, 8 // group, 128, 128, torch.bfloat16, GPUS[9, 0], right=right)
    config, rows = general.select(problem), general.ROWS // group
    x, keys = torch.zeros(256, 8, 128, dtype=torch.bfloat16), torch.zeros(256, 8 // group, 128, dtype=torch.bfloat16)
    numbers, whole = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
    blocks = [(x, rows, group, 128), *[(keys, 64, 1, 128)] * 2, (x, rows, group, 128), *[(keys, 64, 1, 128)] * 2]
    blocks.append((x.float(), rows, group, 64))
    offsets = (whole.long() if jagged else None, whole.long())
    args = (numbers, numbers, 0, 8, 1, whole, whole, *offsets, 70, 0.1, 0.2, -1, right, config)
    descriptors = (ragged(*block)[1]() for block in blocks)
    with _compiling_for(GPUTarget("cuda", 90, 32)):
        made = backward_kernel.warmup(*descriptors, *args, grid=(132,), **config.options)
    assert made.metadata.shared <= config.shared_memory <= general.SHARED_MEMORY
    loops = hot_loops(made.asm["cubin"])
    assert len(loops) == 2
    for loop in loops:
        assert sum("HGMMA" in line for line in loop) == 32
        assert sum(bool(re.search(r"\b(STL|LDL)\b", line)) for line in loop) <= (1 if right < 0 else 40)
    assert complaints(made.asm["ptx"]) == []


def test_a_problem_beyond_the_budgets_is_refused_by_name():
    refused = {
        "1 to 512 query rows": problem_of(129, heads=16, kv_heads=4),
        "window": problem_of(left=3),
        "float32": problem_of(dtype=torch.float32),
        "groups": problem_of(8, heads=12, kv_heads=4),
        "multiples of 8": problem_of(dim=68),
        "up to 128": problem_of(dim=192),
    }
    for words, problem in refused.items():
        (reason,) = set(broadcast.lacks(problem))
        assert re.search(words, reason), reason


def test_no_cta_is_left_over_for_a_second_round():
    for heads in (1, 3, 4, 5, 8, 60, 131, 132):
        for q_len in (1, 128, 129, 512):
            config = broadcast.select(problem_of(q_len, heads=heads, kv_heads=heads))
            assert config.parts == -(-q_len // 128)
            programs = heads * config.workers * config.parts
            assert programs <= max(132, heads * config.parts)


def test_a_device_of_few_processors_has_a_worker_for_each_head():
    assert broadcast.select(problem_of(device=Device("cuda", (9, 0), 2, 227 << 10))).workers == 1
