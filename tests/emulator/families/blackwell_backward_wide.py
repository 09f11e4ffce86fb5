"""The Blackwell backward in a pass for each gradient, on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward_wide.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jaggedtensor import JaggedLayout
from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.blackwell.attention_bwd_wide import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_wide.config import STAYING, Config, Gradient
from jaggedtensor.kernels.blackwell.attention_bwd_wide.device import gradient_kernel
from jaggedtensor.kernels.blackwell.attention_bwd_wide.launch import block_of, blocks_of
from jaggedtensor.kernels.blackwell.plan import plan_wide_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.testing.families import Family

J, P, B = QueryKind.JAGGED, QueryKind.PER_SEQUENCE, QueryKind.BROADCAST


@dataclass(frozen=True)
class Case:
    k_lengths: tuple[int, ...]
    q_lengths: tuple[int, ...] = ()
    q_len: int = 1  # where the query has no lengths of its own
    query: QueryKind = J
    kv_heads: int = 1
    group: int = 1
    dim: int = 256
    value_dim: int = 256
    left: int = -1
    right: int = -1
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
            masked=self.kept is not None,
        )


@dataclass
class Inputs:
    """Of one call, and what it must give: out and lse of forward, and gradients in float64."""

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
    return Inputs(q, k, v, grad_out, grad_lse, mask, q_layout, k_layout, scale, out, lse, wanted)


def run(case: Case, order: str, seed: int, gradients: tuple[Gradient, ...] = tuple(Gradient), **changes: Any):
    """The kernel's results, a pass after the other, against float64. The reports."""
    reasons = configuration.lacks(case.problem)
    assert not reasons, reasons
    x = inputs_of(case)
    reports = []
    for gradient in gradients:
        config = replace(configuration.select(case.problem, gradient), **changes)
        result, report = run_pass(case, x, config, order, seed)
        reports.append(report)
        number = list(Gradient).index(gradient)
        right = x.wanted[number]
        rows = len(right) if number or case.query is J else len(result)
        got, slack = result[:rows].view(right.shape), result[rows:]
        error = (got.double() - right).norm() / right.norm() if right.any() else got.double().norm()
        assert error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3), f"{gradient.value}: {error}"
        assert slack.isnan().all(), f"{gradient.value}: rows past the last sequence were written"
    return reports


def run_pass(case: Case, x: Inputs, config: Config, order: str, seed: int):
    """A gradient, NaN where the kernel has not written and 0 where it need not, and the report, None without a tile."""
    problem = case.problem
    delta = (x.out * x.grad_out).sum(-1)
    if case.query is not J:
        delta = delta.transpose(1, 2)
    delta = (delta - x.grad_lse).float().contiguous()
    batch, head, row = (0, *x.lse.stride()[::-1]) if case.query is J else x.lse.stride()
    q, grad_out = (y if y.dim() == 3 else y.flatten(0, 1) for y in (x.q, x.grad_out))
    found = plan_wide_backward(problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0], x.mask)
    half = len(found) // 2
    tiles, worker_offsets, *lists = found[:half] if config.query_stays else found[half:]
    programs = (worker_offsets.shape[0] - 1) * config.q_blocks
    if config.shares:
        result = torch.full((programs * STAYING, config.columns), math.nan)
    else:
        result = torch.full_like(q if config.query_stays else x.k if config.differs else x.v, math.nan)
        fill_unseen(result, case, x, config)
    if not tiles.shape[0]:  # the launcher launches nothing
        return (torch.zeros(q.shape) if config.shares else result), None
    made = () if config.shares else (block_of(result, STAYING, config.columns, config.query_stays, config),)
    report = emulate(
        gradient_kernel,
        (programs,),
        *(make() for _, make in (*blocks_of((q, x.k, x.v, grad_out), config), *made)),
        *((result,) if config.shares else ()),
        x.lse,
        delta,
        batch,
        row,
        head,
        tiles,
        worker_offsets,
        lists[0] if lists else None,
        None if x.q_layout is None else x.q_layout.offsets(),
        x.k_layout.offsets(),
        problem.q_len or 0,
        x.scale * math.log2(math.e),
        x.scale if config.differs else 1.0,
        case.left,
        case.right,
        config,
        num_warps=4,
        target="sm100",
        order=order,
        seed=seed,
    )
    report.raise_if_bad()
    assert report.shared_peak <= configuration.SHARED_MEMORY
    assert report.tensor_peak == config.tensor_columns
    if config.shares:
        shares = result.view(problem.q_heads // config.group, config.workers, -1, config.columns).sum(1)
        packed = shares[:, : case.q_len * config.group, : case.dim].unflatten(1, (case.q_len, config.group))
        return packed.transpose(0, 1).flatten(1, 2), report
    return result, report


def fill_unseen(result: Tensor, case: Case, x: Inputs, config: Config) -> None:
    """0 where there may be no tile, as the launcher has it: of queries that see no key, and keys that none sees."""
    hidden = case.problem.windowed or case.problem.masked
    if config.query_stays:
        result[: sum(case.q_lengths) if case.query is J else len(result)] = 0
        return
    for i, length in enumerate(case.k_lengths):
        if hidden or (case.query is J and not case.q_lengths[i]):
            begin = int(x.k_layout.offsets()[i])
            result[begin : begin + length] = 0


def run_all(order: str, seed: int) -> None:
    for case in MUTATED:
        run(case, order, seed)


# Small, for mutants: several tiles for a CTA, of one and of several blocks; rings that are walked round.
MUTATED = (
    Case((330, 0, 1, 70), (150, 3, 1, 5), dim=64, value_dim=64, processors=1),
    Case((150, 20), (270, 5), dim=128, value_dim=128, left=200, right=0, processors=1),
    Case((70, 5), (70, 5), dim=64, value_dim=64, group=3, processors=1),
    Case((150, 0, 70), q_len=70, query=B, group=2, dim=64, value_dim=64, processors=4),
    Case((70,), q_len=5, query=B, dim=64, value_dim=64, processors=4),
)
EQUIVALENT = {
    "mma_role: always tcgen05_commit(total.complete, pred=summed > 0)": "nobody waits for it where there is no tile",
}

FAMILY = Family(
    "blackwell backward in a pass for each gradient",
    runner=run_all,
    modules=("jaggedtensor.kernels.blackwell.attention_bwd_wide.device",),
    equivalent=EQUIVALENT,
)
