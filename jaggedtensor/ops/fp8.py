"""Attention of operands in 8 bits (e4m3): half the bytes of keys and values, and on Blackwell half the time of the
products. Forward only, and less exact: see "8 bits" in docs/kernels/blackwell-forward.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from jaggedtensor.errors import check_floating, check_same_device, check_tensor, fail
from jaggedtensor.kernels.dispatch import IMPLEMENTATIONS, Choice, choose
from jaggedtensor.ops import contract
from jaggedtensor.ops.attention import (
    Window,
    _backend,
    _check,
    _check_ranks,
    _scale,
    _slack,
    _window,
    attend,
)
from jaggedtensor.problem import AttentionProblem
from jaggedtensor.tensor import JaggedTensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
_BY_HEAD_OR_NOT = ("head", "tensor")
Values = TypeVar("Values", Tensor, JaggedTensor)


def quantize_fp8(x: Values, per: str = "head") -> tuple[Values, Tensor]:
    """Values in e4m3, and what they are multiples of: x is about x8 * scale, within 1 / 16 of each element.

    >>> x8, scale = quantize_fp8(torch.randn(5, 2, 16))
    >>> x8.dtype, scale.dtype, scale.shape
    (torch.float8_e4m3fn, torch.float32, torch.Size([2]))

    The scale is the least power of two that brings the largest element to 448 or less, so that `dequantize_fp8` is
    exact in bf16 and wider types. Elements below 2 ** -13 of the largest may lose more than 1 / 16 of themselves, those
    below 2 ** -17 all. NaN stays NaN, and spoils no scale. Slack is not looked at.

    Args:
        x: of any floating-point dtype: Tensor `[..., H, D]`, JaggedTensor `[tokens, H, D]`; without the head axis, of
            one head, Tensor `[Lq, D]`, JaggedTensor `[tokens, D]`.
        per: "head": a scale for each, `[H]`, where a few heads are much larger than others; "tensor": one, `[]`.
            Without a head axis always one.

    Returns:
        The values, and the scale in fp32. Autograd sees through it, but `attend_fp8` has no gradient.

    Raises:
        TypeError: x is not floating point, or already of 8 bits.
        ValueError: `per` is neither.
    """
    if per not in _BY_HEAD_OR_NOT:
        fail("per", "'head' or 'tensor'", repr(per))
    values = x.values() if isinstance(x, JaggedTensor) else check_tensor(x, "x")
    check_floating(values, "x", "quantize_fp8")
    if values.itemsize == 1:
        fail("x", "of 16 bits or more", values, "it is quantised already", error=TypeError)
    if values.dim() < 2:
        fail("x", "of shape [..., H, D] or [rows, D]", values)
    size = values.detach().abs().float()
    ignored = size.isnan()
    if isinstance(x, JaggedTensor) and x.layout.has_slack(values.shape[0]):
        rows = torch.arange(values.shape[0], device=values.device) >= x.offsets()[-1]
        ignored = ignored | rows.view(-1, *[1] * (values.dim() - 1))
    size = size.masked_fill(ignored, 0)
    size = size.transpose(0, -2).flatten(1) if per == "head" and values.dim() > 2 else size.flatten()
    largest = size.amax(-1) if size.shape[-1] else size.new_zeros(size.shape[:-1])
    half, exponent = torch.frexp(largest.clamp(max=torch.finfo(torch.float32).max) / LARGEST)
    scale = torch.ldexp(torch.ones_like(half), torch.where(half == 0.5, exponent - 1, exponent))  # 1 for 0
    quantised = (values.float() / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return (x._of(quantised, x.layout) if isinstance(x, JaggedTensor) else quantised), scale


def dequantize_fp8(x: Values, scale: Tensor, dtype: torch.dtype = torch.float32) -> Values:
    """x * scale in a dtype, for values `[..., H, D]` and a scale `[H]` or `[]`; see `quantize_fp8`."""
    values = x.values() if isinstance(x, JaggedTensor) else x
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = (values.to(wide) * scale.to(wide)[..., None]).to(dtype)
    return x._of(values, x.layout) if isinstance(x, JaggedTensor) else values


def attend_fp8(
    query: Tensor | JaggedTensor,
    key: JaggedTensor,
    value: JaggedTensor | None = None,
    *,
    scales: Sequence[Tensor],
    scale: float | None = None,
    causal: bool = False,
    window: Window = None,
    return_lse: bool = False,
    backend: str | None = None,
    block_mask: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Attention as `attend`'s, of operands in e4m3. Forward only.

    >>> keys = JaggedTensor.from_list([torch.randn(n, 2, 16) for n in (5, 0, 3)])
    >>> (q8, q_scale), (k8, k_scale) = quantize_fp8(torch.randn(4, 4, 16)), quantize_fp8(keys)
    >>> attend_fp8(q8, k8, scales=(q_scale, k_scale)).shape
    torch.Size([3, 4, 4, 16])

    On a Blackwell GPU both products are of 8-bit numbers: the weights too are rounded to e4m3, times 16, so that those
    that matter are in its range. Their sums are those before they are rounded, in fp32, and so is lse. Elsewhere, and
    for head dimensions that are not multiples of 16, operands are dequantised (to bf16, on a CPU to fp32) and go to
    `attend`; that takes as much memory and time as it does.

    Args:
        query, key, value: float8_e4m3fn, of the shapes that `attend` takes.
        scales: what the elements of query, key and value are multiples of: fp32 `[H]` of their heads, or `[]`, and
            positive; two where values are the keys.
        backend: "blackwell" multiplies in 8 bits or raises, every other dequantises.
        out_dtype: of the output, bf16 or fp16.
        scale, causal, window, return_lse, block_mask: as of `attend`.

    Raises:
        TypeError: operands not of float8_e4m3fn, scales not of fp32, or what `attend` says.
        ValueError: scales of other shapes or devices, or what `attend` says.
        NotImplementedError: an operand requires a gradient; or what `attend` says.
    """
    if not isinstance(key, JaggedTensor):
        fail("key", "a JaggedTensor", key, "quantize_fp8 of one gives one", error=TypeError)
    value, scales = (key, [*scales, *scales[1:2]]) if value is None else (value, list(scales))
    named = {"query": query, "key": key, "value": value}
    if len(scales) != 3:
        fail("scales", "of query, key and value (without a value of query and key)", f"{len(scales)} of them")
    packed = {}
    for name, x in named.items():
        packed[name] = x.values() if isinstance(x, JaggedTensor) else check_tensor(x, name)
    for name, x in packed.items():
        if x.dtype != E4M3:
            fail(name, "of float8_e4m3fn", x, "use quantize_fp8, or attend for other dtypes", error=TypeError)
    if out_dtype not in (torch.bfloat16, torch.float16):
        fail("out_dtype", "bf16 or fp16", str(out_dtype), error=TypeError)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*packed.values(), *scales)):
        fail(
            "operands of attend_fp8", "without a gradient, as it is forward only", "one that requires it",
            "call it under torch.no_grad(), or use attend", error=NotImplementedError,
        )  # fmt: skip
    one_head = packed["key"].dim() == 2
    _check_scales(scales, packed, one_head)
    left, right = _window(causal, window)
    backend = _backend(backend)
    q, k, v = packed.values()
    _check_ranks(query, q, k, v, one_head)
    if one_head:
        q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2)
    _check(query, key, value, q, k, v, block_mask, (E4M3,))
    q_offsets = query.offsets() if isinstance(query, JaggedTensor) else None
    problem = AttentionProblem.of(q, k, v, q_offsets, left, right, False, block_mask is not None)
    if backend != "reference":
        choice, whole = choose_fp8(problem, backend)
        if whole:
            rows, layout = (k.shape[0], q.shape[0]), query.layout if isinstance(query, JaggedTensor) else None
            implementation = choice.implementation
            schedule, _ = implementation.schedules(problem, key.layout, layout, *rows, False, block_mask)
            out, lse = contract.attend_in_8_bits(
                q, k, v, *scales, q_offsets, key.offsets(), block_mask, schedule, _scale(scale, k), left, right,
                implementation.name, out_dtype == torch.float16, _slack(query, key, value), key.layout.is_complete,
            )  # fmt: skip
            if one_head:
                out, lse = out.squeeze(-2), lse.squeeze(1)
            result = query._of(out, query.layout) if isinstance(query, JaggedTensor) else out
            return (result, lse) if return_lse else result
    wide = torch.float64 if backend == "reference" else wide_dtype(k.device.type)
    dequantised: list[Any] = [query, key, value]
    dequantised = [dequantize_fp8(x, s, wide) for x, s in zip(dequantised, scales, strict=True)]
    result, lse = attend(
        *dequantised, scale=scale, causal=causal, window=window, return_lse=True, backend=backend,
        block_mask=block_mask,
    )  # fmt: skip
    result, lse = result.to(out_dtype), lse.float()
    return (result, lse) if return_lse else result


def wide_dtype(device: str) -> torch.dtype:
    """What operands are dequantised to on a device of a type."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def choose_fp8(problem: AttentionProblem, backend: str | None = None) -> tuple[Choice, bool]:
    """What serves a problem in e4m3, and whether it takes it as it is: else dequantised.

    Raises:
        NotImplementedError: the one that is named, or every one, lacks something.
    """
    whole = {one.name: one.lacks(problem) for one in IMPLEMENTATIONS if E4M3 in one.dtypes}
    if backend in whole:
        return choose(problem, backend), True
    if backend is None and not all(whole.values()):
        try:
            return choose(problem), True
        except NotImplementedError:  # not examined
            whole = {name: ["has not passed python -m jaggedtensor.doctor on such a GPU here"] for name in whole}
    choice = choose(replace(problem, dtype=wide_dtype(problem.device.type)), backend)
    over = {f"{name} in 8 bits": why for name, why in whole.items()} if backend is None else {}
    return Choice(choice.implementation, choice.passed_over | over), False


def _check_scales(scales: Sequence[Tensor], packed: dict[str, Tensor], one_head: bool) -> None:
    for s, (name, x) in zip(scales, packed.items(), strict=True):
        check_tensor(s, f"the scale of {name}")
        check_same_device(s, f"the scale of {name}", x.device)
        if s.dtype != torch.float32:
            fail(f"the scale of {name}", "of fp32", s, "use quantize_fp8", error=TypeError)
        heads = x.shape[-2]
        if s.dim() and (one_head or s.shape != (heads,)):
            fail(f"the scale of {name}", "of shape []" if one_head else f"of shape [{heads}] (its heads) or []", s)
