"""One call of a backward kernel, and what it must give in float64: what the families of the Blackwell backward share
whose queries are of any kind."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jaggedtensor import JaggedLayout
from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

J, P, B = QueryKind.JAGGED, QueryKind.PER_SEQUENCE, QueryKind.BROADCAST


@dataclass(frozen=True)
class Case:
    k_lengths: tuple[int, ...]
    q_lengths: tuple[int, ...] = ()
    q_len: int = 1  # where the query has no lengths of its own
    query: QueryKind = J
    kv_heads: int = 1
    group: int = 1
    dim: int = 64
    value_dim: int = 64
    left: int = -1
    right: int = -1
    deterministic: bool = False
    kept: float | None = None  # the share of blocks that a mask keeps
    processors: int = 2
    dtype: torch.dtype = torch.float16
    slack: int = 3
    spread: float = 1.0  # of the query: how large scores are
    shift: float = 0.0  # of all scores

    @property
    def problem(self) -> AttentionProblem:
        device = Device("cuda", (10, 0), self.processors, 227 << 10)
        return AttentionProblem(
            self.query,
            None if self.query is J else self.q_len,
            self.kv_heads * self.group,
            self.kv_heads,
            self.dim,
            self.value_dim,
            self.dtype,
            device,
            self.left,
            self.right,
            self.deterministic,
            masked=self.kept is not None,
        )


@dataclass
class Inputs:
    """Of a case, and what it must give: out and lse of forward, and gradients in float64."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    mask: Tensor | None
    q_layout: JaggedLayout | None
    k_layout: JaggedLayout
    scale: float
    out: Tensor
    lse: Tensor
    wanted: tuple[Tensor, ...]  # without slack

    @property
    def q_offsets(self) -> Tensor | None:
        return None if self.q_layout is None else self.q_layout.offsets()

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """q and grad_out as `[rows, Hq, .]`."""
        q, grad_out = (x if x.dim() == 3 else x.flatten(0, 1) for x in (self.q, self.grad_out))
        return q, grad_out

    @property
    def delta(self) -> Tensor:
        delta = (self.out * self.grad_out).sum(-1)
        return ((delta if self.case.query is J else delta.transpose(1, 2)) - self.grad_lse).float().contiguous()

    @property
    def steps(self) -> tuple[int, ...]:
        """From a sequence, a row and a head of lse and delta to the next."""
        batch, head, row = (0, *reversed(self.lse.stride())) if self.case.query is J else self.lse.stride()
        return batch, row, head

    def new_gradient(self, of: Tensor) -> Tensor:
        """NaN, of keys or values; 0 where a launcher clears them: of keys that no query may see."""
        gradient, case = torch.full_like(of, math.nan), self.case
        hidden, begins = case.problem.windowed or case.problem.masked, self.k_layout.offsets().tolist()
        for i, length in enumerate(case.k_lengths):
            if hidden or (case.query is J and not case.q_lengths[i]):
                gradient[begins[i] : begins[i] + length] = 0
        return gradient

    def check(self, number: int, got: Tensor, untouched: float = math.nan) -> None:
        """dq (number 0), dk or dv, whose rows past the last sequence have stayed as they were."""
        name, right = ("dq", "dk", "dv")[number], self.wanted[number]
        rows = len(right) if number or self.case.query is J else len(got)
        got, slack = got[:rows].view(right.shape), got[rows:]
        error = (got.double() - right).norm() / right.norm() if right.any() else got.double().norm()
        assert error < (2e-2 if self.case.dtype == torch.bfloat16 else 3e-3), f"{name}: {error}"
        still = slack.isnan() if math.isnan(untouched) else slack == untouched
        assert still.all(), f"{name}: rows past the last sequence were written"


def inputs_of(case: Case) -> Inputs:
    """Random, NaN in the slack and in whatever belongs to queries that see nothing."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    heads, batch, tokens = case.kv_heads * case.group, len(case.k_lengths), sum(case.k_lengths)
    k_layout = JaggedLayout.from_lengths(torch.tensor(case.k_lengths))
    q_layout = JaggedLayout.from_lengths(torch.tensor(case.q_lengths)) if case.query is J else None
    rows = sum(case.q_lengths) if case.query is J else case.q_len
    lead = {J: (rows + case.slack,), P: (batch, rows), B: (rows,)}[case.query]
    q = normal(*lead, heads, case.dim) * case.spread
    k, v = (normal(tokens + case.slack, case.kv_heads, dim) for dim in (case.dim, case.value_dim))
    if case.shift:  # every score is about the same, far from 0
        q, k = q * 0 + math.sqrt(abs(case.shift)), k * 0 + math.copysign(math.sqrt(abs(case.shift)), case.shift)
    grad_out = normal(*(lead if case.query is J else (batch, rows)), heads, case.value_dim)
    mask = None
    if case.kept is not None:
        longest = case.q_lengths if case.query is J else (case.q_len,)
        blocks = (-(-max(x) // MASK_BLOCK) for x in (longest, case.k_lengths))
        mask = torch.rand(batch, *blocks, generator=generator) < case.kept
    scale = 1 / math.sqrt(case.dim)

    exact = [x.detach().double().requires_grad_() for x in (q[:rows] if case.query is J else q, k[:tokens], v[:tokens])]
    q_offsets = None if q_layout is None else q_layout.offsets()
    out, lse = attend_reference(
        *exact, q_offsets, k_layout.offsets(), scale=scale, left=case.left, right=case.right, block_mask=mask
    )
    # Where a row sees nothing its lse is no function of anything.
    grad_lse = torch.randn(lse.shape, generator=generator)
    some = lse.isfinite()
    of_rows = grad_out[:rows] if case.query is J else grad_out
    wanted = torch.autograd.grad((out, lse[some]), exact, (of_rows.double(), grad_lse[some].double()))
    lse, grad_lse = lse.detach().float().contiguous(), grad_lse.masked_fill(~some, math.nan)
    out = out.detach()
    if case.query is J:
        q[rows:], grad_out[rows:] = math.nan, math.nan
        out, lse, grad_lse = (
            torch.cat((x, x.new_full((case.slack, *x.shape[1:]), math.nan))) for x in (out, lse, grad_lse)
        )
    k[tokens:], v[tokens:] = math.nan, math.nan
    return Inputs(case, q, k, v, grad_out, grad_lse, mask, q_layout, k_layout, scale, out, lse, wanted)
