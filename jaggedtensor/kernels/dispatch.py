"""One table of implementations: what each can do, and which one serves a problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jaggedtensor import env
from jaggedtensor.errors import fail
from jaggedtensor.kernels.blackwell.plan import backward_lacks as blackwell_backward_lacks
from jaggedtensor.kernels.blackwell.plan import backward_told as blackwell_backward_told
from jaggedtensor.kernels.blackwell.plan import lacks as blackwell_lacks
from jaggedtensor.kernels.blackwell.plan import plan_backward as plan_blackwell_backward
from jaggedtensor.kernels.blackwell.plan import plan_forward as plan_blackwell_forward
from jaggedtensor.kernels.hopper.plan import backward_lacks as hopper_backward_lacks
from jaggedtensor.kernels.hopper.plan import lacks as hopper_lacks
from jaggedtensor.kernels.hopper.plan import plan_backward as plan_hopper_backward
from jaggedtensor.kernels.hopper.plan import plan_forward as plan_hopper_forward
from jaggedtensor.kernels.portable.plan import plan as plan_portable
from jaggedtensor.kernels.toolchain import GLUON_NEEDS, HAS_TRITON, triton_version
from jaggedtensor.problem import AttentionProblem

if TYPE_CHECKING:
    from jaggedtensor.layout import JaggedLayout

MAX_HEAD_DIM = 256

Schedules = tuple[list[Tensor], list[Tensor]]  # for forward, for backward


def plan_nothing(
    problem: AttentionProblem,
    keys: JaggedLayout,
    query: JaggedLayout | None,
    rows: int,
    q_rows: int,
    train: bool,
    block_mask: Tensor | None = None,
) -> Schedules:
    """For implementations that work out on the fly who does what."""
    return [], []


def plan_of(
    forward: Callable[..., list[Tensor]],
    backward: Callable[..., list[Tensor]],
    backward_lacks: Callable[[AttentionProblem], list[str]],
) -> Callable[..., Schedules]:
    """Of kernels whose backward pass the portable ones do where something is lacking."""

    def plan(
        problem: AttentionProblem,
        keys: JaggedLayout,
        query: JaggedLayout | None,
        rows: int,
        q_rows: int,
        train: bool,
        block_mask: Tensor | None = None,
    ) -> Schedules:
        own = forward(problem, keys, query, rows, q_rows, block_mask)
        if not train:
            return own, []
        if backward_lacks(problem):
            return own, plan_portable(problem, keys, query, rows, q_rows, True, block_mask)[1]
        mask = () if block_mask is None else (block_mask,)
        return own, backward(problem, keys, query, rows, q_rows, *mask)

    return plan


def nothing_more(problem: AttentionProblem) -> list[str]:
    """For implementations whose other fields say all that they lack."""
    return []


def nothing_to_tell(problem: AttentionProblem) -> str:
    """For implementations with one kernel for the backward pass of each kind of query."""
    return ""


_LAUNCHERS: dict[str, ModuleType] = {}  # imported so far


@dataclass(frozen=True)
class Implementation:
    """A kernel family as dispatch sees it.

    `module` names the package with the launchers `forward(args)` and `backward(args, ...)`; it is imported at the first
    use, so that importing the library needs torch alone. `plan` asks the layouts for the schedules that they take.
    `backward` names the implementation that does the backward pass where `backward_limits` finds something lacking.
    """

    name: str
    module: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    plan: Callable[..., Schedules] = plan_nothing  # called as `schedules` is, without a mask if there is none
    max_head_dim: int = MAX_HEAD_DIM
    needs_triton: bool = False
    needs_gluon: bool = False
    arch: int | None = None  # the major compute capability
    limits: Callable[[AttentionProblem], list[str]] = nothing_more
    backward: str | None = None
    backward_limits: Callable[[AttentionProblem], list[str]] = nothing_more
    backward_told: Callable[[AttentionProblem], str] = nothing_to_tell  # which of its kernels does it, and why
    masks: bool = False  # whether it reads block masks
    unproven: bool = False  # never run by its authors: chosen unasked only where `jaggedtensor.doctor` has passed it

    def lacks(self, problem: AttentionProblem) -> list[str]:
        """Why this implementation cannot serve the problem; empty if it can."""
        reasons = []
        if self.needs_triton and not HAS_TRITON:
            reasons.append("needs the package triton")
        if self.needs_gluon and triton_version() < GLUON_NEEDS:
            here = "{}.{}".format(*triton_version())
            reasons.append("needs triton >= {}.{}".format(*GLUON_NEEDS) + f", not {here}" * HAS_TRITON)
        if problem.device.type not in self.devices:
            reasons.append(f"runs on {', '.join(self.devices)}, not on {problem.device.type}")
        elif self.arch is not None and problem.device.arch[0] != self.arch:
            reasons.append("needs compute capability {}.x, not {}.{}".format(self.arch, *problem.device.arch))
        if problem.dtype not in self.dtypes:
            reasons.append(f"does not compute in {problem.dtype}")
        widest = max(problem.head_dim, problem.value_dim)
        if widest > self.max_head_dim:
            reasons.append(f"takes head dimensions up to {self.max_head_dim}, not {widest}")
        if problem.masked and not self.masks:
            reasons.append("takes no block_mask")
        return reasons + self.limits(problem)

    def schedules(
        self,
        problem: AttentionProblem,
        keys: JaggedLayout,
        query: JaggedLayout | None,
        rows: int,
        q_rows: int,
        train: bool,
        block_mask: Tensor | None = None,
    ) -> Schedules:
        """For forward and, if `train`, for backward: asked of the layouts, for values of `rows` and `q_rows` rows."""
        if block_mask is None:
            return self.plan(problem, keys, query, rows, q_rows, train)
        return self.plan(problem, keys, query, rows, q_rows, train, block_mask)

    def launcher(self) -> ModuleType:
        """The module with `forward`, and with `backward` if it does that pass."""
        if self.name not in _LAUNCHERS:
            _LAUNCHERS[self.name] = importlib.import_module(self.module)
        return _LAUNCHERS[self.name]

    def backward_launcher(self, problem: AttentionProblem) -> ModuleType:
        """The module with the `backward` that serves a problem."""
        if self.backward is not None and self.backward_limits(problem):
            return by_name(self.backward).launcher()
        return self.launcher()


_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)
_EIGHT_BITS = torch.float8_e4m3fn  # forward, and only through `attend_fp8`, which has their scales

# Fastest first: choose() takes the first that lacks nothing.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation("cpu", "jaggedtensor.kernels.cpu", ("cpu",), (*_FLOATS, torch.float64), masks=True),
    Implementation(
        "hopper",
        "jaggedtensor.kernels.hopper.launch",
        ("cuda",),
        _HALVES,
        plan=plan_of(plan_hopper_forward, plan_hopper_backward, hopper_backward_lacks),
        needs_gluon=True,
        arch=9,
        limits=hopper_lacks,
        masks=True,
        backward="portable",
        backward_limits=hopper_backward_lacks,
    ),
    Implementation(
        "blackwell",
        "jaggedtensor.kernels.blackwell.launch",
        ("cuda",),
        (*_HALVES, _EIGHT_BITS),
        plan=plan_of(plan_blackwell_forward, plan_blackwell_backward, blackwell_backward_lacks),
        needs_gluon=True,
        arch=10,
        limits=blackwell_lacks,
        masks=True,
        backward="portable",
        backward_limits=blackwell_backward_lacks,
        backward_told=blackwell_backward_told,
        unproven=True,
    ),
    Implementation(
        "portable",
        "jaggedtensor.kernels.portable.launch",
        ("cuda", "cpu") if env.INTERPRETING else ("cuda",),
        _FLOATS,
        plan=plan_portable,
        needs_triton=True,
        masks=True,
    ),
)

# The reference is plain differentiable torch, not a kernel: ops.attention calls it directly.
BACKENDS = (*(implementation.name for implementation in IMPLEMENTATIONS), "reference")
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


@dataclass(frozen=True)
class Choice:
    implementation: Implementation
    passed_over: dict[str, list[str]]  # name -> what it lacks


def _has_passed(name: str, arch: int) -> bool:
    from jaggedtensor.doctor import has_passed

    return has_passed(name, arch)


_has_passed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # asked once, while torch.compile traces


def choose(problem: AttentionProblem, backend: str | None = None) -> Choice:
    """The implementation that serves a problem: the one named, or the first of the table that can.

    Raises:
        NotImplementedError: the named one, or every one, lacks something; the message lists what.
    """
    passed_over: dict[str, list[str]] = {}
    for implementation in IMPLEMENTATIONS:
        if backend is not None and implementation.name != backend:
            continue
        lacks = implementation.lacks(problem)
        unproven = implementation.unproven and backend is None and not lacks
        if unproven and not _has_passed(implementation.name, problem.device.arch[0]):
            lacks = ["has not passed python -m jaggedtensor.doctor on such a GPU here"]
        if not lacks:
            return Choice(implementation, passed_over)
        passed_over[implementation.name] = lacks
    reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in passed_over.items())
    fail(
        "the attention problem" if backend is None else f"a problem for backend={backend!r}",
        "one that a backend serves",
        reasons or "nothing that could",
        "backend='reference' serves everything, slowly",
        error=NotImplementedError,
    )


def by_name(name: str) -> Implementation:
    return _BY_NAME[name]
