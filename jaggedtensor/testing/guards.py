"""Memory that tells on kernels: results in the middle of guard zones, inputs in the middle of poison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.testing.cases import poison

_GUARD = 4096  # elements on each side
_MARK = 0x5A  # every byte of a guard


@contextmanager
def guarded_allocations() -> Iterator[list[Tensor]]:
    """Tensors made by `new_empty`, `new_zeros`, `new_full`, `empty_like` and `zeros_like` stand between guards, and$
    what is empty is NaN. On leaving, asserts that all guards are as they were; the list gets the tensors.

    Raises:
        AssertionError: something was written before or after a tensor.
    """
    made: list[tuple[Tensor, Tensor]] = []
    tensors: list[Tensor] = []

    def guarded(result: Tensor, fill: Any) -> Tensor:
        if result.layout != torch.strided or not result.is_contiguous() or result.is_meta:
            return result
        flat = torch.empty(result.numel() + 2 * _GUARD, dtype=result.dtype, device=result.device)
        flat.view(torch.uint8).fill_(_MARK)
        inner = torch.empty(0, dtype=result.dtype, device=result.device)
        inner.set_(flat.untyped_storage(), _GUARD, result.shape, result.stride())
        inner.fill_(poison(result.dtype)) if fill is None else inner.copy_(result)
        made.append((flat, inner))
        tensors.append(inner)
        return inner

    originals = {
        (Tensor, "new_empty"): None,
        (Tensor, "new_zeros"): 0,
        (Tensor, "new_full"): 0,
        (torch, "empty_like"): None,
        (torch, "zeros_like"): 0,
    }
    saved = {key: getattr(*key) for key in originals}

    def replacement(original: Any, fill: Any) -> Any:
        return lambda *args, **kwargs: guarded(original(*args, **kwargs), fill)

    for (owner, name), fill in originals.items():
        setattr(owner, name, replacement(saved[owner, name], fill))
    try:
        yield tensors
    finally:
        for (owner, name), original in saved.items():
            setattr(owner, name, original)
    for flat, inner in made:
        raw, size = flat.view(torch.uint8), flat.element_size()
        for side, guard in (("before", raw[: _GUARD * size]), ("after", raw[raw.numel() - _GUARD * size :])):
            changed = int((guard != _MARK).sum())
            assert not changed, f"{changed} bytes were written {side} a tensor of shape {list(inner.shape)}"


def embedded(x: Tensor, fill: float | int | None = None, rows: int = 64) -> Tensor:
    """The same values, with rows of NaN (or `fill`) before and after them in memory."""
    larger = torch.full((x.shape[0] + 2 * rows, *x.shape[1:]), poison(x.dtype) if fill is None else fill, dtype=x.dtype)
    larger = larger.to(x.device)
    larger[rows : rows + x.shape[0]] = x.detach()
    return larger[rows : rows + x.shape[0]].requires_grad_(x.requires_grad)


def poison_free_memory(nbytes: int, device: torch.device | str) -> None:
    """Fill memory that the allocator holds, or would get next, with NaN of every dtype: what is not written shows."""
    for size in (nbytes, nbytes // 8, nbytes // 64, 1 << 20, 1 << 16, 1 << 12):
        blocks = [torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=device) for _ in range(8)]
        del blocks
