"""The operators `jaggedtensor::attend_fwd` and `attend_bwd`: what torch knows of attention.

Schemas, shapes and derivative only; the kernels belong to the implementation that `backend` names. All state that they
need is in tensors, so that `torch.compile`, checkpointing and CUDA graphs see data and no objects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jaggedtensor.errors import fail
from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.problem import AttentionArgs, AttentionProblem, lse_dtype, lse_shape, out_shape

_lib = torch.library.Library("jaggedtensor", "FRAGMENT")
_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor k_offsets, Tensor[] forward_schedule, "
    "Tensor[] backward_schedule, float scale, int left, int right, str backend, bool deterministic, bool slack"
)
_lib.define(f"attend_fwd({_ARGS}) -> (Tensor, Tensor)")
_lib.define(
    f"attend_bwd(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGS}, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
attend_fwd = torch.ops.jaggedtensor.attend_fwd.default
attend_bwd = torch.ops.jaggedtensor.attend_bwd.default


def _forward(
    q,
    k,
    v,
    q_offsets,
    k_offsets,
    forward_schedule,
    backward_schedule,
    scale,
    left,
    right,
    backend,
    deterministic,
    slack,
):
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic)
    args = AttentionArgs(problem, q, k, v, q_offsets, k_offsets, scale, slack, forward_schedule)
    return by_name(backend).launcher().forward(args)


def _backward(
    grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, forward_schedule, backward_schedule, scale, left, right,
    backend, deterministic, slack, needs,
):  # fmt: skip
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic)
    args = AttentionArgs(problem, q, k, v, q_offsets, k_offsets, scale, slack, backward_schedule)
    grads = by_name(backend).launcher().backward(args, grad_out, grad_lse, out, lse, tuple(needs))
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _forward_fake(q, k, v, q_offsets, k_offsets, *options):
    out = q.new_empty(out_shape(q, v, q_offsets, k_offsets))
    return out, q.new_empty(lse_shape(q, q_offsets, k_offsets), dtype=lse_dtype(q.dtype))


def _backward_fake(grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, *options):
    needs = options[-1]
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=True))


for _device in ("CPU", "CUDA"):
    _lib.impl("attend_fwd", _forward, _device)
    _lib.impl("attend_bwd", _backward, _device)
torch.library.register_fake("jaggedtensor::attend_fwd", _forward_fake, lib=_lib)
torch.library.register_fake("jaggedtensor::attend_bwd", _backward_fake, lib=_lib)


def _setup(ctx, inputs, output) -> None:
    q, k, v, q_offsets, k_offsets, forward_schedule, schedule, *ctx.options = inputs
    ctx.forward_tensors = len(forward_schedule)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets, *schedule)


def _derivative(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
    q, k, v, out, lse, q_offsets, k_offsets, *schedule = ctx.saved_tensors
    # q_offsets, k_offsets, each tensor of both schedules, and the options have no gradient
    nothing = (None, None, [None] * ctx.forward_tensors, [None] * len(schedule), *[None] * len(ctx.options))
    if grad_out is None and grad_lse is None:
        return None, None, None, *nothing
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs = list(ctx.needs_input_grad[:3])
    grads = attend_bwd(
        grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, [], schedule, *ctx.options, needs
    )  # fmt: skip
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *nothing


def _no_second_derivative(ctx, *grads):
    fail(
        "the order of derivative of attention",
        "1",
        "2 (double backward)",
        "use backend='reference', which torch differentiates any number of times",
        error=NotImplementedError,
    )


torch.library.register_autograd("jaggedtensor::attend_fwd", _derivative, setup_context=_setup, lib=_lib)
torch.library.register_autograd("jaggedtensor::attend_bwd", _no_second_derivative, lib=_lib)
