"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

import math

from torch import Tensor

from jaggedtensor.kernels.hopper.attention_fwd.config import ROWS, Config, select
from jaggedtensor.kernels.hopper.attention_fwd.device import forward_kernel
from jaggedtensor.kernels.hopper.operands import ragged, takes
from jaggedtensor.kernels.shared.fill import outputs
from jaggedtensor.problem import AttentionArgs


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out and lse; rows without a visible key are filled here (0 and -inf), the others by the kernel."""
    problem, (tiles, worker_offsets) = args.problem, args.schedule
    config = select(problem) if config is None else config
    q, k, v = (x if takes(x) else x.contiguous() for x in (args.q, args.k, args.v))
    if args.scale < 0:
        q = -q
    out, lse = outputs(args)
    if out.numel() == 0 or not tiles.shape[0]:
        return out, lse
    scale = max(abs(args.scale) * math.log2(math.e), 1e-30)
    group = problem.group
    q_rows = q if q.dim() == 3 else q.reshape(-1, *q.shape[2:])
    o_rows = out if out.dim() == 3 else out.view(-1, *out.shape[2:])
    batch, head, row = lse.stride() if lse.dim() == 3 else (0, lse.stride(1), lse.stride(0))
    forward_kernel[(worker_offsets.shape[0] - 1,)](
        ragged(q_rows, ROWS // group, group, config.block_d),
        ragged(k, config.block_n, 1, config.block_d),
        ragged(v, config.block_n, 1, config.block_dv),
        ragged(o_rows, ROWS // group, group, config.block_dv),
        lse,
        batch,
        row,
        head,
        tiles,
        worker_offsets,
        args.q_offsets,
        args.k_offsets,
        problem.q_len or 0,
        scale,
        2.0 ** round(math.log2(scale)),
        problem.left,
        problem.right,
        config,
        **config.options,
    )
    return out, lse
