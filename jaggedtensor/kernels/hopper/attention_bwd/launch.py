"""Launches the backward kernel. Its arguments are checked already."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.config import KEYS, ROWS, select
from jaggedtensor.kernels.hopper.attention_bwd.device import backward_kernel
from jaggedtensor.kernels.shared.delta import delta_of
from jaggedtensor.kernels.shared.direct import launch
from jaggedtensor.kernels.shared.ragged import device_of, ragged, takes
from jaggedtensor.kernels.shared.slack import clear_slack
from jaggedtensor.problem import AttentionArgs

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """dQ, dK and dV, all of which come from one pass; those in `needs` are given back."""
    problem, (tiles, worker_offsets) = args.problem, args.schedule
    config = select(problem)
    jagged = args.q_offsets is not None
    q, k, v, grad_out = (addressable(x) for x in (args.q, args.k, args.v, grad_out))
    with device_of(k):
        some = bool(tiles.shape[0] and q.numel())
        dk, dv = (new_gradient(x, args, some) for x in (k, v))
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        if some:
            lse = lse.contiguous()
            if jagged:  # as of sequences of one row
                delta = delta_of(out[:, None], grad_out[:, None], None if grad_lse is None else grad_lse[..., None])
            else:
                delta = delta_of(out, grad_out, grad_lse)
            batch, head, row = (0, *reversed(lse.stride())) if jagged else lse.stride()
            rows, heads = ROWS // config.group, config.group
            launch(
                backward_kernel,
                worker_offsets.shape[0] - 1,
                _key(args),
                (
                    ragged(flat(q), rows, heads, config.block_d),
                    ragged(k, KEYS // 2, 1, config.block_d),
                    ragged(v, KEYS // 2, 1, config.block_dv),
                    ragged(flat(grad_out), rows, heads, config.block_dv),
                    ragged(dk, KEYS // 2, 1, config.block_d),
                    ragged(dv, KEYS // 2, 1, config.block_dv),
                    ragged(flat(total), rows, heads, config.block_d // 2),
                ),
                (
                    lse,
                    delta,
                    batch,
                    row,
                    head,
                    tiles,
                    worker_offsets,
                    args.q_offsets,
                    args.k_offsets,
                    problem.q_len or 0,
                    args.scale * math.log2(math.e),
                    args.scale,
                    problem.left,
                    problem.right,
                    config,
                ),
                config.options,
            )
        dq = torch.mul(total, args.scale, out=torch.empty_like(total, dtype=q.dtype)) if needs[0] else None
    return dq, dk if needs[1] else None, dv if needs[2] else None


def flat(x: Tensor) -> Tensor:
    """`[rows, heads, D]`."""
    return x if x.dim() == 3 else x.flatten(0, 1)


def addressable(x: Tensor) -> Tensor:
    """The same for TMA: a copy where it cannot address the tensor, or rows are expanded."""
    return x if takes(x) and 0 not in x.stride() else x.contiguous()


def new_gradient(x: Tensor, args: AttentionArgs, some: bool) -> Tensor:
    """Contiguous; 0 where keys may have no tile, as no query sees them, and past the last sequence."""
    # Where sequences have as many queries as keys, each key is seen by the query at its place, whatever the window.
    itself = args.q_offsets is not None and args.q_offsets.data_ptr() == args.k_offsets.data_ptr()
    seen = itself or (args.q_offsets is None and not args.problem.windowed)
    if not (some and seen):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    gradient = torch.empty_like(x, memory_format=torch.contiguous_format)
    return clear_slack(gradient, args.k_offsets) if args.slack else gradient


def _key(args: AttentionArgs) -> Hashable | None:
    """What the compiled kernel depends on; None if some pointer is not aligned. Results are new and aligned."""
    tiles, worker_offsets = args.schedule
    places = tiles.data_ptr() | worker_offsets.data_ptr() | args.k_offsets.data_ptr()
    q_type = None
    if args.q_offsets is not None:
        places |= args.q_offsets.data_ptr()
        q_type = args.q_offsets.dtype
    return None if places % 16 else (args.problem, args.k_offsets.dtype, q_type)
