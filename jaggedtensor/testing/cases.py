"""Jagged batches that have broken other people's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jaggedtensor.tensor import JaggedTensor

# Empty and one-token sequences at every place, repeated offsets, nothing at all.
LENGTHS: dict[str, tuple[int, ...]] = {
    "no sequences": (),
    "one empty": (0,),
    "all empty": (0, 0, 0),
    "one token": (1,),
    "only one-token sequences": (1, 1, 1),
    "empty at both ends": (0, 2, 3, 0),
    "empty in a row": (2, 0, 0, 1, 4),
    "trailing empty": (2, 2, 0, 0),
    "leading empty": (0, 0, 3),
    "mixed": (3, 0, 1, 5, 2),
}


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """`[B + 1]` on the CPU.

    >>> offsets_of([2, 0, 3])
    tensor([0, 2, 2, 5])
    """
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def make_jagged(
    lengths: Sequence[int],
    *feature: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    offsets_dtype: torch.dtype = torch.int64,
    slack: int = 0,
    strided: bool = False,
    requires_grad: bool = False,
    seed: int = 0,
) -> JaggedTensor:
    """A batch of random tokens: normal for floating point, 0..9 for integers, the global random state untouched.

    Args:
        slack: rows after the last token, filled with what must not be read: NaN, or a number that is no index.
        strided: values are every other row of a larger tensor, whose other rows are poison too.

    >>> make_jagged([1, 0, 2], 3, slack=1).values().shape
    torch.Size([4, 3])
    """
    tokens = sum(lengths)
    values = random_tensor(tokens + slack, *feature, dtype=dtype, seed=seed)
    values[tokens:] = poison(dtype)
    values = values.to(device)
    if strided:
        larger = torch.full((2 * len(values) + 1, *feature), poison(dtype), dtype=dtype, device=device)
        larger[1::2] = values
        values = larger[1::2]
    return JaggedTensor(values.requires_grad_(requires_grad), offsets_of(lengths, offsets_dtype).to(device))


def random_tensor(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """On the CPU, the same for the same seed: normal, 0..9 for integers, coins for booleans."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    return torch.randint(2 if dtype == torch.bool else 10, shape, generator=generator).to(dtype)


def poison(dtype: torch.dtype) -> float | int | bool:
    """A value that spoils every result it reaches."""
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max - 1
