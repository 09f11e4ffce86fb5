"""What is worked out once for each problem."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(function: Function) -> Function:
    """`function`, a pure one of hashable arguments, with its last results kept; traced as it is under torch.compile,
    which warns of functools.lru_cache."""
    kept = functools.lru_cache(maxsize=512)(function)

    @functools.wraps(function)
    def ask(*args: Any, **options: Any) -> Any:
        return function(*args, **options) if torch.compiler.is_compiling() else kept(*args, **options)

    return cast(Function, ask)
