"""The operators `jaggedtensor::attend_fwd` and `attend_bwd`: what torch knows of attention.

Schemas, shapes and derivative only; which kernel runs is decided inside, by `kernels.dispatch`, on real tensors. All
state that backward needs is in tensors, so that `torch.compile`, checkpointing and CUDA graphs see data and no objects.
"""

from __future__ import annotations

import torch

from jaggedtensor.errors import fail
from jaggedtensor.kernels import dispatch
from jaggedtensor.problem import AttentionProblem

_lib = torch.library.Library("jaggedtensor", "FRAGMENT")
_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor k_offsets, float scale, int left, int right, "
    "str? backend, bool deterministic"
)
_lib.define(f"attend_fwd({_ARGS}) -> (Tensor, Tensor)")
_lib.define(
    f"attend_bwd(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGS}, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
attend_fwd = torch.ops.jaggedtensor.attend_fwd.default
attend_bwd = torch.ops.jaggedtensor.attend_bwd.default


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(q, k, v, q_offsets, k_offsets, scale, left, right, backend, deterministic):
    problem = AttentionProblem.of(q, k, v, q_offsets, k_offsets, left, right, deterministic)
    return dispatch.run("forward", problem, backend, q, k, v, q_offsets, k_offsets, scale=scale, left=left, right=right)


def _backward(
    grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, scale, left, right, backend, deterministic, needs
):
    problem = AttentionProblem.of(q, k, v, q_offsets, k_offsets, left, right, deterministic)
    grads = dispatch.run(
        "backward",
        problem,
        backend,
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        q_offsets,
        k_offsets,
        scale=scale,
        left=left,
        right=right,
        needs=tuple(needs),
    )
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _forward_fake(q, k, v, q_offsets, k_offsets, scale, left, right, backend, deterministic):
    if q_offsets is not None:
        out, lse = q.shape[:2], q.shape[:2]  # [rows, Hq]
    else:
        batch, (length, heads) = k_offsets.shape[0] - 1, q.shape[-3:-1]
        out, lse = (batch, length, heads), (batch, heads, length)
    return q.new_empty(*out, v.shape[-1]), q.new_empty(lse, dtype=lse_dtype(q.dtype))


def _backward_fake(
    grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, scale, left, right, backend, deterministic, needs
):
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=True))


for _device in ("CPU", "CUDA"):
    _lib.impl("attend_fwd", _forward, _device)
    _lib.impl("attend_bwd", _backward, _device)
torch.library.register_fake("jaggedtensor::attend_fwd", _forward_fake, lib=_lib)
torch.library.register_fake("jaggedtensor::attend_bwd", _backward_fake, lib=_lib)


def _setup(ctx, inputs, output) -> None:
    q, k, v, q_offsets, k_offsets, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, q_offsets, k_offsets)


def _derivative(ctx, grad_out, grad_lse):
    q, k, v, out, lse, q_offsets, k_offsets = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    if grad_out is None and grad_lse is None:
        return (None,) * 10
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = attend_bwd(grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, *ctx.options, needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *(None,) * 7


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
