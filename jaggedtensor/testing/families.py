"""Kernels with what they must compute, in a form that the emulator, a GPU and the compiler can all be given.

>>> from jaggedtensor.testing.families import Case, Family, Operands  # doctest: +SKIP
>>> FAMILY = Family("copy", [Case("two tiles", copy_kernel, (1,), make_operands)])  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class WrongValue(AssertionError):
    """An output does not hold what it should."""


@dataclass(frozen=True)
class Operands:
    """Fresh arguments of one launch.

    Attributes:
        args: positional arguments of the kernel.
        outputs: for each output its tensor, filled beforehand (NaN, or 0 where a kernel adds), and what it must hold.
        tolerance: largest absolute difference allowed; 0 for operands so small in value that sums are exact.
    """

    args: tuple[Any, ...]
    outputs: Mapping[str, tuple[Tensor, Tensor]]
    tolerance: float = 0.0

    def check(self) -> None:
        """Raises WrongValue, with the name of the output and the first place, where a value is wrong."""
        for name, (got, expected) in self.outputs.items():
            got = got.detach().cpu().double()
            wrong = ~((got - expected.double()).abs() <= self.tolerance)
            if wrong.any():
                place = tuple(int(i) for i in wrong.nonzero()[0])
                raise WrongValue(
                    f"{name}: {int(wrong.sum())} of {wrong.numel()} values are wrong, the first at {place}: "
                    f"{got[place].item()}, expected {expected[place].item()}"
                )


@dataclass(frozen=True)
class Case:
    """One launch of a Gluon kernel on small operands.

    Attributes:
        operands: makes fresh operands on a device ("cpu" for the emulator).
        constexprs: keyword arguments of the kernel.
        target: "sm90" or "sm100".
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    operands: Callable[[str], Operands]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_ctas: int = 1
    target: str = "sm90"

    def emulate(self, order: str, seed: int) -> Any:
        """Runs on the emulator, checks the values, gives the report.

        Raises:
            EmulationError: the emulator has found something.
            WrongValue: nothing but a value is wrong.
        """
        from jaggedtensor.kernels.emulator import emulate

        operands = self.operands("cpu")
        report = emulate(
            self.kernel,
            self.grid,
            *operands.args,
            num_warps=self.num_warps,
            num_ctas=self.num_ctas,
            target=self.target,
            order=order,
            seed=seed,
            **self.constexprs,
        )
        report.raise_if_bad()
        operands.check()
        return report

    def launch(self, warmup_only: bool = False) -> None:
        """Runs on the current GPU and checks the values; or only compiles for it."""
        operands = self.operands("cuda")
        settings = {**self.constexprs, "num_warps": self.num_warps, "num_ctas": self.num_ctas, "enable_fp_fusion": True}
        if warmup_only:
            self.kernel.warmup(*operands.args, grid=self.grid, **settings)
            return
        self.kernel[self.grid](*operands.args, **settings)
        torch.cuda.synchronize()
        operands.check()

    def compile(self, **options: Any) -> Any:
        """Compiles for the target, which need not be there; gives Triton's compiled kernel."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.experimental.gluon._runtime import GluonASTSource

        args = self.operands("cpu").args
        names = self.kernel.arg_names
        signature = {name: _type_of(value) for name, value in zip(names, args, strict=False)}
        signature |= {name: "constexpr" for name in self.constexprs}
        constexprs = {(names.index(name),): value for name, value in self.constexprs.items()}
        options = {"num_warps": self.num_warps, "num_ctas": self.num_ctas, "enable_fp_fusion": True} | options
        target = GPUTarget("cuda", {"sm90": 90, "sm100": 100}[self.target], 32)
        return triton.compile(GluonASTSource(self.kernel, signature, constexprs), target=target, options=options)


@dataclass(frozen=True)
class Bad:
    """A variant that is known to be wrong.

    Attributes:
        change: the name of a mutant (`jaggedtensor.testing.mutants`), or what is changed, if `edit` says how.
        kinds: the findings that may come first, by schedule: `kind` of the emulator's errors, or "wrong value". The
            first of them must occur, and no other.
        edit: a text that is once in the device code, and what takes its place.
    """

    change: str
    kinds: tuple[str, ...]
    edit: tuple[str, str] | None = None


@dataclass(frozen=True)
class Family:
    """Kernels that are held to their tests.

    Attributes:
        cases: launches that between them reach every path.
        runner: called with an order and a seed instead of running `cases`; raises what is wrong.
        modules: the modules whose device functions are mutated, by path or dotted name; if empty, the family's own.
        equivalent: mutants that change nothing that matters, each with the reason.
        bad: variants that must be found, and by which check.
        triton: the oldest version that compiles it.
    """

    name: str
    cases: Sequence[Case] = ()
    runner: Callable[[str, int], None] | None = None
    modules: Sequence[str] = ()
    equivalent: Mapping[str, str] = field(default_factory=dict)
    bad: Sequence[Bad] = ()
    triton: tuple[int, int] = (3, 8)

    def run(self, order: str, seed: int) -> None:
        """Run all cases on the emulator; raises at the first finding or wrong value."""
        if self.runner is not None:
            self.runner(order, seed)
        for case in self.cases:
            case.emulate(order, seed)


def _type_of(value: Any) -> str:
    if hasattr(value, "__mangle__"):  # a descriptor
        return value.__mangle__()
    if isinstance(value, Tensor):
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
        return "*" + short[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
