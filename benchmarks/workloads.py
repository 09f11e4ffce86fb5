"""The workloads of the attention benchmark: what they are, what they cost at the least, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import lengths
import torch
from torch import Tensor

# What an H200 was measured to do: a large copy, bytes read plus bytes written; a large bf16 product of random matrices.
BYTES_PER_SECOND = 4.3e12
FLOPS_PER_SECOND = 790e12

PASSES = ("fwd", "bwd", "both")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Workload:
    """One problem of the benchmark.

    Args:
        draw: gives the lengths of the sequences, int64 `[B]` on the CPU, the same at every call.
        q_len: rows of the one query that all sequences share; None for self-attention.
    """

    name: str
    suite: str
    draw: Callable[[], Tensor]
    q_len: int | None
    heads: int
    dim: int

    def tiny(self) -> Workload:
        """The same in small: for a dry run on a CPU, where a speed says nothing."""
        drawn = self.draw()[:5] % 37
        few = torch.cat((drawn, drawn.new_zeros(1)))
        return replace(self, draw=lambda: few, q_len=self.q_len and min(self.q_len, 8), heads=2, dim=16)

    def flops(self, which: str) -> float:
        """Of the two matrix products of forward, and 2.5 times as many in backward."""
        keys = self.draw().double()
        pairs = (keys * (keys if self.q_len is None else self.q_len)).sum().item()
        forward = 4 * pairs * self.heads * self.dim
        return forward * {"fwd": 1, "bwd": 2.5, "both": 3.5}[which]

    def least_bytes(self, which: str) -> float:
        """Forward reads Q, K and V and writes O; backward reads K, V, O and dO and writes dK and dV."""
        drawn = self.draw()
        row = self.heads * self.dim * DTYPE.itemsize
        keys = int(drawn.sum()) * row
        out = keys if self.q_len is None else len(drawn) * self.q_len * row
        query = keys if self.q_len is None else self.q_len * row
        forward, backward = query + 2 * keys + out, 4 * keys + 2 * out
        return {"fwd": forward, "bwd": backward, "both": forward + backward}[which]

    def floor_ms(self, which: str) -> float:
        """No kernel of an H200 is much faster than this."""
        if which == "both":
            return self.floor_ms("fwd") + self.floor_ms("bwd")
        return 1e3 * max(self.least_bytes(which) / BYTES_PER_SECOND, self.flops(which) / FLOPS_PER_SECOND)


def _workload(name: str, shape: lengths.Workload) -> Workload:
    suite = name.split("-")[0] if shape.q_len is None else "pma"
    return Workload(name, suite, lambda: shape.lengths, shape.q_len, shape.heads, shape.head_dim)


WORKLOADS = {name: _workload(name, shape) for name, shape in lengths.WORKLOADS.items()}
SUITES = ("pma", "self", "dense")

# 64 sequences, some 3,000 tokens: a batch so small that the host decides how long it takes.
SMALL = Workload(
    "small", "overhead", lambda: torch.randint(0, 95, (64,), generator=torch.Generator().manual_seed(0)), 32, 4, 64
)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one workload. All are packed: `[tokens, H, D]`, but for a shared query, `[Lq, H, D]`.

    q, k and v require gradients.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor  # [query tokens of all sequences, H, D]
    lengths: Tensor  # int64 [B] on the CPU
    q_offsets: Tensor  # int64 [B + 1] on the device
    k_offsets: Tensor
    shared: bool  # whether all sequences have the one query

    @classmethod
    def make(cls, workload: Workload, device: torch.device, seed: int, lengths: Tensor | None = None) -> Inputs:
        lengths = workload.draw() if lengths is None else lengths
        batch, tokens = len(lengths), int(lengths.sum())
        q_len, shared = workload.q_len or 0, workload.q_len is not None
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, workload.heads, workload.dim, generator=generator, dtype=DTYPE, device=device)

        q_lengths = torch.full_like(lengths, q_len) if shared else lengths
        q, k, v = (normal(rows).requires_grad_() for rows in (q_len if shared else tokens, tokens, tokens))
        grad_out = normal(batch * q_len if shared else tokens)
        q_offsets, k_offsets = (_offsets(x).to(device) for x in (q_lengths, lengths))
        return cls(q, k, v, grad_out, lengths, q_offsets, k_offsets, shared)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def max_k(self) -> int:
        return int(self.lengths.max())

    @property
    def max_q(self) -> int:
        return self.q.shape[0] if self.shared else self.max_k

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.grad_out))

    def expanded_query(self) -> Tensor:
        """A row for every query token of every sequence, `[query tokens, H, D]`, as all peers need it."""
        if not self.shared:
            return self.q
        return self.q.expand(self.batch, *self.q.shape).reshape(-1, *self.q.shape[1:])


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
