"""The Blackwell backward in a pass for each gradient, on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward_wide.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_bwd_wide import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_wide.config import STAYING, Config, Gradient
from jaggedtensor.kernels.blackwell.attention_bwd_wide.device import gradient_kernel
from jaggedtensor.kernels.blackwell.attention_bwd_wide.launch import block_of, blocks_of
from jaggedtensor.kernels.blackwell.plan import plan_wide_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import load_module

calls = load_module(str(Path(__file__).parents[1] / "backward_calls.py"))
inputs_of = calls.inputs_of
J, P, B = calls.J, calls.P, calls.B


@dataclass(frozen=True)
class Case(calls.Case):
    dim: int = 256
    value_dim: int = 256


def run(case: Case, order: str, seed: int, gradients: tuple[Gradient, ...] = tuple(Gradient), **changes: Any):
    """The kernel's results, a pass after the other, against float64. The reports."""
    reasons = configuration.lacks(case.problem)
    assert not reasons, reasons
    x = inputs_of(case)
    reports = []
    for gradient in gradients:
        config = replace(configuration.select(case.problem, gradient), **changes)
        result, report = run_pass(x, config, order, seed)
        reports.append(report)
        x.check(list(Gradient).index(gradient), result)
    return reports


def run_pass(x: Any, config: Config, order: str, seed: int):
    """A gradient, NaN where the kernel has not written and 0 where it need not, and the report, None without a tile."""
    case, problem = x.case, x.case.problem
    q, grad_out = x.packed
    found = plan_wide_backward(problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0], x.mask)
    half = len(found) // 2
    tiles, worker_offsets, *lists = found[:half] if config.query_stays else found[half:]
    programs = (worker_offsets.shape[0] - 1) * config.q_blocks
    if config.shares:
        result = torch.full((programs * STAYING, config.columns), math.nan)
    else:
        result = new_gradient(x, config)
    if not tiles.shape[0]:  # the launcher launches nothing
        return (torch.zeros(q.shape) if config.shares else result), None
    made = () if config.shares else (block_of(result, STAYING, config.columns, config.query_stays, config),)
    report = emulate(
        gradient_kernel,
        (programs,),
        *(make() for _, make in (*blocks_of((q, x.k, x.v, grad_out), config), *made)),
        *((result,) if config.shares else ()),
        x.lse,
        x.delta,
        *x.steps,
        tiles,
        worker_offsets,
        lists[0] if lists else None,
        x.q_offsets,
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


def new_gradient(x: Any, config: Config) -> Tensor:
    """NaN; 0 where there may be no tile, as the launcher has it: of queries, and of keys that no query sees."""
    if not config.query_stays:
        return x.new_gradient(x.k if config.differs else x.v)
    result = torch.full_like(x.packed[0], math.nan)
    result[: sum(x.case.q_lengths) if x.case.query is J else len(result)] = 0
    return result


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
