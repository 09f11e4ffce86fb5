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

general = load_module(str(Path(__file__).with_name("blackwell_backward_general.py")))
J, P = general.J, general.P


def case(k_lengths: tuple[int, ...], q_lengths: tuple[int, ...] = (), dim: int = 128, **options: Any):
    """Two pairs of CTAs, D and Dv of 128, unless said otherwise."""
    return general.Case(k_lengths, q_lengths, **{"dim": dim, "value_dim": 128, "processors": 4} | options)


def run(case: Any, order: str, seed: int, **changes: Any):
    """The kernel's results against float64; NaN wherever nobody should look, and in all that is to be written."""
    problem = case.problem
    reasons = configuration.lacks(problem)
    assert not reasons, reasons
    config = replace(configuration.select(problem), **changes)
    x = general.inputs_of(case)
    delta = (x.out * x.grad_out).sum(-1)
    delta = ((delta if case.query is J else delta.transpose(1, 2)) - x.grad_lse).float().contiguous()
    batch, head, row = (0, *reversed(x.lse.stride())) if case.query is J else x.lse.stride()
    dk, dv = torch.full_like(x.k, math.nan), torch.full_like(x.v, math.nan)
    begin = 0
    for i, length in enumerate(case.k_lengths):  # the launcher clears the keys that no query sees
        if problem.windowed or (case.query is J and not case.q_lengths[i]):
            dk[begin : begin + length], dv[begin : begin + length] = 0, 0
        begin += length
    tiles, worker_offsets = plan_pair_backward(problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0])
    if not tiles.shape[0]:  # the launcher launches nothing
        assert not any(gradient.any() for gradient in x.wanted)
        return None
    q, grad_out = (y if y.dim() == 3 else y.flatten(0, 1) for y in (x.q, x.grad_out))
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
        delta,
        batch,
        row,
        head,
        tiles,
        worker_offsets,
        None if x.q_layout is None else x.q_layout.offsets(),
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
    tokens, q_rows = sum(case.k_lengths), x.wanted[0].shape[0] if case.query is J else q.shape[0]
    got = ((total[:q_rows] * x.scale).view(x.wanted[0].shape), dk[:tokens], dv[:tokens])
    for name, y, right in zip(("dq", "dk", "dv"), got, x.wanted, strict=True):
        error = (y.double() - right).norm() / right.norm() if right.any() else y.double().norm()
        assert error < (2e-2 if case.dtype == torch.bfloat16 else 3e-3), f"{name}: {error}"
    assert not total[q_rows:].any(), "queries past the last sequence were added to"
    slack = torch.cat((dk[tokens:].flatten(), dv[tokens:].flatten()))
    assert slack.isnan().all(), "rows past the last sequence were written"
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
