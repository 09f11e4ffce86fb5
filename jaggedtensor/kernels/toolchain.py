"""Which Triton is here, and what it assembles with, told without importing it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
GLUON_NEEDS = (3, 8)  # the version of Triton


def _triton_version() -> tuple[int, int]:
    names = ("triton", "pytorch-triton", "pytorch-triton-rocm") if HAS_TRITON else ()
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(name))
            if found:
                return int(found[1]), int(found[2])
    return 0, 0


_TRITON_VERSION = _triton_version()  # once: torch.compile looks on while an implementation is chosen


def triton_version() -> tuple[int, int]:
    """Of the package that would be imported, without importing it; (0, 0) if there is none."""
    return _TRITON_VERSION


def newest_assembler_lacks() -> list[str]:
    """What the newest ptxas that Triton brings lacks on Hopper; empty if kernels may be assembled by it.

    3.9 assembles by it for all. 3.8 has 13.3 for Blackwell and 12.9 for Hopper, and can be told to take the former
    (`shared.dsl.assembling`); but a driver of before CUDA 13 may not take what that makes.
    """
    cuda = torch.version.cuda
    if triton_version() >= (3, 9) or cuda is None or int(cuda.partition(".")[0]) >= 13:
        return []
    here = "{}.{}".format(*triton_version())
    return [f"needs triton >= 3.9, or torch for CUDA 13, not triton {here} and torch for CUDA {cuda}"]
