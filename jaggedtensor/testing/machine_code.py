"""What the assembler made of a kernel, read from its machine code: loops, roles, registers, spills.

>>> code = read_code(made.asm["cubin"])  # doctest: +SKIP
>>> [(len(loop), loop.counts["MUFU"]) for loop in hot_loops(code)]  # doctest: +SKIP
[(209, 0), (511, 113), (238, 0), (65, 0), (511, 113)]
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Instructions by what they do, each without what follows its first point.
PRODUCTS = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")  # of Hopper and Blackwell; the second ones of 8-bit numbers
TMA = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")  # load, store, add; the last two without a tensor map
TENSOR_MEMORY = ("LDTM", "STTM", "UTCCP")
WORK = (*PRODUCTS, *TMA, *TENSOR_MEMORY, "MUFU")
SPILLS = ("LDL", "STL")  # of local memory
SMALL = 12  # instructions of a loop that only waits
ROLLED = 64  # instructions of a loop over the inner dimension of a product, which is part of the loop around it

Frame = tuple[str, int]  # file and line


class Instruction(NamedTuple):
    """`frames`: where in the source it comes from, the innermost function first."""

    name: str  # with its modifiers, as UTMALDG.5D
    operands: str
    frames: Sequence[Frame]

    @property
    def kind(self) -> str:
        """Without modifiers."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, repr=False)
class Code:
    """Instructions in the order of memory, and the instruction that each label is before."""

    instructions: list[Instruction]
    labels: dict[str, int]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.instructions)


@dataclass(frozen=True)
class Loop:
    """Instructions from `begin` to the branch that leads back to it."""

    code: Code
    begin: int
    end: int  # the first after it

    def __len__(self) -> int:
        return self.end - self.begin

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(instruction.kind for instruction in self.instructions)

    @property
    def instructions(self) -> list[Instruction]:
        """The loop's, in their order."""
        return self.code.instructions[self.begin : self.end]

    @property
    def registers(self) -> int | None:
        """Of a thread, as its role has last asked for; None if no role asks."""
        for instruction in reversed(self.code.instructions[: self.begin]):
            if instruction.kind == "USETMAXREG":
                return int(instruction.operands.split(",")[-1].strip(" ;"), 0)
        return None

    def _holds(self, other: Loop) -> bool:
        return self is not other and self.begin <= other.begin and other.end <= self.end


def run_tool(name: str, data: bytes, *arguments: str) -> str:
    """What one of the tools that come with Triton says about a file; a newer one stands in for `ptxas`."""
    tool = TOOLS / name
    if name == "ptxas" and (TOOLS / "ptxas-blackwell").exists():
        tool = TOOLS / "ptxas-blackwell"
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        done = subprocess.run([str(tool), *arguments, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


_FILE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"\s*\.(L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.]*)(.*)")


def read_code(cubin: bytes) -> Code:
    """Of a file with one kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    frames: list[Frame] = []
    follows = True  # an instruction, so that what is named next is where others come from
    for line in run_tool("nvdisasm", cubin, "-c", "-gi").splitlines():
        if place := _FILE.search(line):
            if follows:
                frames, follows = [], False
            frames.append((place[1], int(place[2])))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(Instruction(found[1], found[2], frames))
            follows = True
    return Code(instructions, labels)


def loops_of(code: Code) -> list[Loop]:
    """All but those that only wait."""
    loops = []
    for at, instruction in enumerate(code.instructions):
        target = re.search(r"L_x_\d+", instruction.operands) if instruction.kind == "BRA" else None
        if target and at - code.labels.get(target[0], at) > SMALL:
            loops.append(Loop(code, code.labels[target[0]], at + 1))
    # A wait's second try is out of line, and its jump back into a loop would look like a loop of its own.
    return [a for a in loops if not any(b.begin < a.begin < b.end < a.end for b in loops)]


def hot_loops(code: Code) -> list[Loop]:
    """The innermost loops in which something is copied, multiplied or exponentiated."""
    loops = loops_of(code)
    rolled = [loop for loop in loops if len(loop) < ROLLED and any(loop.counts[kind] for kind in PRODUCTS)]
    loops = [loop for loop in loops if loop not in rolled]
    innermost = [loop for loop in loops if not any(loop._holds(other) for other in loops)]
    return [loop for loop in innermost if any(loop.counts[kind] for kind in WORK)]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers (REG), stack (STACK), both of a thread, and so on, as cuobjdump tells."""
    return {
        name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", run_tool("cuobjdump", cubin, "-res-usage"))
    }


def requested_registers(ptx: str) -> set[int]:
    """What roles ask for: none if it is more than there is, which drops every request without a word."""
    return set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", ptx)))


def complaints(ptx: str, arch: str) -> list[str]:
    """What the assembler says of products that it had to make wait for each other (C7510 to C7514)."""
    said = run_tool("ptxas", ptx.encode(), f"-arch={arch}", "-v", "-o", "/dev/null")
    assert "registers" in said
    return re.findall(r".*(?:C75\d\d|wgmma).*", said)
