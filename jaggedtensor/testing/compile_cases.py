"""Which problems the Gluon kernels are compiled for, to be looked at: by `make compile-check`, and by tests/compile.

A family that dispatch chooses for one of them is looked at by itself. A new feature wants a case here; a kernel that
dispatch does not choose wants one with `run`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from jaggedtensor.layout import JaggedLayout
from jaggedtensor.problem import AttentionArgs, QueryKind
from jaggedtensor.testing.attention import AttentionCase
from jaggedtensor.testing.compiled import CompileCase

B, P, J = QueryKind.BROADCAST, QueryKind.PER_SEQUENCE, QueryKind.JAGGED


def case_of(query: QueryKind, dim: int, value_dim: int | None = None, **options: Any) -> AttentionCase:
    """Of three sequences, one of them empty."""
    settings: dict[str, Any] = dict(
        q_length=128, q_lengths=(5, 0, 400), dtype=torch.bfloat16, dim=dim, value_dim=value_dim or dim
    )
    return AttentionCase((100, 0, 300), query=query, **settings | options)


def _asking(args: AttentionArgs) -> None:
    """CTAs of the Blackwell forward ask the launch control for their tiles."""
    from jaggedtensor.kernels.blackwell.attention_fwd import config, launch

    launch.forward(args, config.select(args.problem, answers=2))


def _much(args: AttentionArgs) -> None:
    """The Hopper forward of so many keys that rows are anchored: its two launches."""
    from jaggedtensor.kernels.hopper.attention_fwd import launch

    with patch.object(launch, "MUCH", 0):
        launch.forward(args)


def _anchored(args: AttentionArgs) -> None:
    """The Blackwell forward of more work than cases have: anchored rows, and what does again what they stray in."""
    from jaggedtensor.kernels.blackwell.attention_fwd import config, launch

    launch.forward(args, config.select(args.problem, anchored=1))


def _in_e4m3(args: AttentionArgs) -> None:
    """The Blackwell forward of operands of 8 bits, with scales."""
    from jaggedtensor.kernels.blackwell.attention_fwd import launch

    q, k, v = (x.to(torch.float8_e4m3fn) for x in (args.q, args.k, args.v))
    by = launch.Quantised(torch.ones(q.shape[-2]), torch.ones(()), torch.ones(()), args.q.dtype)
    launch.forward(args._replace(problem=replace(args.problem, dtype=q.dtype), q=q, k=k, v=v), None, by)


def _in_waves(args: AttentionArgs) -> None:
    """The general Hopper backward of a launch for each wave, for a batch that would be too small for it."""
    from jaggedtensor.kernels.hopper.attention_bwd import launch
    from jaggedtensor.kernels.hopper.plan import plan_general_backward

    keys = JaggedLayout(args.k_offsets)
    asked = (args.problem, keys, keys, args.k.shape[0], args.q.shape[0])
    args = args._replace(q_offsets=args.k_offsets, schedule=plan_general_backward(*asked, in_waves=True))
    out, lse = args.q.new_zeros(args.out_shape), args.q.new_zeros(args.lse_shape, dtype=torch.float32)
    launch.backward(args, torch.zeros_like(out), torch.zeros_like(lse), out, lse, (True, True, True))


FP16 = torch.float16
CASES: dict[str, CompileCase] = {
    "broadcast 128": CompileCase(case_of(B, 128), quick=True),
    "broadcast 64": CompileCase(case_of(B, 64, dtype=FP16)),
    "broadcast 128, 32 rows": CompileCase(case_of(B, 128, q_length=32)),
    "broadcast 128, 256 rows": CompileCase(case_of(B, 128, q_length=256)),
    "broadcast 256": CompileCase(case_of(B, 256)),
    "broadcast 72 and 40, 17 rows of 4 heads": CompileCase(case_of(B, 72, 40, q_length=17, heads=8)),
    "broadcast 128, a mask": CompileCase(case_of(B, 128, mask_share=0.5)),
    "broadcast 128, cut tiles": CompileCase(
        AttentionCase((40000,), heads=1, kv_heads=1, q_length=128, dim=128, value_dim=128, dtype=torch.bfloat16),
        only="forward",
    ),
    "per sequence 80 and 64, 5 rows of 3 heads, causal": CompileCase(
        case_of(P, 80, 64, q_length=5, heads=6, causal=True)
    ),
    "per sequence 128, 70 rows": CompileCase(case_of(P, 128, q_length=70)),
    "jagged 128": CompileCase(case_of(J, 128), quick=True),
    "jagged 128, the same bits": CompileCase(case_of(J, 128), deterministic=True, only="backward"),
    "jagged 64": CompileCase(case_of(J, 64, dtype=FP16), quick=True),
    "jagged 256": CompileCase(case_of(J, 256)),
    "jagged 128, causal": CompileCase(case_of(J, 128, causal=True)),
    "jagged 128, causal, groups of 4": CompileCase(case_of(J, 128, causal=True, heads=8)),
    "jagged 64, window, groups of 4": CompileCase(case_of(J, 64, heads=4, kv_heads=1, window=(30, 5))),
    "jagged 128 and 64": CompileCase(case_of(J, 128, 64), quick=True, only="sm_90 backward"),
    "jagged 192 and 128, causal": CompileCase(case_of(J, 192, 128, causal=True)),
    "jagged 256, window, 6 heads": CompileCase(case_of(J, 256, heads=6, kv_heads=1, window=(30, 5)), only="backward"),
    "jagged 128, a mask, the same bits": CompileCase(
        case_of(J, 128, mask_share=0.5), deterministic=True, only="backward"
    ),
    "broadcast 128, tiles asked for": CompileCase(case_of(B, 128), only="sm_100 forward", run=_asking),
    "jagged 128, tiles asked for": CompileCase(case_of(J, 128), only="sm_100 forward", run=_asking),
    "jagged 128, cut tiles": CompileCase(
        AttentionCase((2048,), query=J, q_lengths=(2048,), dim=128, value_dim=128, dtype=torch.bfloat16),
        only="sm_90 backward",
    ),
    "jagged 128, waves": CompileCase(case_of(J, 128, q_lengths=(100, 0, 300)), only="sm_90 backward", run=_in_waves),
    "jagged 64, waves": CompileCase(
        case_of(J, 64, q_lengths=(100, 0, 300), dtype=FP16), only="sm_90 backward", run=_in_waves
    ),
    "jagged 128, much": CompileCase(case_of(J, 128), quick=True, only="sm_90 forward", run=_much),
    "jagged 64, much": CompileCase(case_of(J, 64, dtype=FP16), only="sm_90 forward", run=_much),
    "jagged 72 and 40, much": CompileCase(case_of(J, 72, 40), only="sm_90 forward", run=_much),
    "jagged 128, causal, much": CompileCase(case_of(J, 128, causal=True), only="sm_90 forward", run=_much),
    "broadcast 128, 256 rows, much": CompileCase(case_of(B, 128, q_length=256), only="sm_90 forward", run=_much),
    "jagged 128, anchored": CompileCase(case_of(J, 128), quick=True, only="forward blackwell", run=_anchored),
    "jagged 128, causal, anchored": CompileCase(case_of(J, 128, causal=True), only="sm_100 forward", run=_anchored),
    "jagged 64, window, groups of 4, anchored": CompileCase(
        case_of(J, 64, heads=4, kv_heads=1, window=(30, 5)), only="sm_100 forward", run=_anchored
    ),
    "broadcast 128, e4m3": CompileCase(case_of(B, 128), only="forward blackwell", run=_in_e4m3),
    "jagged 128, e4m3": CompileCase(case_of(J, 128), quick=True, only="forward blackwell", run=_in_e4m3),
    "jagged 64, window, groups of 4, e4m3": CompileCase(
        case_of(J, 64, heads=4, kv_heads=1, window=(30, 5)), only="forward blackwell", run=_in_e4m3
    ),
    "broadcast 256, e4m3": CompileCase(case_of(B, 256), only="sm_100 forward", run=_in_e4m3),
    "broadcast 256, tiles asked for": CompileCase(case_of(B, 256), only="sm_100 forward", run=_asking),
}
