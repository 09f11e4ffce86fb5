"""The Blackwell backward of pairs of CTAs on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward_2cta.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jaggedtensor.kernels.blackwell.attention_bwd_2cta import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_2cta.device import pair_kernel
from jaggedtensor.kernels.blackwell.plan import plan_pair_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import load_module

calls = load_module(str(Path(__file__).parents[1] / "backward_calls.py"))
J, P = calls.J, calls.P


def case(k_lengths: tuple[int, ...], q_lengths: tuple[int, ...] = (), dim: int = 128, **options: Any):
    """Two pairs of CTAs, D and Dv of 128, unless said otherwise."""
    return calls.Case(k_lengths, q_lengths, **{"dim": dim, "value_dim": 128, "processors": 4} | options)


def run(case: Any, order: str, seed: int, **changes: Any):
    """The kernel's results against float64; NaN wherever nobody should look, and in all that is to be written."""
    problem = case.problem
    reasons = configuration.lacks(problem)
    assert not reasons, reasons
    config = replace(configuration.select(problem), **changes)
    x = calls.inputs_of(case)
    dk, dv = x.new_gradient(x.k), x.new_gradient(x.v)
    tiles, worker_offsets = plan_pair_backward(problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0])
    if not tiles.shape[0]:  # the launcher launches nothing
        assert not any(gradient.any() for gradient in x.wanted)
        return None
    q, grad_out = x.packed
    total, rows, group, n = torch.zeros(q.shape), configuration.ROWS // case.group, case.group, configuration.KEYS
    blocks = (
        (x.k, n, 1, config.block_d, "rows"),
        (x.k, n, 1, config.block_d, "columns"),
        (x.v, n, 1, config.block_dv, "rows"),
        (q, rows, group, config.block_d, "rows"),
        (q, rows, group, config.block_d, "columns"),
        (grad_out, rows, group, config.block_dv, "rows"),
        (grad_out, rows, group, config.block_dv, "columns"),
        (dk, n, 1, configuration.HALF, "rows"),
        (dv, n, 1, configuration.HALF, "rows"),
        (total, rows, group, configuration.ADDED, "rows"),
    )
    report = emulate(
        pair_kernel,
        (worker_offsets.shape[0] - 1,),
        *(ragged(*block)[1]() for block in blocks),
        x.lse,
        x.delta,
        *x.steps,
        tiles,
        worker_offsets,
        x.q_offsets,
        x.k_layout.offsets(),
        problem.q_len or 0,
        x.scale * math.log2(math.e),
        x.scale,
        case.left,
        case.right,
        config,
        **config.options,
        target="sm100",
        order=order,
        seed=seed,
    )
    report.raise_if_bad()
    assert report.shared_peak <= configuration.SHARED_MEMORY
    assert report.tensor_peak == config.tensor_columns
    for number, (gradient, untouched) in enumerate(((total * x.scale, 0.0), (dk, math.nan), (dv, math.nan))):
        x.check(number, gradient, untouched)
    return report


# Small, for mutants: several tiles for a pair, of one block and of several, and so the last one; CTAs without keys.
MUTATED = (
    case((130, 0, 300), (1, 3, 150), processors=2),
    case((257,), (130,), group=2, right=0, processors=2, dtype=torch.bfloat16),
    case((3,), (300,), processors=2),
)


ONE = "there is one buffer, and its number only hides that from the compiler"
DS = "reinterpret(scores.ds, scores.ds.dtype, [1, KEYS, ROWS], LAYOUT).index(opaque_zero(block.turn))"
EQUIVALENT = {
    "Cell.filled: next self.buffer.index(opaque_zero(turn)) in "
    "return matrix(self.buffer.index(opaque_zero(turn)), self.split)": ONE,
    f"issue_queries: next {DS} in ds = {DS}": ONE,
    "issue_queries: move down mbarrier.wait(scores.received, block.turn & 1)": "K may be waited for before it",
    "issue_keys: move down mbarrier.wait(scores.differed, block.turn & 1)": "Q may be waited for before it",
}


def run_all(order: str, seed: int) -> None:
    for each in MUTATED:
        run(each, order, seed)


FAMILY = Family(
    "blackwell backward of pairs",
    runner=run_all,
    modules=("jaggedtensor.kernels.blackwell.attention_bwd_2cta.device",),
    equivalent=EQUIVALENT,
)
