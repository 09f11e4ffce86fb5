"""What can be wrong with a kernel, each as its own exception, and what the emulator itself does not know."""

from dataclasses import dataclass, field
from typing import Any


class UnknownBuiltin(NotImplementedError):
    """A name of Triton or Gluon that the emulator does not emulate. It never guesses."""

    def __init__(self, name: str, room: str = "language/"):
        super().__init__(f"the emulator does not know {name}: add it to jaggedtensor/kernels/emulator/{room}")
        self.name = name


@dataclass
class Finding:
    """One thing that is wrong: what, who, where, and what to look at."""

    kind: str
    message: str
    role: str = ""
    cta: int = 0
    program: tuple = ()
    where: list[str] = field(default_factory=list)  # innermost line first
    advice: str = ""
    error: BaseException | None = field(default=None, compare=False, repr=False)  # what the kernel's Python raised

    def __str__(self):
        who = f" [{self.role}, CTA {self.cta}, program {self.program}]" if self.role else ""
        lines = [f"{self.kind}: {self.message}{who}"]
        lines += [f"    at {line}" for line in self.where]
        if self.advice:
            lines.append(f"    look at: {self.advice}")
        return "\n".join(lines)


class EmulationError(Exception):
    """A kernel that is wrong; `finding` says how, `report` has the rest."""

    kind = "error"

    def __init__(self, finding: Finding, report: Any = None):
        super().__init__(str(finding) if report is None else str(report))
        self.finding = finding
        self.report = report


class Deadlock(EmulationError):
    """No role can go on and no engine has work."""

    kind = "deadlock"


class Race(EmulationError):
    """Bytes are read while written, or written while read or written, with nothing to order the two."""

    kind = "race"


class MissingFence(EmulationError):
    """Ordinary stores are read by TMA or tensor cores without `fence_async_shared` between."""

    kind = "missing fence"


class Uninitialised(EmulationError):
    """Bytes are read that nobody has written."""

    kind = "uninitialised"


class OutOfBounds(EmulationError):
    """An address outside of its tensor, or an index outside of its ring."""

    kind = "out of bounds"


class OverBudget(EmulationError):
    """More shared memory, tensor memory or registers than an SM has."""

    kind = "budget"


class WrongBytes(EmulationError):
    """A barrier was told to expect another number of bytes than the copies bring."""

    kind = "wrong bytes"


class OverArrival(EmulationError):
    """More arrivals in a phase than the barrier was initialised for."""

    kind = "over-arrival"


class BarrierMisuse(EmulationError):
    """A barrier used before it is initialised, or initialised or invalidated in use."""

    kind = "barrier misuse"


class Lap(EmulationError):
    """A barrier completes its next phase before every waiter of this one has passed."""

    kind = "lap"


class Outstanding(EmulationError):
    """A CTA ends while an engine still reads or writes its memory."""

    kind = "outstanding"


class AccumulatorInFlight(EmulationError):
    """The result of a tensor-core operation is used before it is waited for."""

    kind = "accumulator in flight"


class BadOperand(EmulationError):
    """An instruction cannot take this shape, type, layout or place."""

    kind = "bad operand"


class TooLong(EmulationError):
    """More steps than allowed: roles that never end."""

    kind = "too long"


class KernelRaised(EmulationError):
    """The kernel's own Python raised: an assertion, or an operation that its types do not have."""

    kind = "kernel raised"


class EmulatorFailed(EmulationError):
    """The emulator's own Python raised, on what the kernel asked of it: not the kernel's fault, or not known to be."""

    kind = "emulator failed"


KINDS = {
    error.kind: error
    for error in (
        Deadlock,
        Race,
        MissingFence,
        Uninitialised,
        OutOfBounds,
        OverBudget,
        WrongBytes,
        OverArrival,
        BarrierMisuse,
        Lap,
        Outstanding,
        AccumulatorInFlight,
        BadOperand,
        TooLong,
        KernelRaised,
        EmulatorFailed,
    )
}
