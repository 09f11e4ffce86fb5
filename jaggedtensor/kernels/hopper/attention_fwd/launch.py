"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from collections.abc import Hashable

from torch import Tensor

from jaggedtensor.kernels.hopper.attention_fwd.config import ROWS, Config, select
from jaggedtensor.kernels.hopper.attention_fwd.device import forward_kernel
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.fill import outputs
from jaggedtensor.kernels.shared.ragged import device_of, ragged, takes
from jaggedtensor.problem import AttentionArgs

SMALLEST_SCALE = 1e-30  # in place of 0: scores count for nothing, and -inf stays -inf


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out and lse; rows of empty sequences are filled (0 and -inf), the others come from the kernel.

    Operands that TMA cannot address (columns apart, rows not at multiples of 16 bytes) are copied first, and so is the
    query for a negative scale.
    """
    problem, (tiles, worker_offsets, *listed) = args.problem, args.schedule
    variant = (problem, config)
    config = select(problem) if config is None else config
    q, k, v = (x if takes(x) else x.contiguous() for x in (args.q, args.k, args.v))
    if args.scale < 0:
        q = -q
    with device_of(k):
        out, lse = outputs(args)
        if out.numel() == 0 or not tiles.shape[0]:
            return out, lse
        heads, rows = config.group, ROWS // config.group
        q_flat = q if q.dim() == 3 else q.flatten(0, 1)
        out_flat = out if out.dim() == 3 else out.flatten(0, 1)
        batch, head, row = lse.stride() if lse.dim() == 3 else (0, lse.stride(1), lse.stride(0))
        scale = max(abs(args.scale) * math.log2(math.e), SMALLEST_SCALE)
        launch(
            forward_kernel,
            worker_offsets.shape[0] - 1,
            _key(variant, args),
            (
                ragged(q_flat, rows, heads, config.block_d),
                ragged(k, config.block_n, 1, config.block_d),
                ragged(v, config.block_n, 1, config.block_dv),
                ragged(out_flat, rows, heads, config.block_dv),
            ),
            (
                out,
                lse,
                batch,
                row,
                head,
                tiles,
                worker_offsets,
                listed[0] if listed else None,
                args.q_offsets,
                args.k_offsets,
                problem.q_len or 0,
                scale,
                2.0 ** round(math.log2(scale)),
                problem.left,
                problem.right,
                config,
            ),
            config.options,
        )
    return out, lse


def _key(variant: Hashable, args: AttentionArgs) -> Hashable | None:
    """What the compiled kernel depends on; None if some pointer is not aligned. Results are new and aligned."""
    places = args.k_offsets.data_ptr()
    for x in args.schedule:
        places |= x.data_ptr()
    q_type = None
    if args.q_offsets is not None:
        places |= args.q_offsets.data_ptr()
        q_type = args.q_offsets.dtype
    return None if places % 16 else (variant, args.k_offsets.dtype, q_type)
