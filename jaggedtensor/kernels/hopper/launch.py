"""The launchers of the Hopper kernels."""

from __future__ import annotations

from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd import launch as general
from jaggedtensor.kernels.hopper.attention_bwd_broadcast import launch as broadcast
from jaggedtensor.kernels.hopper.attention_fwd.launch import forward as forward
from jaggedtensor.problem import AttentionArgs, QueryKind


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dQ, dK and dV, those in `needs`, of a problem for which `plan.backward_lacks` is empty."""
    family = broadcast if args.problem.query is QueryKind.BROADCAST else general
    return family.backward(args, grad_out, grad_lse, out, lse, needs)
