"""The Blackwell backward for a broadcast query on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast.device import broadcast_kernel
from jaggedtensor.kernels.blackwell.plan import backward_lacks, plan_broadcast_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.testing.families import Family


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    q_len: int = 128
    kv_heads: int = 1
    group: int = 1
    dim: int = 64
    value_dim: int = 64
    processors: int = 2
    dtype: torch.dtype = torch.float16
    slack: int = 3
    spread: float = 1.0  # of the query: how large scores are
    same_sign: bool = False  # of all operands, and of dS

    @property
    def problem(self) -> AttentionProblem:
        device = Device("cuda", (10, 0), self.processors, 227 << 10)
        heads = self.kv_heads * self.group
        return AttentionProblem(
            QueryKind.BROADCAST, self.q_len, heads, self.kv_heads, self.dim, self.value_dim, self.dtype, device
        )


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """out `[B, Lq, Hq, Dv]` and lse `[B, Hq, Lq]` in the dtype of the operands; 0 for a sequence without keys."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for begin, end in pairwise(offsets):
        key, value = (x[begin:end].repeat_interleave(group, 1) for x in (k, v))
        score = scale * torch.einsum("ihd,jhd->hij", q, key)
        lses.append(score.logsumexp(2) if end > begin else score.sum(2))
        outs.append(torch.einsum("hij,jhd->ihd", score.softmax(2), value))
    return torch.stack(outs), torch.stack(lses)


def run(case: Case, order: str, seed: int, **changes: Any):
    """The kernel's results against float64; NaN wherever nobody should look, and in all that is to be written."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        return (x.abs() if case.same_sign else x).to(case.dtype)

    problem = case.problem
    assert not backward_lacks(problem)
    config = replace(configuration.select(problem), **changes)
    layout = JaggedLayout.from_lengths(torch.tensor(case.lengths))
    batch, tokens, heads = len(case.lengths), sum(case.lengths), problem.q_heads
    offsets, rows = layout.offsets(), tokens + case.slack
    q = normal(case.q_len, heads, case.dim) * case.spread
    k, v = normal(rows, case.kv_heads, case.dim), normal(rows, case.kv_heads, case.value_dim)
    grad_out = normal(batch, case.q_len, heads, case.value_dim)
    grad_lse = torch.randn(batch, heads, case.q_len, generator=generator)
    if case.same_sign:
        grad_lse = grad_lse.abs() + 2 * case.value_dim  # past rowsum(O dO), so that no dS is negative
    scale = 1 / math.sqrt(case.dim)

    exact = [x.double().requires_grad_() for x in (q, k[:tokens], v[:tokens])]
    out, lse = forward(*exact, offsets.tolist(), scale)
    wanted = torch.autograd.grad((out, lse), exact, (grad_out.double(), grad_lse.double()))
    delta = ((out * grad_out).sum(-1).transpose(1, 2) - grad_lse).float().detach().contiguous()
    lse = lse.detach().float()
    for sequence, length in enumerate(case.lengths):
        if not length:
            lse[sequence], delta[sequence], grad_out[sequence] = math.nan, math.nan, math.nan

    k[tokens:], v[tokens:] = math.nan, math.nan
    dk, dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    tiles, worker_offsets = plan_broadcast_backward(problem, layout, rows)
    programs = worker_offsets.shape[0] - 1
    shares = torch.full((programs, configuration.ROWS, config.block_d), math.nan)
    q_rows, n = configuration.ROWS // config.group, config.block_n
    blocks = (
        (q, q_rows, config.group, config.block_d),
        (k, n, 1, config.block_d),
        (v, n, 1, config.block_dv),
        (grad_out.flatten(0, 1), q_rows, config.group, config.block_dv),
        (dk, n, 1, configuration.HALF),
        (dv, n, 1, configuration.HALF),
    )
    report = emulate(
        broadcast_kernel,
        (programs,),
        *(ragged(*block)[1]() for block in blocks),
        lse,
        delta,
        shares,
        tiles,
        worker_offsets,
        offsets,
        case.q_len,
        scale * math.log2(math.e),
        scale,
        config,
        num_warps=4,
        target="sm100",
        order=order,
        seed=seed,
    )
    report.raise_if_bad()
    assert report.shared_peak <= configuration.SHARED_MEMORY
    assert report.tensor_peak == config.tensor_columns
    total = shares.view(case.kv_heads, config.workers, -1, config.block_d).sum(1)[:, : case.q_len * case.group]
    dq = total[:, :, : case.dim].unflatten(1, (case.q_len, case.group)).transpose(0, 1).flatten(1, 2)
    for name, got, right in zip(("dq", "dk", "dv"), (dq, dk[:tokens], dv[:tokens]), wanted, strict=True):
        error = (got.double() - right).norm() / right.norm()
        limit = 2e-2 if case.dtype == torch.bfloat16 else 3e-3
        if case.same_sign and name == "dq":  # what is rounded before evens out over many keys
            limit = 1e-4
        assert error < limit, f"{name}: {error}"
    slack = torch.cat((dk[tokens:].flatten(), dv[tokens:].flatten()))
    assert slack.isnan().all(), "rows past the last sequence were written"
    return report


# Small, for mutants: several tiles for a CTA, several sequences, halves of an odd and of an even number.
MUTATED = (
    (Case((300, 0, 129, 1, 70), kv_heads=2, q_len=3, group=2, processors=2), {"k_stages": 2, "v_stages": 1}),
    (Case((5, 0, 300), q_len=70, dim=128, value_dim=40, processors=1), {}),
)
TURNS = "the buffers only change their turns"
PLACES = "the roles only change places, each with a buffer of its own"
EQUIVALENT = {
    "drain_half: next staging.index(at.index) in buffer = staging.index(at.index)": TURNS,
} | {
    f"compute_role: next statistics.{name}.index(part) in "
    "shifts, deltas = statistics.shifts.index(part), statistics.deltas.index(part)": PLACES
    for name in ("shifts", "deltas")
}


def run_all(order: str, seed: int) -> None:
    for case, changes in MUTATED:
        run(case, order, seed, **changes)


FAMILY = Family(
    "blackwell backward of a broadcast query",
    runner=run_all,
    modules=(
        "jaggedtensor.kernels.blackwell.attention_bwd_broadcast.device",
        "jaggedtensor.kernels.blackwell.attention_bwd_broadcast.scores",
    ),
    equivalent=EQUIVALENT,
)
