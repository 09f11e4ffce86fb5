"""The Blackwell backward that keeps its keys on one CTA, on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward_general.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from jaggedtensor import JaggedLayout
from jaggedtensor.block_masks import MASK_BLOCK
from jaggedtensor.kernels.blackwell.attention_bwd_1cta import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_1cta.device import backward_kernel
from jaggedtensor.kernels.blackwell.plan import plan_general_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.emulator.engines import TmaStore
from jaggedtensor.kernels.emulator.roles import Cluster
from jaggedtensor.kernels.shared.ragged import ragged
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
    out_lead = lead if case.query is J else (batch, rows)
    grad_out = normal(*out_lead, heads, case.value_dim)
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


def run(case: Case, order: str, seed: int, **changes: Any):
    """The kernel's results against float64. The report and dQ in fp32; None where there is no tile."""
    problem = case.problem
    reasons = configuration.lacks(problem)
    assert not reasons, reasons
    config = replace(configuration.select(problem), **changes)
    x = inputs_of(case)
    delta = (x.out * x.grad_out).sum(-1)
    if case.query is not J:
        delta = delta.transpose(1, 2)
    delta = (delta - x.grad_lse).float().contiguous()
    if case.query is J:
        steps = (0, x.lse.stride(0), x.lse.stride(1))
    else:
        steps = (x.lse.stride(0), x.lse.stride(2), x.lse.stride(1))
    dk, dv = torch.full_like(x.k, math.nan), torch.full_like(x.v, math.nan)
    tokens, k_rows = sum(case.k_lengths), x.k.shape[0]
    for i, length in enumerate(case.k_lengths):  # the launcher clears the keys that no query sees
        if problem.windowed or problem.masked or (case.query is J and not case.q_lengths[i]):
            begin = int(x.k_layout.offsets()[i])
            dk[begin : begin + length], dv[begin : begin + length] = 0, 0
    found = plan_general_backward(problem, x.k_layout, x.q_layout, k_rows, x.q.shape[0], x.mask)
    tiles, worker_offsets = found[:2]
    listed = found[2] if x.mask is not None else None
    if not tiles.shape[0]:  # the launcher launches nothing
        assert not any(gradient.any() for gradient in x.wanted)
        return None, None
    programs = worker_offsets.shape[0] - 1
    q, grad_out = (y if y.dim() == 3 else y.flatten(0, 1) for y in (x.q, x.grad_out))
    rows, group = configuration.ROWS // case.group, case.group
    if config.workers:
        total = torch.zeros(programs * config.q_blocks * configuration.ROWS, 1, case.dim)
        into = (total, configuration.ROWS, 1, configuration.SLICE)
    else:
        total = torch.zeros(q.shape)
        into = (total, rows, group, configuration.SLICE)
    blocks = (
        (q, rows, group, config.block_d),
        (x.k, config.block_n, 1, config.block_d),
        (x.v, config.block_n, 1, config.block_dv),
        (grad_out, rows, group, config.block_dv),
        (dk, config.block_n, 1, configuration.HALF),
        (dv, config.block_n, 1, configuration.HALF),
        into,
    )
    stride = q.shape[0] * group // configuration.ROWS + len(case.k_lengths) + 1
    done = torch.zeros(case.kv_heads, stride, dtype=torch.int32) if config.ordered else None
    report = emulate(
        backward_kernel,
        (programs,),
        *(ragged(*block)[1]() for block in blocks),
        x.lse,
        delta,
        *steps,
        tiles,
        worker_offsets,
        listed,
        None if x.q_layout is None else x.q_layout.offsets(),
        x.k_layout.offsets(),
        problem.q_len or 0,
        done,
        stride,
        x.scale * math.log2(math.e),
        x.scale,
        case.left,
        case.right,
        config,
        num_warps=4,
        target="sm100",
        order=order,
        seed=seed,
        together=programs if config.ordered else 1,
    )
    report.raise_if_bad()
    assert report.shared_peak <= configuration.SHARED_MEMORY
    assert report.tensor_peak == config.tensor_columns
    if config.workers:
        shares = total.view(case.kv_heads, config.workers, -1, case.dim).sum(1)[:, : case.q_len * group]
        dq = shares.unflatten(1, (case.q_len, group)).transpose(0, 1).flatten(1, 2)
    else:
        dq = total
    dq = dq * x.scale
    q_rows = len(x.wanted[0]) if case.query is J else q.shape[0]
    got = (dq[:q_rows].view(x.wanted[0].shape), dk[:tokens], dv[:tokens])
    for name, y, right in zip(("dq", "dk", "dv"), got, x.wanted, strict=True):
        error = (y.double() - right).norm() / right.norm() if right.any() else y.double().norm()
        assert error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3), f"{name}: {error}"
    slack = torch.cat((dk[tokens:].flatten(), dv[tokens:].flatten()))
    assert slack.isnan().all(), "rows past the last sequence were written"
    return report, dq


# Small, for mutants: keys in a ring of two and of one, several blocks and tiles for a CTA; bits that must not change.
MUTATED = (
    Case((260, 0, 1), (260, 3, 1), processors=1),
    Case((150, 20), (260, 5), dim=128, value_dim=128, left=200, right=0, processors=1),
)
PAST = "the phase that it waits for has passed already"
SAME_BITS = (
    Case((500,), (140,), deterministic=True, processors=4),
    Case((500,), q_len=20, query=B, left=490, dim=128, value_dim=64, processors=1),
)
EQUIVALENT = {
    "Sum.buffer: next self.buffers.index(at.index) in return self.buffers.index(at.index)": (
        "the buffers only change their turns"
    ),
    "issue_late: move down mbarrier.wait(scores.differed, step.turn & 1)": "two waits change places",
    "issue_late: always mbarrier.wait(sums.dk.empty.index(0), (step.tile & 1) ^ 1, pred=step.n == 0)": PAST,
    "mma_role: always mbarrier.wait(sums.dv.empty.index(0), (number & 1) ^ 1, pred=n == 0)": PAST,
    "issue_late: move up tcgen05_commit(channels.grad_out.slot(step.grad_at).empty)": "dV has read dO before",
}


def run_all(order: str, seed: int) -> None:
    for case in MUTATED:
        run(case, order, seed)
    for case in SAME_BITS:
        same_bits(case, ((order, seed), ("late", seed + 1), ("random", seed + 2), ("starve", seed + 3)))


def same_bits(case: Case, orders: Iterable[tuple[str, int]]) -> None:
    """dQ is the same to the last bit, whatever the order, and if results of TMA are there as late as they may be."""
    orders = list(orders)
    _, first = run(case, *orders[0])
    with patch.object(Cluster, "_operation", _results_last):
        for order, seed in orders[1:]:
            _, dq = run(case, order, seed)
            assert torch.equal(dq, first), f"{int((dq != first).sum())} numbers of dQ differ under another order"


def _results_last(self: Cluster, landing: list[Any]) -> Any:
    sooner = [op for op in landing if not (isinstance(op, TmaStore) and op.done)]
    return self.random.choice(sooner or landing)


FAMILY = Family(
    "blackwell backward that keeps keys on one CTA",
    runner=run_all,
    modules=("jaggedtensor.kernels.blackwell.attention_bwd_1cta.device", "jaggedtensor.kernels.blackwell.backward"),
    equivalent=EQUIVALENT,
)
