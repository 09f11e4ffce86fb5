"""The slow and obvious definition of attention over jagged sequences. What it says is what every kernel must do.

For sequence b, query head h (key-value head h // (Hq // Hkv)), with Lq queries and Lk keys:

    score[i, j] = scale * q[i] . k[j]                                  in fp32, or fp64 for fp64 inputs
    query i sees key j  when  i + Lk - Lq - left <= j <= i + Lk - Lq + right       (bottom-right; -1: no limit)
                        and   block_mask[b, i // 128, j // 128]                    (top-left; if there is one)
    lse[i]  = log(sum over visible j of exp(score[i, j]))              -inf if it sees none
    out[i]  = sum over visible j of exp(score[i, j] - lse[i]) * v[j]   0 if it sees none

The formula is that of Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1; the alignment is flash-attn's.
Plain torch throughout, so gradients of any order are torch's own. It reads the lengths on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jaggedtensor.block_masks import mask_of_sequence, visible_through
from jaggedtensor.problem import UNLIMITED


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    scale: float,
    left: int,
    right: int,
    block_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as of the operator `attend_fwd`.

    q `[Lq, Hq, D]`, `[B, Lq, Hq, D]` or, with `q_offsets`, `[rows, Hq, D]`; k `[rows, Hkv, D]`; v `[rows, Hkv, Dv]`.
    block_mask `[B or 1, blocks of queries, blocks of keys]`.
    Returns out `[B, Lq, Hq, Dv]` or `[rows, Hq, Dv]` in q's dtype, and lse `[B, Hq, Lq]` or `[rows, Hq]`.
    """
    kv_ends = k_offsets.tolist()
    batch = len(kv_ends) - 1
    q_ends = q_offsets.tolist() if q_offsets is not None else None
    dtype, wide = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = q.to(wide), k.to(wide), v.to(wide)  # here, so that gradients add up in fp32 and are rounded once
    # The sum of no numbers: 0 that hangs on every input, so that a gradient is exactly 0 and not absent.
    nothing = q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    outs, lses = [], []
    for b in range(batch):
        keys, values = k[kv_ends[b] : kv_ends[b + 1]], v[kv_ends[b] : kv_ends[b + 1]]
        if q_ends is not None:
            query = q[q_ends[b] : q_ends[b + 1]]
        else:
            query = q[b] if q.dim() == 4 else q
        mask = None if block_mask is None else mask_of_sequence(block_mask, b)
        out, lse = attend_one(query, keys, values, scale=scale, left=left, right=right, mask=mask)
        outs.append(out)
        lses.append(lse)
    if q_ends is not None:
        slack = q.shape[0] - q_ends[-1]
        outs.append(q.new_zeros(slack, q.shape[1], v.shape[2]))
        lses.append(q.new_full((slack, q.shape[1]), -math.inf))
        out, lse = torch.cat(outs), torch.cat(lses)
    elif batch:
        out, lse = torch.stack(outs), torch.stack(lses).transpose(1, 2)
    else:
        length, heads = q.shape[-3:-1]
        out, lse = q.new_zeros(0, length, heads, v.shape[2]), q.new_zeros(0, heads, length)
    return (out + nothing).to(dtype), lse + nothing


def attend_one(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, left: int, right: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sequence: q `[Lq, Hq, D]`, k `[Lk, Hkv, D]`, v `[Lk, Hkv, Dv]` -> out `[Lq, Hq, Dv]`, lse `[Lq, Hq]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if k.shape[0] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -math.inf)
    scores = scale * torch.einsum("ihd,jhd->hij", q, k)
    visible = visible_keys(q.shape[0], k.shape[0], left, right, q.device)  # [Lq, Lk]
    if mask is not None:
        visible = visible & visible_through(mask, q.shape[0], k.shape[0])
    seen = visible.any(1)  # [Lq]
    # A row that sees nothing gets finite scores, so that neither value nor gradient meets inf - inf; zeroed below.
    scores = scores.masked_fill(~visible & seen[:, None], -math.inf)
    lse = scores.logsumexp(2)  # [Hq, Lq]
    p = (scores - lse[:, :, None]).exp() * visible
    out = torch.einsum("hij,jhd->ihd", p, v)
    return out, lse.masked_fill(~seen, -math.inf).transpose(0, 1)


def visible_keys(q_len: int, k_len: int, left: int, right: int, device: torch.device | None = None) -> Tensor:
    """Bool `[Lq, Lk]`: contract 3."""
    place = torch.arange(q_len, device=device)[:, None] + (k_len - q_len)  # the key that each query stands on
    j = torch.arange(k_len, device=device)
    visible = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    if left != UNLIMITED:
        visible &= j >= place - left
    if right != UNLIMITED:
        visible &= j <= place + right
    return visible
