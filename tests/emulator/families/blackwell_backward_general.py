"""The Blackwell backward that keeps its keys on one CTA, on the emulator, held to float64; its mutants are counted by

python -m jaggedtensor.testing.mutants tests/emulator/families/blackwell_backward_general.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from jaggedtensor.kernels.blackwell.attention_bwd_1cta import config as configuration
from jaggedtensor.kernels.blackwell.attention_bwd_1cta.device import backward_kernel
from jaggedtensor.kernels.blackwell.plan import plan_general_backward
from jaggedtensor.kernels.emulator import emulate
from jaggedtensor.kernels.emulator.engines import TmaStore
from jaggedtensor.kernels.emulator.roles import Cluster
from jaggedtensor.kernels.shared.ragged import ragged
from jaggedtensor.testing.families import Family
from jaggedtensor.testing.mutants import load_module

calls = load_module(str(Path(__file__).parents[1] / "backward_calls.py"))
Case, inputs_of = calls.Case, calls.inputs_of
J, P, B = calls.J, calls.P, calls.B


def run(case: Case, order: str, seed: int, **changes: Any):
    """The kernel's results against float64. The report and dQ in fp32; None where there is no tile."""
    problem = case.problem
    reasons = configuration.lacks(problem)
    assert not reasons, reasons
    config = replace(configuration.select(problem), **changes)
    x = inputs_of(case)
    dk, dv = x.new_gradient(x.k), x.new_gradient(x.v)
    found = plan_general_backward(problem, x.k_layout, x.q_layout, x.k.shape[0], x.q.shape[0], x.mask)
    tiles, worker_offsets = found[:2]
    listed = found[2] if x.mask is not None else None
    if not tiles.shape[0]:  # the launcher launches nothing
        assert not any(gradient.any() for gradient in x.wanted)
        return None, None
    programs = worker_offsets.shape[0] - 1
    q, grad_out = x.packed
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
        x.delta,
        *x.steps,
        tiles,
        worker_offsets,
        listed,
        x.q_offsets,
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
    for number, (gradient, untouched) in enumerate(((dq, 0.0), (dk, math.nan), (dv, math.nan))):
        x.check(number, gradient, untouched)
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
