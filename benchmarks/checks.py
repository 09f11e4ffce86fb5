"""Whether an implementation computes attention at all: a float64 reference, on a slice of the batch.

The slice is a few sequences, the shortest, the longest and an empty one among them, for which outputs and gradients are
compared row by row. The gradient of a shared query is a sum over the batch: it is computed, and compared, in full.
An error may be about twice that of the plain formula evaluated in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from workloads import Inputs

from jaggedtensor.testing import error_budget

_SCORES_AT_ONCE = 1 << 26  # elements of a matrix of scores that are held at the same time


class Attention(NamedTuple):
    """Of one sequence: `[Lq, H, D]` and, for dk and dv, `[Lk, H, D]`."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Deviation(NamedTuple):
    """The result that strays furthest, in units of what is allowed."""

    what: str
    error: float
    allowed: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed  # so that NaN is wrong

    @property
    def share(self) -> float:
        if self.error == 0:
            return 0.0
        return math.inf if math.isnan(self.error) or self.allowed == 0 else self.error / self.allowed

    def __str__(self) -> str:
        return f"{self.what} {self.error:.3g}, allowed {self.allowed:.3g}"


def attention_of(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, dtype: torch.dtype) -> Attention:
    """The plain formula for one sequence, every step in `dtype`, and its derivative written out."""
    q, k, v, grad_out = (x.detach().to(dtype).transpose(0, 1) for x in (q, k, v, grad_out))  # [H, L, D]
    if k.shape[1] == 0 or q.shape[1] == 0:
        return Attention(*(torch.zeros_like(x).transpose(0, 1) for x in (q, q, k, v)))
    scale = 1 / math.sqrt(q.shape[2])
    heads = max(1, _SCORES_AT_ONCE // (q.shape[1] * k.shape[1]))
    parts = []
    for q_, k_, v_, go in zip(*(x.split(heads) for x in (q, k, v, grad_out)), strict=True):
        p = (q_ @ k_.mT * scale).softmax(-1)
        out = p @ v_
        ds = p * (go @ v_.mT - (go * out).sum(-1, keepdim=True)) * scale
        parts.append((out, ds @ k_, ds.mT @ q_, p.mT @ go))
    return Attention(*(torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True)))


def sampled_sequences(lengths: Tensor) -> list[int]:
    """The shortest, the longest, an empty one if there is, the first, one in the middle and the last."""
    order = lengths.argsort(stable=True)
    tokens = order[lengths[order] > 0]
    empty = order[lengths[order] == 0]
    chosen = [*tokens[[0, -1]].tolist()] if len(tokens) else []
    chosen += [*empty[:1].tolist(), 0, len(lengths) // 2, len(lengths) - 1]
    return sorted(set(chosen))


@dataclass(frozen=True)
class Sequence:
    """One sequence of the slice."""

    index: int
    queries: slice
    keys: slice
    exact: Attention  # float64
    low: Attention  # bf16


@dataclass(frozen=True)
class Reference:
    """What outputs and gradients of some inputs must be."""

    sequences: list[Sequence]
    shared_dq: tuple[Tensor, Tensor] | None  # of a shared query, in bf16 and in float64; None if there is none

    @classmethod
    def of(cls, inputs: Inputs, *, gradients: bool = True) -> Reference:
        """`gradients` asks for those of a shared query too, which takes a look at every sequence."""
        q_ends, k_ends = inputs.q_offsets.tolist(), inputs.k_offsets.tolist()
        sampled = set(sampled_sequences(inputs.lengths))
        whole = inputs.shared and gradients
        exact_dq = torch.zeros(inputs.q.shape if whole else (), dtype=torch.float64, device=inputs.q.device)
        low_dq = torch.zeros_like(exact_dq, dtype=torch.float32)
        sequences = []
        for i in range(inputs.batch) if whole else sorted(sampled):
            queries, keys = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
            q = inputs.q if inputs.shared else inputs.q[queries]
            operands = q, inputs.k[keys], inputs.v[keys], inputs.grad_out[queries]
            exact, low = (attention_of(*operands, dtype) for dtype in (torch.float64, inputs.q.dtype))
            if whole:
                exact_dq += exact.dq
                low_dq += low.dq
            if i in sampled:
                sequences.append(Sequence(i, queries, keys, exact, low))
        return cls(sequences, (low_dq.to(inputs.q.dtype), exact_dq) if whole else None)

    def check_forward(self, out: Tensor) -> Deviation:
        """`out`: `[query tokens, H, D]`."""
        return max(
            (_deviation(f"out of sequence {s.index}", out[s.queries], s.low.out, s.exact.out) for s in self.sequences),
            key=lambda deviation: deviation.share,
        )

    def check_backward(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Deviation:
        """`dq`: `[Lq, H, D]` of a shared query, else `[query tokens, H, D]`; `dk`, `dv`: `[key tokens, H, D]`."""
        deviations = []
        if self.shared_dq is not None:
            deviations.append(_deviation("dq", dq, *self.shared_dq))
        for s in self.sequences:
            # Terms of size 1 / Lk may cancel exactly, as for a single key, and then leave what fp32 rounds them to.
            rounding = 1e-4 / max(1, s.keys.stop - s.keys.start)
            if self.shared_dq is None:
                deviations.append(
                    _deviation(f"dq of sequence {s.index}", dq[s.queries], s.low.dq, s.exact.dq, rounding)
                )
            for name, got, low, exact in (("dk", dk, s.low.dk, s.exact.dk), ("dv", dv, s.low.dv, s.exact.dv)):
                deviations.append(_deviation(f"{name} of sequence {s.index}", got[s.keys], low, exact, rounding))
        return max(deviations, key=lambda deviation: deviation.share)


def _deviation(name: str, got: Tensor, low: Tensor, exact: Tensor, rounding: float = 0.0) -> Deviation:
    """The larger, in what is allowed, of the largest error and the norm of all errors."""
    if got.shape != exact.shape:
        return Deviation(f"shape {tuple(got.shape)} for {tuple(exact.shape)} of {name}, error", math.inf, 0.0)
    if not exact.numel():
        return Deviation(f"error in {name}", 0.0, 0.0)
    error, low_error = got.detach().double() - exact, low.double() - exact
    rounding = rounding if exact.any() or low.any() else 0.0  # where nothing is seen, the result is exactly 0
    half_ulp = torch.finfo(low.dtype).eps / 2
    largest = Deviation(f"largest error in {name}", error.abs().max().item(), error_budget(low, exact) + rounding)
    norm_allowed = 2 * low_error.norm().item() + half_ulp * exact.norm().item() + rounding * math.sqrt(exact.numel())
    norm = Deviation(f"norm of the error in {name}", error.norm().item(), norm_allowed)
    return max(largest, norm, key=lambda deviation: deviation.share)
