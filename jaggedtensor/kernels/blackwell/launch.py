"""The launchers of the Blackwell kernels."""

from __future__ import annotations

from torch import Tensor

from jaggedtensor.kernels.blackwell.attention_bwd_1cta import launch as general
from jaggedtensor.kernels.blackwell.attention_bwd_2cta import launch as pair
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import launch as broadcast
from jaggedtensor.kernels.blackwell.attention_bwd_wide import launch as wide
from jaggedtensor.kernels.blackwell.attention_fwd.launch import forward as forward
from jaggedtensor.kernels.blackwell.plan import backward_family
from jaggedtensor.problem import AttentionArgs

_FAMILIES = {"broadcast": broadcast, "pair": pair, "general": general, "wide": wide}


def backward(
    args: AttentionArgs,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dQ, dK and dV, those in `needs`, of a problem for which `plan.backward_lacks` is empty."""
    family = _FAMILIES[backward_family(args.problem)]
    return family.backward(args, grad_out, grad_lse, out, lse, needs)
