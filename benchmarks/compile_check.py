"""Compile every configuration of the portable kernels for GPUs that need not be there, and print what they use.

    python benchmarks/compile_check.py                 # sm_80, sm_86, sm_90, sm_100 and gfx942; an hour on two cores
    python benchmarks/compile_check.py --arch sm_90    # one of them

A row for each kernel that a problem launches: blocks, warps and stages; registers and stack (bytes of local memory:
what does not fit into registers) of a thread; shared memory of a block, as compiled and as `config` had estimated it.
Exits with 1 if one does not compile, takes more shared memory than a block may have, or spills more than SPILLS
allows.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from jaggedtensor.problem import Device, QueryKind
from jaggedtensor.testing import AttentionCase
from jaggedtensor.testing.launches import AMD, GPUS, compile_launch, launches_of

ARCHES: dict[str, tuple[tuple[int, int] | str, Device]] = {
    **{f"sm_{major}{minor}": ((major, minor), device) for (major, minor), device in GPUS.items()},
    "gfx942": ("gfx942", AMD),
}
SPILLS = 1024  # bytes of stack from which a configuration counts as broken rather than as tight


def cases() -> Iterator[tuple[str, AttentionCase]]:
    """A grid of what `config.select` distinguishes, with a name for each."""
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


def check(arch: str, name: str, case: AttentionCase) -> tuple[list[str], bool]:
    """The rows of a problem, and whether all is well."""
    target, device = ARCHES[arch]
    rows, fine = [], True
    for launch in launches_of(case, device):
        tiling = launch.tiling
        if tiling is None or not tiling.shared_memory:  # small kernels of fixed blocks
            continue
        blocks = f"{tiling.block_m}x{tiling.block_n} w{tiling.num_warps} s{tiling.num_stages}"
        head = f"{arch:7}{name:44}{launch.name:18}{blocks:18}"
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            try:
                made = compile_launch(launch, target)
            except Exception as error:  # whatever a compiler raises
                rows.append(f"{head}{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                fine = False
                continue
        budget = device.shared_memory
        bad = [
            what for what, is_so in (("SHARED", made.shared > budget), ("SPILLS", (made.stack or 0) > SPILLS)) if is_so
        ]
        fine &= not bad
        used = "".join(f"{'-' if x is None else x:>6}" for x in (made.registers, made.stack))
        rows.append(f"{head}{used}{made.shared:>8}{tiling.shared_memory:>8}  {' '.join(bad)}".rstrip())
    return rows, fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", action="append", choices=list(ARCHES), help="all if left out")
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    jobs = [(arch, *case) for arch in arguments.arch or ARCHES for case in cases() if arguments.only in case[0]]
    print(f"{'arch':7}{'problem':44}{'kernel':18}{'blocks':18}{'regs':>6}{'stack':>6}{'shared':>8}{'guess':>8}")
    fine = True
    with ProcessPoolExecutor(arguments.workers) as pool:
        for rows, good in pool.map(check, *zip(*jobs, strict=True)):
            fine &= good
            print("\n".join(rows), flush=True)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
