"""The workloads that every benchmark uses, by name, and their lengths, int64 `[B]`, always the same.

Drawn with torch's CPU generator and seed 0. Broadcast-query ("pma") workloads read them as histories of users, "self"
ones as documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _uniform(generator: torch.Generator, batch: int, longest: int) -> Tensor:
    return torch.randint(0, longest + 1, (batch,), generator=generator)


def _lognormal(generator: torch.Generator, batch: int, longest: int) -> Tensor:
    drawn = torch.exp(torch.randn(batch, generator=generator) * 1.2 + 5.3)
    return drawn.to(torch.int64).clamp(1, longest)


def _tail(generator: torch.Generator, batch: int, longest: int) -> Tensor:
    """Short histories, and one of every 64 as long as can be."""
    drawn = torch.randint(1, 129, (batch,), generator=generator)
    drawn[::64] = longest
    return drawn


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "uniform": lambda g: _uniform(g, 1024, 4096),
    "uniform-512": lambda g: _uniform(g, 512, 4096),
    "uniform-256": lambda g: _uniform(g, 256, 4096),
    "lognormal": lambda g: _lognormal(g, 4096, 8192),
    "tail": lambda g: _tail(g, 2048, 16384),
    "self-uniform": lambda g: _uniform(g, 64, 8192),
    "self-lognormal": lambda g: _lognormal(g, 1024, 8192),
    "dense": lambda g: torch.full((8,), 4096),
}


def lengths(name: str, seed: int = 0) -> Tensor:
    return DISTRIBUTIONS[name](torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Workload:
    distribution: str
    q_len: int | None  # queries of a broadcast query; None: self-attention
    heads: int = 4
    head_dim: int = 128

    @property
    def lengths(self) -> Tensor:
        return lengths(self.distribution)


WORKLOADS = {
    "pma128-uniform": Workload("uniform", 128),
    "pma256-uniform": Workload("uniform-512", 256),
    "pma512-uniform": Workload("uniform-256", 512),
    "pma32-uniform": Workload("uniform", 32),
    "pma128-lognormal": Workload("lognormal", 128),
    "pma128-tail": Workload("tail", 128),
    "pma128-d64": Workload("uniform", 128, heads=8, head_dim=64),
    "self-uniform": Workload("self-uniform", None, heads=8),
    "self-lognormal": Workload("self-lognormal", None, heads=8),
    "dense-4k": Workload("dense", None, heads=16),
}
