"""The Gluon kernels that a case of attention launches, compiled for a GPU that need not be there, read role by role.

>>> (kernel,) = compiled(CASES["jagged 128"], "sm_100", Pass.FORWARD)  # doctest: +SKIP
>>> kernel.roles["softmax_role"].counts["MUFU"], kernel.roles["softmax_role"].registers  # doctest: +SKIP
(113, 192)

Which kernels these are is the launchers' own choice, so a family that dispatch knows is here by itself.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.kernels.shared.direct import Variant
from jaggedtensor.kernels.shared.dsl import assembling
from jaggedtensor.problem import AttentionArgs, Device
from jaggedtensor.testing.attention import AttentionCase
from jaggedtensor.testing.launches import GPUS, Launch, arguments_of, compiling_for
from jaggedtensor.testing.machine_code import (
    PRODUCTS,
    SPILLS,
    TMA,
    Code,
    Frame,
    Loop,
    hot_loops,
    read_code,
    requested_registers,
    resources,
)

GPU_OF = {"sm_90": GPUS[9, 0], "sm_100": GPUS[10, 0], "sm_103": GPUS[10, 3]}
BACKEND_OF = {9: "hopper", 10: "blackwell"}  # by the major compute capability
SHARED_MEMORY = 232448  # bytes that a CTA may use
TENSOR_COLUMNS = 512  # of tensor memory


class Pass(enum.Enum):
    """Of attention: which of the two a kernel is for."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class CompileCase:
    """Something to compile kernels of.

    Attributes:
        case: with lengths of no meaning but where the launcher looks at them.
        quick: in the small selection that every change must pass.
        only: a pass, a GPU, a backend, or several of these: "forward", "sm_100 forward", "blackwell"; "" for all.
        run: launches in place of dispatch, given the arguments of the pass: for a kernel or a configuration that
            dispatch does not choose.
    """

    case: AttentionCase
    quick: bool = False
    only: str = ""
    deterministic: bool = False
    run: Callable[[AttentionArgs], Any] | None = None

    def includes(self, arch: str, which: Pass) -> bool:
        """Whether the case has kernels for a GPU and a pass."""
        backend = BACKEND_OF[GPU_OF[arch].arch[0]]
        return all(word in (arch, backend, which.value) for word in self.only.split())


@contextmanager
def recorded_gluon() -> Iterator[list[Launch]]:
    """A list that gets every launch of a Gluon kernel in place of the GPU; other kernels are not launched at all."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel.is_gluon():
            launches.append(Launch(kernel, grid, args, options))

    def launch(self: Variant, programs: int, descriptors: Any, args: Any, aligned: bool = True) -> None:
        self.kernel[(programs,)](*(make() for _, make in descriptors), *args, **self.options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(Variant, "launch", launch))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        yield launches


def gluon_launches(about: CompileCase, device: Device, which: Pass) -> list[Launch]:
    """What a pass of a case launches on a device; none where the portable kernels do that pass."""
    implementation = by_name(BACKEND_OF[device.arch[0]])
    forward_args, backward_args = arguments_of(about.case, device, implementation.name, about.deterministic)
    args = forward_args if which is Pass.FORWARD else backward_args
    if implementation.limits(args.problem):
        return []
    with recorded_gluon() as launches:
        if about.run is not None:
            about.run(args)
        elif which is Pass.FORWARD:
            implementation.launcher().forward(args)
        elif not implementation.backward_limits(args.problem):
            out = args.q.new_zeros(args.out_shape)
            lse = args.q.new_zeros(args.lse_shape, dtype=torch.float32)
            results = torch.zeros_like(out), torch.zeros_like(lse), out, lse
            implementation.launcher().backward(args, *results, (True, True, True))
    return launches


@dataclass(frozen=True)
class Role:
    """A role of a warp-specialised kernel, by its loops over blocks: the one that does most first, masks later."""

    name: str  # of the function that it is
    loops: tuple[Loop, ...]

    @property
    def counts(self) -> Counter[str]:
        """Of the bulk loop."""
        return self.loops[0].counts

    @property
    def slots(self) -> list[int]:
        """Instructions of a trip of each loop, equal ones once."""
        return list(dict.fromkeys(len(loop) for loop in self.loops))

    @property
    def registers(self) -> int | None:
        """Of a thread."""
        return self.loops[0].registers

    @property
    def spilled(self) -> dict[str, int]:
        """Loads and stores of local memory, the most of any loop."""
        most = {kind: max(loop.counts[kind] for loop in self.loops) for kind in SPILLS}
        return {kind: count for kind, count in most.items() if count}

    @property
    def kind(self) -> str:
        """What it does, told from its instructions alone, so that kernels of others can be read too."""
        counts = self.counts
        if any(counts[kind] for kind in PRODUCTS):
            return "consume" if counts["MUFU"] else "mma"
        if counts["MUFU"] >= 16:
            return "softmax"
        return "load" if counts["UTMALDG"] else "output"


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of a launch."""

    launch: Launch
    made: Any  # as Triton gives it

    @property
    def name(self) -> str:
        """Of the function."""
        return self.launch.name

    @property
    def family(self) -> str:
        """As "blackwell/attention_fwd"."""
        return "/".join(self.launch.kernel.fn.__module__.removeprefix("jaggedtensor.kernels.").split(".")[:2])

    @property
    def config(self) -> Any:
        """The configuration that the kernel was given, if any."""
        return next((x for x in self.launch.args if hasattr(x, "shared_memory")), None)

    @property
    def shared(self) -> int:
        """Bytes of a CTA."""
        return self.made.metadata.shared

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory that are taken: a power of two."""
        return getattr(self.made.metadata, "tmem_size", None) or 0

    @cached_property
    def code(self) -> Code:
        return read_code(self.made.asm["cubin"])

    @cached_property
    def stack(self) -> int:
        """Bytes of local memory of a thread: what did not fit into registers."""
        return resources(self.made.asm["cubin"])["STACK"]

    @property
    def asked(self) -> set[int]:
        """Registers that roles ask for and get."""
        return requested_registers(self.made.asm["ptx"])

    @property
    def work(self) -> dict[str, int]:
        """Instructions that multiply or copy by TMA, of the whole kernel."""
        return {kind: self.code.counts[kind] for kind in (*PRODUCTS, *TMA) if self.code.counts[kind]}

    @cached_property
    def roles(self) -> dict[str, Role]:
        """By name, of those that have a loop."""
        by_place = _Roles(self.made.asm["source"], self.name)
        loops: dict[str, list[Loop]] = {}
        for loop in hot_loops(self.code):
            names = Counter(by_place.role_of(instruction.frames) for instruction in loop.instructions)
            loops.setdefault(names.most_common(1)[0][0], []).append(loop)
        return {name: role_of(name, found) for name, found in loops.items()}

    def budget_faults(self) -> list[str]:
        """What is over a budget, or was asked for and not given."""
        config, faults = self.config, []
        estimate = SHARED_MEMORY if config is None else min(SHARED_MEMORY, config.shared_memory)
        if self.shared > estimate:
            faults.append(f"{self.shared} bytes of shared memory, expected at most {estimate}")
        columns = getattr(config, "tensor_columns", TENSOR_COLUMNS)
        if self.tensor_columns > min(TENSOR_COLUMNS, 1 << (columns - 1).bit_length()):
            faults.append(f"{self.tensor_columns} columns of tensor memory, expected at most {columns}")
        if "warp_specialize" in self.made.asm["source"]:
            # Asking for more than there is drops every request, silently.
            asked = set(getattr(config, "worker_registers", ()))
            asked |= {value for name, value in vars(config).items() if name.endswith("_registers")}
            asked |= set(_requested(self.made.asm["source"]))
            if missing := sorted(asked - self.asked):
                faults.append(f"registers {missing} were asked for, and {sorted(self.asked)} given")
        return faults


def role_of(name: str, loops: list[Loop]) -> Role:
    """The loop with most products first, then the one with fewest instructions: that without masks."""

    def order(loop: Loop) -> tuple[int, int]:
        return -sum(loop.counts[kind] for kind in PRODUCTS), len(loop)

    most = max(loop.counts["MUFU"] for loop in loops)
    return Role(name, tuple(sorted(loops, key=lambda loop: (loop.counts["MUFU"] < most // 2, *order(loop)))))


def compile_gluon(launch: Launch, device: Device) -> Kernel:
    """Compiles a recorded launch."""
    target = GPUTarget("cuda", device.arch[0] * 10 + device.arch[1], 32)
    with compiling_for(target), assembling(launch.options) as options:
        return Kernel(launch, launch.kernel.warmup(*launch.args, grid=launch.grid, **options))


def compiled(about: CompileCase | AttentionCase, arch: str, which: Pass) -> list[Kernel]:
    """The Gluon kernels of a pass of a case."""
    about = CompileCase(about) if isinstance(about, AttentionCase) else about
    device = GPU_OF[arch]
    return [compile_gluon(launch, device) for launch in gluon_launches(about, device, which)]


def _requested(source: str) -> list[int]:
    """Registers that the workers of `warp_specialize` ask for."""
    found = re.search(r"requestedRegisters = array<i32: ([^>]*)>", source)
    return [int(number) // 8 * 8 for number in found[1].split(",")] if found else []


class _Roles:
    """Whose an instruction is, from where in the source it comes from.

    The places of functions are those of the representation that was compiled: the files themselves may have changed
    since a kernel was put into Triton's cache.
    """

    def __init__(self, source: str, kernel: str) -> None:
        place = re.compile(r'^(#loc\d*) = loc\("([^"]+)":(\d+):\d+\)', re.M)
        places = {m[1]: (m[2], int(m[3])) for m in place.finditer(source)}
        self.starts: dict[str, list[tuple[int, str]]] = {}  # of functions, by file
        self.kernel, self.entry = kernel, ("", 0)
        for function in re.finditer(r'^  tt\.func (\w+) @"?([\w.]+).*?^  } loc\((#loc\d*)\)', source, re.M | re.S):
            if function[3] in places:
                file, line = places[function[3]]
                self.starts.setdefault(file, []).append((line, _bare(function[2])))
                if function[1] == "public":
                    self.entry = file, line
        default = re.search(r'^    default {.*?tt\.call @"?([\w.]+)', source, re.M | re.S)
        self.default = _bare(default[1]) if default else kernel

    def role_of(self, frames: Sequence[Frame]) -> str:
        """Roles of workers are called from where the kernel begins; the other one is inlined into the kernel."""
        if len(frames) < 2 or frames[-1][1] != self.entry[1]:  # the line alone: the file may be that of another frame
            return self.default
        file, line = frames[-2]
        before = [start for start in self.starts.get(file, []) if start[0] <= line]
        return max(before)[1] if before else self.kernel


def _bare(name: str) -> str:
    """Of "package.module.function__types"."""
    return name.partition("__")[0].rpartition(".")[2]
