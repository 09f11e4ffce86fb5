"""Whether the kernels of this library work on the GPU at hand: `python -m jaggedtensor.doctor`.

Kernels for GPUs that their authors did not have are compiled, emulated and modelled, but were never run. Here each of
them runs small cases, forward and backward, against attention in float64; each case in a process of its own under a
watchdog, since a kernel that hangs or faults takes its process along. What was found is kept for this GPU, driver and
versions. The first attention that would choose such a kernel by itself runs this by itself; where it has not passed,
the portable kernels serve. JAGGEDTENSOR_DOCTOR=0 keeps it from running unasked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from filelock import FileLock

from jaggedtensor import env
from jaggedtensor.kernels.dispatch import BACKENDS, by_name
from jaggedtensor.kernels.toolchain import triton_version
from jaggedtensor.ops.attention import _window, attend
from jaggedtensor.ops.fp8 import attend_fp8, dequantize_fp8, quantize_fp8
from jaggedtensor.problem import AttentionProblem, QueryKind
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.attention import AttentionCase, assert_attention_within_budget
from jaggedtensor.testing.guards import poison_free_memory
from jaggedtensor.version import __version__

LIMIT = 180.0  # seconds for a case: importing torch, compiling both passes, running them
AT_A_TIME = 4
REPEATS = 3  # of each case: what goes wrong by chance has three chances
_LENGTHS = (300, 0, 1, 129, 64, 1000, 127)
_Q_LENGTHS = (130, 5, 0, 300, 1, 260, 128)
_HALF = AttentionCase(_LENGTHS, q_length=100, dim=128, value_dim=128, dtype=torch.bfloat16, k_slack=3)
_JAGGED = _HALF.with_options(query=QueryKind.JAGGED, q_lengths=_Q_LENGTHS, q_slack=2)

CASES = {
    "one short query for all": _HALF,
    "more tiles than processors": _HALF.with_options(k_lengths=5 * _LENGTHS, q_length=20, heads=8, kv_heads=8),
    "one long query for all": _HALF.with_options(q_length=300),
    "few rows, grouped heads": _HALF.with_options(q_length=5, heads=8, dtype=torch.float16),
    "a query for each": _HALF.with_options(query=QueryKind.PER_SEQUENCE, dim=64, value_dim=64),
    "a long sequence among short ones": _HALF.with_options(k_lengths=(5000, 3, 0, 40), heads=2, kv_heads=2),
    "jagged": _JAGGED,
    "jagged, causal, grouped heads": _JAGGED.with_options(causal=True, heads=4),
    "jagged, window": _JAGGED.with_options(window=(70, 20), dim=64, value_dim=64),
    "wide heads": _JAGGED.with_options(dim=256, value_dim=256),
    "wide, one long query for all": _HALF.with_options(dim=256, value_dim=256, q_length=200, heads=4),
    "wide, groups of three, causal": _JAGGED.with_options(
        dim=64, value_dim=192, heads=6, causal=True, dtype=torch.float16
    ),
    "one query for all, block mask": _HALF.with_options(q_length=300, mask_share=0.6),
    "jagged, block mask": _JAGGED.with_options(mask_share=0.6, heads=4),
}
# Without being asked for the same bits every time, which other kernels may serve.
IN_ANY_ORDER = {
    "jagged, in any order": _JAGGED,
    "jagged, causal, grouped heads, in any order": _JAGGED.with_options(causal=True, heads=4, dtype=torch.float16),
    "a query for each, in any order": _HALF.with_options(query=QueryKind.PER_SEQUENCE),
    "jagged, narrow heads, in any order": _JAGGED.with_options(dim=64, value_dim=40, window=(200, 30)),
    "jagged, block mask, in any order": _JAGGED.with_options(mask_share=0.6, heads=4),
}
# Forward alone, by `attend_fp8`.
IN_8_BITS = {
    "in 8 bits": _HALF,
    "in 8 bits, jagged, causal, grouped heads": _JAGGED.with_options(causal=True, heads=4, dim=64, value_dim=64),
    "in 8 bits, wide heads": _JAGGED.with_options(dim=256, value_dim=256),
}
# As if there were much more to do, for which kernels are other ones: rows keep the peak of their first block, and what
# strays too far from it, as in the second of these, is done again.
OF_MUCH = {
    "as of much work, jagged": _JAGGED,
    "as of much work, peaks that grow": _JAGGED.with_options(magnitude=5.0, dtype=torch.float16),
    "as of much work, jagged, causal, grouped heads": _JAGGED.with_options(causal=True, heads=4, dim=64, value_dim=64),
    "as of much work, one long query for all": _HALF.with_options(q_length=300),
}
_MUCH = {"hopper": "jaggedtensor.kernels.hopper.attention_fwd.launch.MUCH"}  # which number says what is much
_MUCH |= {"blackwell": "jaggedtensor.kernels.blackwell.attention_fwd.config.ENOUGH"}
CASES |= IN_ANY_ORDER | IN_8_BITS | OF_MUCH


class Verdict(NamedTuple):
    """What became of a case.

    Attributes:
        word: "right"; "not served", which is no fault; "wrong", "differs" (from run to run), "crashes", "hangs".
        said: the last words of what went wrong.
    """

    case: str
    word: str
    said: str = ""

    @property
    def is_well(self) -> bool:
        """No fault."""
        return self.word in ("right", "not served")


# -- the child: one case ---------------------------------------------------------------------------------------------


def run_case(name: str, backend: str, device: str) -> Verdict:
    """Run a case here, in this process."""
    case = CASES[name]
    if name in IN_8_BITS:
        return _run_in_8_bits(name, backend, device)
    q, k, v = case.inputs(device)
    values = (q if isinstance(q, torch.Tensor) else q.values(), k.values(), v.values())
    left, right = _window(case.causal, case.window)
    problem = AttentionProblem.of(*values, None if isinstance(q, torch.Tensor) else q.offsets(), left, right, False)
    lacks = by_name(backend).lacks(problem)
    if lacks:
        return Verdict(name, "not served", ", ".join(lacks))
    first: Any = None
    ordered = name not in IN_ANY_ORDER
    for _ in range(REPEATS):
        if device != "cpu":
            poison_free_memory(1 << 26, device)
        with patch(_MUCH[backend], -math.inf) if name in OF_MUCH and backend in _MUCH else nullcontext():
            got = case.run(backend, device, deterministic=ordered)
        if first is None or not ordered:
            first = got
            try:
                assert_attention_within_budget(case, type(got)(*(x.cpu() for x in got)))
            except AssertionError as error:
                return Verdict(name, "wrong", str(error))
        elif not all(torch.equal(a, b) for a, b in zip(first, got, strict=True)):
            return Verdict(name, "differs", "the same inputs gave other bits")
    return Verdict(name, "right")


def _run_in_8_bits(name: str, backend: str, device: str) -> Verdict:
    """Against float64 attention of the values that the operands stand for: weights may be wrong by 1 / 16 each."""
    case = CASES[name]
    operands: Any = case.inputs()
    quantised: list[Any] = [quantize_fp8(x.detach()) for x in operands]
    here = [x.to(device) for x, _ in quantised]
    packed_q, packed_k, packed_v = (_dense(x) for x in here)
    q_offsets = here[0].offsets() if isinstance(here[0], JaggedTensor) else None
    left, right = _window(case.causal, case.window)
    lacks = by_name(backend).lacks(AttentionProblem.of(packed_q, packed_k, packed_v, q_offsets, left, right, False))
    if lacks:
        return Verdict(name, "not served", ", ".join(lacks))
    q, k, v = (dequantize_fp8(x, scale, torch.float64) for x, scale in quantised)
    exact, exact_lse = (_dense(x) for x in attend(q, k, v, causal=case.causal, return_lse=True))
    size = _dense(attend(q, k, v.map_values(torch.abs), causal=case.causal))
    scales = [scale.to(device) for _, scale in quantised]
    first: Any = None
    for _ in range(REPEATS):
        if device != "cpu":
            poison_free_memory(1 << 26, device)
        result = attend_fp8(*here, scales=scales, causal=case.causal, return_lse=True, backend=backend)
        out, lse = (_dense(x).cpu().double() for x in result)
        if first is not None:
            if not (torch.equal(first[0], out) and torch.equal(first[1], lse)):
                return Verdict(name, "differs", "the same inputs gave other bits")
            continue
        first, error = (out, lse), (out - exact).abs()
        share = float(error.norm() / exact.norm())
        if not ((error <= size / 16 + 1e-2).all() and share <= 0.04):
            return Verdict(name, "wrong", f"out is off by up to {error.max():.3g}, by {share:.3g} of its norm")
        if not torch.allclose(lse, exact_lse, rtol=1e-5, atol=1e-3):
            return Verdict(name, "wrong", "lse is wrong")
    return Verdict(name, "right")


def _dense(x: Any) -> torch.Tensor:
    return x.values() if isinstance(x, JaggedTensor) else x


# -- the parent ------------------------------------------------------------------------------------------------------


def examine(
    backend: str,
    device: str = "cuda",
    *,
    cases: Iterable[str] = tuple(CASES),
    limit: float = LIMIT,
    plug: Path | None = None,
    progress: bool = False,
) -> list[Verdict]:
    """Run cases of a backend, each in a child process that is killed after `limit` seconds.

    `plug` is a Python file that a child runs first, to put a faulty kernel in place of a good one.
    """
    waiting: queue.Queue[str] = queue.Queue()
    names = list(cases)
    for name in names:
        waiting.put(name)
    found: dict[str, Verdict] = {}

    def work() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            found[name] = _in_a_child(name, backend, device, limit, plug)
            if progress:
                verdict = found[name]
                print(f"  {name:<32}{verdict.word:<12}{verdict.said.splitlines()[-1][:90] if verdict.said else ''}")

    threads = [threading.Thread(target=work) for _ in range(min(AT_A_TIME, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[name] for name in names]


def _in_a_child(name: str, backend: str, device: str, limit: float, plug: Path | None) -> Verdict:
    command = [sys.executable, "-m", "jaggedtensor.doctor", "--child", name, "--backend", backend, "--device", device]
    command += [] if plug is None else ["--plug", str(plug)]
    try:
        done = subprocess.run(
            command, env={**os.environ, env.DOCTOR: "0"}, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(name, "hangs", f"no end after {limit:g} s")
    for line in done.stdout.splitlines():
        if line.startswith("verdict "):
            return Verdict(name, *json.loads(line.removeprefix("verdict ")))
    said = (done.stderr or done.stdout).strip()[-2000:]
    return Verdict(name, "crashes", f"{said}\nended with status {done.returncode}".strip())


# -- what is kept ----------------------------------------------------------------------------------------------------


def key_of(device: str) -> str:
    """What a verdict holds for: the GPU, its driver, and the versions of all that makes or launches a kernel."""
    gpu, driver = "CPU", ""
    if torch.device(device).type == "cuda":
        gpu, driver = torch.cuda.get_device_name(device), str(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009
    versions = f"torch {torch.__version__}", "triton {}.{}".format(*triton_version()), f"jaggedtensor {__version__}"
    return ", ".join((gpu, f"driver {driver}", *versions))


def _file() -> Path:
    return env.cache_directory() / "doctor.json"


def recorded(backend: str, device: str) -> bool | None:
    """Whether a backend has passed on this GPU; None if it has not been examined."""
    try:
        return json.loads(_file().read_text())[key_of(device)][backend]["passed"]
    except (OSError, ValueError, KeyError):
        return None


def record(backend: str, device: str, verdicts: Sequence[Verdict]) -> bool:
    """Keep verdicts; whether all is well and something was served."""
    passed = all(v.is_well for v in verdicts) and any(v.word == "right" for v in verdicts)
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        entry = {"passed": passed, "cases": {v.case: [v.word, v.said] for v in verdicts}}
        known.setdefault(key_of(device), {})[backend] = entry
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file, indent=2)
        os.replace(file.name, path)
    return passed


_PASSED: dict[tuple[str, int], bool] = {}


def has_passed(backend: str, arch: int) -> bool:
    """Whether a backend may be chosen unasked for GPUs of a major compute capability: examined once, then remembered.

    One process of several examines, the others wait for it. Where it does not pass, that is said once, as a warning.
    """
    if (backend, arch) not in _PASSED:
        _PASSED[backend, arch] = _examine_once(backend, arch)
    return _PASSED[backend, arch]


def _examine_once(backend: str, arch: int) -> bool:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = next((f"cuda:{i}" for i in range(count) if torch.cuda.get_device_capability(i)[0] == arch), None)
    if device is None:
        return False
    known = recorded(backend, device)
    if known is None and env.doctor_may_run():
        directory = env.cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / "doctor.examining.lock"):
            known = recorded(backend, device)
            if known is None:
                known = record(backend, device, examine(backend, device))
    if not known:
        why = "has not been examined" if known is None else "has not passed its examination"
        warnings.warn(
            f"backend {backend!r} {why} on this GPU, so the portable kernels serve; see python -m jaggedtensor.doctor",
            stacklevel=2,
        )
    return bool(known)


# -- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if everything that runs here runs right."""
    parser = argparse.ArgumentParser(prog="python -m jaggedtensor.doctor", description=__doc__.split("\n")[0])
    backends = [name for name in BACKENDS if name != "reference"]
    parser.add_argument("--backend", choices=backends, help="only this one (all that serve something here)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds until a case counts as hung (%(default)g)")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--plug", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        if options.plug is not None:
            exec(compile(options.plug.read_text(), options.plug, "exec"), {"__name__": "plug"})
        verdict = run_case(options.child, options.backend, options.device)
        print("verdict " + json.dumps(verdict[1:]))
        return 0
    print(key_of(options.device))
    all_well = True
    for backend in backends if options.backend is None else [options.backend]:
        print(f"{backend}:")
        verdicts = examine(backend, options.device, limit=options.limit, plug=options.plug, progress=True)
        passed = record(backend, options.device, verdicts)
        serves = any(v.word != "not served" for v in verdicts)
        print(f"{backend} " + ("passed" if passed else "FAILED" if serves else "serves nothing here"))
        all_well &= passed or not serves
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
