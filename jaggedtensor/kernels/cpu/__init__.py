"""Attention on the CPU: sequences grouped by length, a few large matrix products for each group."""

from torch import Tensor

from jaggedtensor.kernels.cpu import attention
from jaggedtensor.problem import AttentionArgs


def forward(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    visible = {"left": args.problem.left, "right": args.problem.right, "mask": args.block_mask}
    return attention.forward(args.q, args.k, args.v, args.q_offsets, args.k_offsets, scale=args.scale, **visible)


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return attention.backward(
        grad_out,
        grad_lse,
        args.q,
        args.k,
        args.v,
        out,
        lse,
        args.q_offsets,
        args.k_offsets,
        scale=args.scale,
        left=args.problem.left,
        right=args.problem.right,
        mask=args.block_mask,
        needs=needs,
    )
