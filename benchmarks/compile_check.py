"""Compile the kernels for GPUs that need not be there, print what they use, and hold them to their budgets.

    python benchmarks/compile_check.py --quick                      # each Gluon family once: a minute on two cores
    python benchmarks/compile_check.py --kernels hopper blackwell   # the Gluon families, 5 minutes
    python benchmarks/compile_check.py                              # and the grid of the portable kernels, an hour
    python benchmarks/compile_check.py --peers PYTHON               # beside FlashAttention-4, compiled in the same run
    python benchmarks/compile_check.py --triton FOLDER              # with another version of Triton

Of a Gluon kernel (jaggedtensor/testing/compile_cases.py): shared memory, columns of tensor memory, bytes of local
memory of a thread, instructions that multiply and copy; and for each role the registers that it has, the instructions
of a trip of each of its loops over blocks (issue slots; the bulk loop first, then those with masks), spilled loads and
stores in them, and the counterpart in FlashAttention-4 for as much work. PYTHON is an interpreter that has it
(`make peers`); without, the figures of benchmarks/results/compiled_peers.json serve.

Of the portable kernels a row for each kernel of a grid of problems: blocks, warps and stages; registers and stack of a
thread; shared memory of a block, as compiled and as `config` had estimated it.

Exits with 1 if one does not compile, or breaks a rule of jaggedtensor/testing/compile_rules.py without a reason there;
a portable one if it takes more shared memory than a block may have, or spills more than SPILLS allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "results" / "compiled_peers.json"
COMPARED = ("sm_100", "sm_103")  # with FlashAttention-4's kernels for them
SPILLS = 1024  # bytes of stack from which a portable configuration counts as broken rather than as tight
PORTABLE = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
BACKENDS = {"hopper": ("sm_90",), "blackwell": ("sm_100", "sm_103"), "portable": PORTABLE}


def gluon_jobs(backend: str, arches: list[str], only: str, quick: bool) -> list[tuple[Any, ...]]:
    """A job for each pass of each case."""
    from jaggedtensor.testing.compile_cases import CASES
    from jaggedtensor.testing.compiled import Pass

    return [
        (check_gluon, arch, name, which.value)
        for arch in arches
        for name, case in CASES.items()
        for which in Pass
        if only in name and case.includes(arch, which) and (case.quick or not quick)
    ]


def check_gluon(arch: str, name: str, which_value: str, peers: Any, thorough: bool) -> tuple[list[str], bool]:
    """The rows of the kernels of a pass, and whether all is well."""
    from jaggedtensor.testing.compile_cases import CASES
    from jaggedtensor.testing.compile_rules import look_at, serialised
    from jaggedtensor.testing.compiled import Pass, compiled

    which = Pass(which_value)
    rows, fine = [], True
    for kernel in compiled(CASES[name], arch, which):
        faults = kernel.budget_faults() + (serialised(kernel, arch) if thorough else [])
        work = ", ".join(f"{count} {kind}" for kind, count in kernel.work.items())
        columns = f"{kernel.tensor_columns} columns, " if kernel.tensor_columns else ""
        uses = f"{kernel.shared} B, {columns}{kernel.stack} B local; {work}"
        rows.append(f"{arch:7}{name}, {which.value}: {kernel.family} {kernel.name}: {uses}")
        rows += [f"{'':9}FAULT {fault}" for fault in faults]
        for row in look_at(kernel, arch, which, peers):
            role = row.role
            slots, spilled = "/".join(map(str, role.slots)), " ".join(f"{n} {kind}" for kind, n in role.spilled.items())
            beside = (
                "" if row.counterpart is None else f"{row.counterpart:.0f} {len(role.loops[0]) / row.counterpart:.2f}"
            )
            said = "; ".join([f"FAULT {fault}" for fault in row.faults] + [row.reason] * bool(row.reason))
            line = f"{'':9}{role.name:24}{role.registers or '-':>5}  {slots:24}{spilled or '-':14}{beside:>10}  {said}"
            rows.append(line.rstrip())
            faults += row.faults
        fine &= not faults
    return rows, fine


def cases() -> Iterator[tuple[str, Any]]:
    """A grid of what the portable `config.select` distinguishes, with a name for each."""
    import torch

    from jaggedtensor.problem import QueryKind
    from jaggedtensor.testing import AttentionCase

    sizes = {
        torch.bfloat16: [(16, 16), (32, 32), (64, 64), (72, 72), (128, 128), (192, 128), (64, 256), (256, 256)],
        torch.float32: [(32, 32), (64, 64), (128, 128), (256, 256)],
    }
    queries = [("broadcast", length) for length in (4, 32, 64, 128, 256)] + [("jagged", 0)]
    for (dtype, dims), (kind, length), window, group in itertools.product(
        [(dtype, pair) for dtype, pairs in sizes.items() for pair in pairs], queries, (None, (100, 0)), (1, 4)
    ):
        if group == 4 and (length > 32 or dims != (128, 128)):
            continue
        case = AttentionCase(
            k_lengths=(100, 0, 300),
            q_lengths=(5, 0, 400),
            query=QueryKind.JAGGED if kind == "jagged" else QueryKind.BROADCAST,
            q_length=length,
            dim=dims[0],
            value_dim=dims[1],
            dtype=dtype,
            heads=2 * group,
            kv_heads=2,
            window=window,
        )
        name = f"{str(dtype).removeprefix('torch.')} {dims[0]}/{dims[1]} {kind}{f' {length}' if length else ''}"
        yield f"{name}{f' group {group}' if group > 1 else ''}{' window' if window else ''}", case


def check_portable(arch: str, name: str, case: Any) -> tuple[list[str], bool]:
    """The rows of a problem, and whether all is well."""
    from jaggedtensor.testing.launches import AMD, GPUS, compile_launch, launches_of

    numbers: Any = "gfx942" if arch == "gfx942" else (int(arch[3:-1]), int(arch[-1]))
    device = AMD if arch == "gfx942" else GPUS[numbers]
    rows, fine = [], True
    for launch in launches_of(case, device):
        tiling = launch.tiling
        if tiling is None or not tiling.shared_memory:  # small kernels of fixed blocks
            continue
        blocks = f"{tiling.block_m}x{tiling.block_n} w{tiling.num_warps} s{tiling.num_stages}"
        made = compile_launch(launch, numbers)
        budget = device.shared_memory
        bad = [
            what for what, is_so in (("SHARED", made.shared > budget), ("SPILLS", (made.stack or 0) > SPILLS)) if is_so
        ]
        fine &= not bad
        used = "".join(f"{'-' if x is None else x:>6}" for x in (made.registers, made.stack))
        head = f"{arch:7}{name:44}{launch.name:18}{blocks:18}"
        rows.append(f"{head}{used}{made.shared:>8}{tiling.shared_memory:>8}  {' '.join(bad)}".rstrip())
    return rows, fine


def run(job: tuple[Any, ...]) -> tuple[list[str], bool]:
    """In a process of its own."""
    check, arch, name, *rest = job
    try:
        return check(arch, name, *rest)
    except Exception as error:  # whatever a compiler raises
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        text = str(error).splitlines()
        return [f"{arch:7}{name}: FAULT {type(error).__name__}: {text[0] if text else ''}"], False


def be_silent() -> None:
    """The compiler's bindings have much to say at the end of a process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def peers_at(python: str | None, arches: list[str]) -> tuple[Any, str]:
    """Roles of FlashAttention-4's kernels, and a sentence on where they are from."""
    from jaggedtensor.testing.compile_rules import peers_of, recorded_peers

    if python is not None:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, str(Path(__file__).with_name("compile_peers.py")), folder, *arches]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                made = json.loads(done.stdout)
                roles = peers_of(made["kernels"])
                return roles, "compiled in this run: " + ", ".join(f"{k} {v}" for k, v in made["versions"].items())
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        sys.stderr.write(f"FlashAttention-4 is absent from {python}: {last}\n")
    versions = json.loads(RECORDED.read_text())["versions"]
    where = "absent; its figures as recorded for " if python is None else "absent there; figures as recorded for "
    return recorded_peers(RECORDED), where + ", ".join(f"{k} {v}" for k, v in versions.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=list(BACKENDS), default=list(BACKENDS), help="all if left out")
    parser.add_argument("--arch", action="append", help="such as sm_100; all of each kernel's if left out")
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--quick", action="store_true", help="each Gluon family once")
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has flash-attn-4")
    parser.add_argument("--record", action="store_true", help="keep the peers' figures for where they are absent")
    parser.add_argument("--triton", metavar="FOLDER", help="where another version of Triton is installed")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.triton and os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != arguments.triton:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [arguments.triton, os.environ.get("PYTHONPATH")]))
        os.execv(sys.executable, [sys.executable, *sys.argv])

    import triton

    kernels = [k for k in arguments.kernels if not (arguments.quick and k == "portable")]
    arches = {k: [a for a in BACKENDS[k] if not arguments.arch or a in arguments.arch] for k in kernels}
    compared = [a for a in COMPARED if a in arches.get("blackwell", ())]
    peers, where = peers_at(arguments.peers, compared) if compared else ({}, "not asked")
    if arguments.record:
        recorded = {key: {kind: role._asdict() for kind, role in roles.items()} for key, roles in peers.items()}
        versions = dict(pair.rsplit(" ", 1) for pair in where.partition(": ")[2].split(", "))
        RECORDED.write_text(json.dumps({"versions": versions, "roles": recorded}, indent=1) + "\n")
    jobs: list[tuple[Any, ...]] = []
    for backend in kernels:
        if backend == "portable":
            jobs += [
                (check_portable, arch, *case)
                for arch in arches[backend]
                for case in cases()
                if arguments.only in case[0]
            ]
        else:
            for job in gluon_jobs(backend, arches[backend], arguments.only, arguments.quick):
                jobs.append((*job, peers, not arguments.quick))
    print(f"Triton {triton.__version__}; FlashAttention-4: {where}")
    for key, roles in peers.items():
        counts = ", ".join(f"{kind} {role.slots} of {role.registers} registers" for kind, role in roles.items())
        print(f"{'FA4':7}{key}: {counts}")
    print(f"{'':9}{'role':24}{'regs':>5}  {'instructions of a trip':24}{'spilled':14}{'FA4 ratio':>10}")
    fine, headed = True, False
    with ProcessPoolExecutor(arguments.workers, initializer=be_silent) as pool:
        for job, (rows, good) in zip(jobs, pool.map(run, jobs), strict=True):
            if job[0] is check_portable and not headed:
                columns = f"{'regs':>6}{'stack':>6}{'shared':>8}{'guess':>8}"
                print(f"{'arch':7}{'problem':44}{'kernel':18}{'blocks':18}{columns}")
                headed = True
            fine &= good
            for row in rows:
                print(row, flush=True)
    print("all within their budgets" if fine else "FAULTS, see above", flush=True)
    be_silent()
    sys.exit(not fine)


if __name__ == "__main__":
    main()
