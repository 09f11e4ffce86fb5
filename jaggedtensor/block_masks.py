"""Block masks: bool `[B or 1, blocks of queries, blocks of keys]`, which block of queries sees which block of keys.

Query i of sequence b sees key j only if `mask[b, i // MASK_BLOCK, j // MASK_BLOCK]`. Both places count from the
sequence's beginning, unlike a window's. A mask may have more blocks than the longest sequence, which mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jaggedtensor.errors import check_same_device, fail

MASK_BLOCK = 128  # queries, and keys; blocks of kernels divide it


def blocks_of(length: int) -> int:
    """Blocks of a mask that a sequence of this length has."""
    return -(-length // MASK_BLOCK)


def check_block_mask(
    mask: Tensor, batch_size: int, device: torch.device, longest_query: int | None, longest_key: int | None
) -> None:
    """Refuse a mask that does not fit a batch. A longest length of None is not known to the host, and is not checked.

    Raises:
        TypeError: not of bool.
        ValueError: another rank, batch size or device, or fewer blocks than a sequence has.
    """
    if mask.dtype != torch.bool:
        fail("block_mask", "bool", mask, "compare it with 0", error=TypeError)
    shape = f"[B, blocks of {MASK_BLOCK} queries, blocks of {MASK_BLOCK} keys]"
    if mask.dim() != 3:
        fail("block_mask", f"of shape {shape}", mask, "give one for all sequences as mask[None]")
    if mask.shape[0] != 1 and mask.shape[0] != batch_size:
        fail("dimension 0 of block_mask", f"{batch_size} (the batch size of key) or 1", mask)
    check_same_device(mask, "block_mask", device)
    for dim, name, longest in ((1, "queries", longest_query), (2, "keys", longest_key)):
        if longest is not None and mask.shape[dim] * MASK_BLOCK < longest:
            fail(
                f"dimension {dim} of block_mask",
                f"at least {blocks_of(longest)} (blocks of {MASK_BLOCK} {name}, up to {longest} in a sequence)",
                mask,
                f"make one of shape {shape}",
            )


def mask_of_sequence(mask: Tensor, sequence: int) -> Tensor:
    """Bool `[blocks of queries, blocks of keys]` of one sequence."""
    return mask[sequence if mask.shape[0] > 1 else 0]


def visible_through(mask: Tensor, q_len: int, k_len: int) -> Tensor:
    """Bool `[Lq, Lk]` of a mask of one sequence, `[blocks of queries, blocks of keys]`."""
    i, j = torch.arange(q_len, device=mask.device), torch.arange(k_len, device=mask.device)
    return mask[(i // MASK_BLOCK)[:, None], j // MASK_BLOCK]
