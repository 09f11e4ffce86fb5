"""One table of implementations: what each can do, and which one serves a problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from jaggedtensor.errors import fail
from jaggedtensor.problem import AttentionProblem

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Implementation:
    """A kernel family as dispatch sees it.

    `module` names the package with the launchers `forward` and `backward`; it is imported at the first use, so that
    importing the library needs torch alone.
    """

    name: str
    module: str
    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int = MAX_HEAD_DIM

    def lacks(self, problem: AttentionProblem) -> list[str]:
        """Why this implementation cannot serve the problem; empty if it can."""
        reasons = []
        if problem.device_type not in self.device_types:
            reasons.append(f"runs on {', '.join(sorted(self.device_types))}, not on {problem.device_type}")
        if problem.dtype not in self.dtypes:
            reasons.append(f"does not compute in {problem.dtype}")
        widest = max(problem.head_dim, problem.value_dim)
        if widest > self.max_head_dim:
            reasons.append(f"takes head dimensions up to {self.max_head_dim}, not {widest}")
        return reasons

    def launcher(self) -> ModuleType:
        return importlib.import_module(self.module)


_HALF = {torch.float16, torch.bfloat16}

# Fastest first: choose() takes the first that lacks nothing.
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        "cpu", "jaggedtensor.kernels.cpu", frozenset({"cpu"}), frozenset({*_HALF, torch.float32, torch.float64})
    ),
)

# The reference is plain differentiable torch, not a kernel: ops.attention calls it directly.
BACKENDS = (*(impl.name for impl in IMPLEMENTATIONS), "reference")


@dataclass(frozen=True)
class Choice:
    implementation: Implementation
    passed_over: dict[str, list[str]]  # name -> what it lacks


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


def run(direction: str, problem: AttentionProblem, backend: str | None, *args: Any, **kwargs: Any) -> Any:
    launch: Callable[..., Any] = getattr(choose(problem, backend).implementation.launcher(), direction)
    return launch(*args, **kwargs)
