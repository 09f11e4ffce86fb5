"""The operators `jaggedtensor::attend_fwd`, `attend_bwd` and `attend_fp8`: what torch knows of attention.

Schemas, shapes and derivative only; the kernels belong to the implementation that `backend` names. All state that they
need is in tensors, so that `torch.compile`, checkpointing and CUDA graphs see data and no objects.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from jaggedtensor.errors import check_no_forward_mode, fail, is_readable
from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.problem import AttentionArgs, AttentionProblem, Quantised, lse_dtype, lse_shape, out_shape

_lib = torch.library.Library("jaggedtensor", "FRAGMENT")
_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor k_offsets, Tensor? block_mask, Tensor[] forward_schedule, "
    "Tensor[] backward_schedule, float scale, int left, int right, str backend, bool deterministic, bool slack, "
    "bool complete"
)
_lib.define(f"attend_fwd({_ARGS}) -> (Tensor, Tensor)")
_lib.define(
    f"attend_bwd(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_ARGS}, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
_lib.define(
    "attend_fp8(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? q_offsets, "
    "Tensor k_offsets, Tensor? block_mask, Tensor[] schedule, float scale, int left, int right, str backend, "
    "bool half, bool slack, bool complete) -> (Tensor, Tensor)"
)
attend_fwd = torch.ops.jaggedtensor.attend_fwd.default
attend_bwd = torch.ops.jaggedtensor.attend_bwd.default
attend_fp8 = torch.ops.jaggedtensor.attend_fp8.default


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, products have the precision that attention asks of them: autocast has done its part on q, k and v."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _forward(
    q,
    k,
    v,
    q_offsets,
    k_offsets,
    block_mask,
    forward_schedule,
    backward_schedule,
    scale,
    left,
    right,
    backend,
    deterministic,
    slack,
    complete,
):
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic, block_mask is not None)
    args = AttentionArgs(problem, q, k, v, q_offsets, k_offsets, scale, slack, complete, forward_schedule, block_mask)
    with no_autocast(q.device):
        return by_name(backend).launcher().forward(args)


def _backward(
    grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, block_mask, forward_schedule, backward_schedule, scale,
    left, right, backend, deterministic, slack, complete, needs,
):  # fmt: skip
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic, block_mask is not None)
    args = AttentionArgs(problem, q, k, v, q_offsets, k_offsets, scale, slack, complete, backward_schedule, block_mask)
    with no_autocast(q.device):
        grads = by_name(backend).backward_launcher(problem).backward(args, grad_out, grad_lse, out, lse, tuple(needs))
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _forward_fp8(
    q, k, v, q_scale, k_scale, v_scale, q_offsets, k_offsets, block_mask, schedule, scale, left, right, backend, half,
    slack, complete,
):  # fmt: skip
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, False, block_mask is not None)
    args = AttentionArgs(problem, q, k, v, q_offsets, k_offsets, scale, slack, complete, schedule, block_mask)
    by = Quantised(q_scale, k_scale, v_scale, torch.float16 if half else torch.bfloat16)
    return by_name(backend).launcher().forward(args, quantised=by)


def _forward_fp8_fake(q, k, v, q_scale, k_scale, v_scale, q_offsets, k_offsets, *options):
    half = options[-3]
    out = q.new_empty(out_shape(q, v, q_offsets, k_offsets), dtype=torch.float16 if half else torch.bfloat16)
    return out, q.new_empty(lse_shape(q, q_offsets, k_offsets), dtype=torch.float32)


def _forward_fake(q, k, v, q_offsets, k_offsets, *options):
    out = q.new_empty(out_shape(q, v, q_offsets, k_offsets))
    return out, q.new_empty(lse_shape(q, q_offsets, k_offsets), dtype=lse_dtype(q.dtype))


def _backward_fake(grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, *options):
    needs = options[-1]
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip((q, k, v), needs, strict=True))


def attend(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator `attend_fwd`; straight to its kernel where nobody watches, as the dispatcher costs as much again."""
    return attend_fwd(*args) if torch.compiler.is_compiling() else _attend(*args)


def attend_in_8_bits(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator `attend_fp8`, or straight to its kernel. It has no derivative."""
    return attend_fp8(*args) if torch.compiler.is_compiling() else _below_autograd(attend_fp8, _forward_fp8, args)


def _attend(*args: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (args[0].requires_grad or args[1].requires_grad or args[2].requires_grad):
        return _Attend.apply(*args)
    return _below_autograd(attend_fwd, _forward, args)


def _below_autograd(operator: Any, kernel: Any, args: tuple[Any, ...]) -> Any:
    check_no_forward_mode(args[0], "attention", "use backend='reference'")
    if _is_watched(args[0]):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)
    return kernel(*args)


def _is_watched(tensor: Tensor) -> bool:
    """Whether somebody looks at operators as they are called: a tracer, a mode, a transform, a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or not is_readable(tensor)
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, q_offsets, k_offsets, block_mask, _, schedule, *ctx.options = args
        out, lse = _below_autograd(attend_fwd, _forward, args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, q_offsets, k_offsets, block_mask, *schedule)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, out, lse, q_offsets, k_offsets, block_mask, *schedule = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        nothing = [None] * (len(ctx.needs_input_grad) - 3)
        if grad_out is None and grad_lse is None:
            return None, None, None, *nothing
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grads = _attend_backward(
            grad_out, grad_lse, out, lse, q, k, v, q_offsets, k_offsets, block_mask, [], schedule, *ctx.options, needs
        )
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), *nothing


def _attend_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return _AttendBackward.apply(*args)
    return _below_autograd(attend_bwd, _backward, args)


class _AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _below_autograd(attend_bwd, _backward, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        fail(
            "the order of derivative of attention",
            "1",
            "2 (double backward)",
            "use backend='reference', which torch differentiates any number of times",
            error=NotImplementedError,
        )


for _device in ("CPU", "CUDA"):
    _lib.impl("attend_fwd", _forward, _device)
    _lib.impl("attend_bwd", _backward, _device)
    _lib.impl("attend_fp8", _forward_fp8, _device)
_lib.impl("attend_fwd", _attend, "Autograd")
_lib.impl("attend_bwd", _attend_backward, "Autograd")
torch.library.register_fake("jaggedtensor::attend_fwd", _forward_fake, lib=_lib)
torch.library.register_fake("jaggedtensor::attend_bwd", _backward_fake, lib=_lib)
torch.library.register_fake("jaggedtensor::attend_fp8", _forward_fp8_fake, lib=_lib)
