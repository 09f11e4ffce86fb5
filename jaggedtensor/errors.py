"""How the library refuses: every message says name, expected, got, remedy."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad


def describe(value: object) -> str:
    """A value in a few words: `float32[5, 3] on cpu` for a tensor, the type's name for most other things."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)} on {value.device}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__


def fail(name: str, expected: str, got: object, remedy: str = "", *, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` with the sentence every refusal has.

    >>> fail("offsets[-1]", "at most 512 (rows of values)", 600, "build offsets with JaggedTensor.from_lengths")
    Traceback (most recent call last):
    ValueError: offsets[-1] must be at most 512 (rows of values), got 600; build offsets with JaggedTensor.from_lengths
    """
    shown = got if isinstance(got, str) else describe(got)
    tail = f"; {remedy}" if remedy else ""
    raise error(f"{name} must be {expected}, got {shown}{tail}")


def check_tensor(value: object, name: str, remedy: str = "") -> Tensor:
    """A dense tensor, or a TypeError that says what else it is."""
    if not isinstance(value, Tensor):
        fail(name, "a Tensor", value, remedy, error=TypeError)
    if value.layout != torch.strided:
        fail(name, "a dense (strided) Tensor", f"layout {value.layout}", remedy, error=TypeError)
    return value


def check_integers(value: object, name: str) -> Tensor:
    """An int32 or int64 tensor of rank 1: offsets, lengths, indices."""
    tensor = check_tensor(value, name)
    if tensor.dtype not in (torch.int32, torch.int64):
        fail(name, "int32 or int64", tensor, f"cast with {name}.to(torch.int64)", error=TypeError)
    if tensor.dim() != 1:
        fail(name, "of rank 1", tensor)
    return tensor


def check_floating(tensor: Tensor, name: str, operation: str) -> None:
    """Refuse integers and booleans for what has no meaning on them."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        fail(name, f"floating point for {operation}", tensor, "convert with .float()", error=TypeError)


def check_same_device(tensor: Tensor, name: str, device: torch.device) -> None:
    """Refuse a tensor that is on another device than the others."""
    if tensor.device != device:
        fail(name, f"on {device}", tensor, f"move it with .to({str(device)!r})")


def check_no_forward_mode(tensor: Tensor, operation: str, remedy: str) -> None:
    """Refuse forward-mode differentiation (`torch.func.jvp`, dual numbers) where a tangent would be lost unseen."""
    if forward_ad._current_level >= 0 and tensor.is_floating_point():
        fail(f"differentiation of {operation}", "reverse mode", "forward mode", remedy, error=NotImplementedError)


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at now: false while tracing and for meta and fake tensors."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # subclasses such as FakeTensor override it
