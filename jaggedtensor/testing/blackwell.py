"""The Blackwell forward as compiled for a GPU that need not be there: by role, from the machine code.

>>> made, config = compile_forward(B200, CASES["streams 128"][1])  # doctest: +SKIP
>>> roles_of(made, config)["softmax"][0]["MUFU"]  # doctest: +SKIP
129

    python -m jaggedtensor.testing.blackwell
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from jaggedtensor.kernels.blackwell.attention_fwd import launch as forward
from jaggedtensor.kernels.blackwell.attention_fwd.config import Config, select
from jaggedtensor.ops.attention import _window
from jaggedtensor.problem import AttentionArgs, AttentionProblem, Device, Quantised, QueryKind
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.attention import AttentionCase
from jaggedtensor.testing.launches import compiling_for

B200 = Device("cuda", (10, 0), 148, 227 << 10)
B300 = Device("cuda", (10, 3), 148, 227 << 10)
B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _case(query: QueryKind, dim: int, value_dim: int | None = None, **options: Any) -> AttentionCase:
    settings: dict[str, Any] = dict(
        q_length=128, q_lengths=(5, 0, 400), dtype=torch.bfloat16, dim=dim, value_dim=value_dim or dim
    )
    return AttentionCase((100, 0, 300), query=query, **settings | options)


CASES = {
    "streams 128": (B200, _case(B, 128)),
    "streams 128, B300": (B300, _case(B, 128)),
    "streams 64": (B200, _case(B, 64, dtype=torch.float16)),
    "streams, 5 rows of 3 heads, causal": (B200, _case(P, 80, 64, q_length=5, heads=6, kv_heads=2, causal=True)),
    "tiles 128": (B200, _case(J, 128)),
    "tiles 128, B300": (B300, _case(J, 128)),
    "tiles 64": (B200, _case(J, 64, dtype=torch.float16)),
    "tiles 128, causal": (B200, _case(J, 128, causal=True)),
    "tiles 64, window, groups of 4": (B200, _case(J, 64, heads=4, kv_heads=1, window=(30, 5))),
    "tiles of a broadcast query": (B200, _case(B, 128, q_length=256)),
    "wide 256": (B200, _case(B, 256)),
    "wide 192 and 128, causal": (B200, _case(J, 192, 128, causal=True)),
}


# The same in e4m3, with scales.
QUANTISED = ("streams 128", "tiles 128", "tiles 128, B300", "tiles 64, window, groups of 4", "wide 256")


class _Recorder:
    """In place of a variant: what would be launched."""

    launches: ClassVar[list[Any]] = []

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options

    def launch(self, programs: int, descriptors: Any, args: Any, aligned: bool) -> None:
        self.launches.append((self, programs, [make() for _, make in descriptors], args))


def compile_forward(device: Device, case: AttentionCase, **chosen: int) -> tuple[Any, Config]:
    """The first compiled kernel of those that a case would launch, and its configuration, with `chosen` fields; with
    `quantised=1` of operands in e4m3, with `splits=1` of tiles that are cut."""
    query, keys, values = case.inputs()
    q = (query.values() if isinstance(query, JaggedTensor) else query).detach()
    q_offsets = query.offsets() if isinstance(query, JaggedTensor) else None
    k, v = keys.values().detach(), values.values().detach()
    quantised = None
    if chosen.pop("quantised", False):
        quantised = Quantised(torch.ones(q.shape[-2]), torch.ones(()), torch.ones(()), q.dtype)
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    problem = AttentionProblem.of(q, k, v, q_offsets, *_window(case.causal, case.window), False)
    problem = replace(problem, device=device)
    schedule = [torch.zeros(8, 8, dtype=torch.int32), torch.zeros(device.processors + 1, dtype=torch.int32)]
    if chosen.pop("splits", False):  # with merges, as for tiles that are cut
        schedule.append(torch.zeros(8, 6, dtype=torch.int32))
    _Recorder.launches.clear()
    with patch.object(forward, "Variant", _Recorder), patch.object(forward, "_CALLS", {}):
        args = AttentionArgs(problem, q, k, v, q_offsets, keys.offsets(), 0.1, False, True, schedule)
        config = select(problem, **chosen)
        forward.forward(args, config, quantised)
    made = []
    with compiling_for(GPUTarget("cuda", device.arch[0] * 10 + device.arch[1], 32)):
        for variant, programs, descriptors, arguments in _Recorder.launches:
            made.append(variant.kernel.warmup(*descriptors, *arguments, grid=(programs,), **variant.options))
    return made[0], config


def _run_tool(name: str, data: bytes, *arguments: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        done = subprocess.run([str(_TOOLS / name), *arguments, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def innermost_loops(cubin: bytes) -> list[Counter[str]]:
    """Counts of the instructions of each innermost loop, but for those that only wait."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in _run_tool("nvdisasm", cubin, "-c").splitlines():
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


def roles_of(made: Any, config: Config) -> dict[str, list[Counter[str]]]:
    """The loops over blocks of keys of each role: of softmax first those without masks, by count of instructions."""
    loops = innermost_loops(made.asm["cubin"])
    product = "UTCHMMA" if config.itemsize == 2 else "UTCQMMA"
    softmax = [body for body in loops if body["MUFU"] >= config.block_n // 2]
    return {
        "softmax": sorted(softmax, key=lambda body: sum(body.values())),
        "mma": sorted((body for body in loops if body[product]), key=lambda body: -body[product]),
        "load": [body for body in loops if body["UTMALDG"] and not body[product]],
        "correction": [b for b in loops if b["FMUL2"] >= config.block_dv and b["LDTM"] and not b["MUFU"]],
    }


def registers_of(made: Any) -> list[int]:
    """What the roles ask for: each number once."""
    return sorted(set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", made.asm["ptx"]))))


def main() -> None:
    """Prints what became of each case."""
    print(f"Triton {triton.__version__}; instructions of a role's loop, spilled loads and stores in it after a plus")
    print(f"{'case':38} {'shared':>7} {'columns':>7} {'softmax':>12} {'mma':>6} {'correction':>10} {'load':>5}")
    for name, (device, case) in CASES.items():
        made, config = compile_forward(device, case)
        shown = {}
        for role, loops in roles_of(made, config).items():
            texts = dict.fromkeys(
                f"{sum(body.values())}" + (f"+{spilled}" if (spilled := body["LDL"] + body["STL"]) else "")
                for body in loops
            )
            shown[role] = "/".join(texts)
        print(
            f"{name:38} {made.metadata.shared:7} {made.metadata.tmem_size:7} {shown['softmax']:>12} {shown['mma']:>6} "
            f"{shown['correction']:>10} {shown['load']:>5}",
            flush=True,
        )


if __name__ == "__main__":
    main()
