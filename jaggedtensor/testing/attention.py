"""Attention with torch's own `scaled_dot_product_attention`, one sequence after the other, to compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jaggedtensor.block_masks import MASK_BLOCK, blocks_of
from jaggedtensor.ops.attention import attend
from jaggedtensor.problem import QueryKind
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.budgets import assert_within_budget
from jaggedtensor.testing.cases import make_jagged, random_tensor


class AttentionResult(NamedTuple):
    """What one forward and one backward pass give; gradients are those of the packed tensors."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention: its shapes, its options and, from a seed, its values.

    >>> AttentionCase(k_lengths=(3, 0, 5), q_length=2, causal=True).exact().out.shape
    torch.Size([3, 2, 2, 8])

    Args:
        k_lengths: keys of each sequence.
        query: broadcast and per-sequence queries have `q_length` rows, a jagged one `q_lengths`.
        q_slack, k_slack: rows of NaN after the last token.
        magnitude: standard deviation of queries and keys.
        mask_share: how much of a random block mask is true; None for no mask. It has a row and a column of blocks that
            are false, where there are several.
        mask_for_all: one mask for all sequences, with a block more than the longest has.
    """

    k_lengths: tuple[int, ...]
    query: QueryKind = QueryKind.BROADCAST
    q_length: int = 3
    q_lengths: tuple[int, ...] = ()
    heads: int = 2
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: int | tuple[int | None, int | None] | None = None
    scale: float | None = None
    q_slack: int = 0
    k_slack: int = 0
    offsets_dtype: torch.dtype = torch.int64
    magnitude: float = 1.0
    mask_share: float | None = None
    mask_for_all: bool = False
    seed: int = 0

    def block_mask(self, device: torch.device | str = "cpu") -> Tensor | None:
        """`[B or 1, blocks of queries, blocks of keys]`, new at each call."""
        if self.mask_share is None:
            return None
        longest = max(self.q_lengths, default=0) if self.query is QueryKind.JAGGED else self.q_length
        sizes = [blocks_of(n) + self.mask_for_all for n in (longest, max(self.k_lengths, default=0))]
        generator = torch.Generator().manual_seed(self.seed + 4)
        mask = torch.rand(1 if self.mask_for_all else len(self.k_lengths), *sizes, generator=generator)
        mask = mask < self.mask_share
        for dim, size in enumerate(sizes, 1):
            if size > 1:
                mask.select(dim, self.seed % size).fill_(False)
        return mask.to(device)

    @property
    def options(self) -> dict[str, Any]:
        """As keyword arguments of `attend`."""
        return {"causal": self.causal, "window": self.window, "scale": self.scale}

    def with_options(self, **changes: Any) -> AttentionCase:
        """The same case but for some fields."""
        return replace(self, **changes)

    def inputs(self, device: torch.device | str = "cpu") -> tuple[Tensor | JaggedTensor, JaggedTensor, JaggedTensor]:
        """Query, keys and values, all of them leaves that require gradients."""
        common: dict[str, Any] = {"dtype": self.dtype, "offsets_dtype": self.offsets_dtype}
        k = make_jagged(self.k_lengths, self.kv_heads, self.dim, slack=self.k_slack, seed=self.seed + 1, **common)
        v = make_jagged(self.k_lengths, self.kv_heads, self.value_dim, slack=self.k_slack, seed=self.seed + 2, **common)
        q: Tensor | JaggedTensor
        if self.query is QueryKind.JAGGED:
            q = make_jagged(self.q_lengths, self.heads, self.dim, slack=self.q_slack, seed=self.seed + 3, **common)
            q = q.with_values(q.values() * self.magnitude)
        else:
            batch = (len(self.k_lengths),) if self.query is QueryKind.PER_SEQUENCE else ()
            q = self.magnitude * random_tensor(
                *batch, self.q_length, self.heads, self.dim, dtype=self.dtype, seed=self.seed + 3
            )
        k = k.with_values(k.values() * self.magnitude)
        q, k = q.to(device).requires_grad_(), k.to(device).requires_grad_()
        return q, k, k.with_values(v.values().to(device)).requires_grad_()

    def run(self, backend: str | None = None, device: torch.device | str = "cpu", **options: Any) -> AttentionResult:
        """Through the public API, forward and backward."""
        q, k, v = self.inputs(device)
        options |= {"block_mask": self.block_mask(device), "return_lse": True, "backend": backend}
        out, lse = attend(q, k, v, **self.options, **options)
        packed = out.values() if isinstance(out, JaggedTensor) else out
        q_leaf = q.values() if isinstance(q, JaggedTensor) else q
        return _with_gradients(packed, lse, [q_leaf, k.values(), v.values()])

    def exact(self) -> AttentionResult:
        """In float64, by torch's own attention."""
        return self._by_sequence(torch.float64)

    def low(self) -> AttentionResult:
        """The plain formula with every intermediate value rounded to the dtype of the case."""
        return self._by_sequence(self.dtype)

    def _by_sequence(self, dtype: torch.dtype) -> AttentionResult:
        q, k, v = self.inputs()
        q_offsets = q.offsets() if isinstance(q, JaggedTensor) else None
        # Leaves are wide, so that a sum of gradients over sequences is rounded once, as contract 4 has it.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = (q.values() if isinstance(q, JaggedTensor) else q, k.values(), v.values())
        leaves = [x.detach().to(wide).requires_grad_() for x in values]
        packed_q, packed_k, packed_v = (x.to(dtype) for x in leaves)
        out, lse = attend_by_sequence(
            packed_q, packed_k, packed_v, q_offsets, k.offsets(), **self.options, block_mask=self.block_mask(),
            stepwise=dtype != torch.float64,
        )  # fmt: skip
        result = _with_gradients(out, lse, leaves)
        return AttentionResult(result.out, result.lse, *(x.to(dtype) for x in result[2:]))


def attend_by_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    block_mask: Tensor | None = None,
    stepwise: bool = False,
) -> tuple[Tensor, Tensor]:
    """A loop over sequences; arguments and results are those of the library's operator.

    Args:
        stepwise: written out, so that scores and probabilities are rounded to the dtype of q; else torch's
            `scaled_dot_product_attention`.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    batch = k_offsets.shape[0] - 1
    outs, lses = [], []
    for b in range(batch):
        keys, values = k[k_offsets[b] : k_offsets[b + 1]], v[k_offsets[b] : k_offsets[b + 1]]
        if q_offsets is not None:
            query = q[q_offsets[b] : q_offsets[b + 1]]
        else:
            query = q[b] if q.dim() == 4 else q
        visible = _visible(len(query), len(keys), causal, window)
        if block_mask is not None:
            blocks = block_mask[b % len(block_mask)]
            for dim in (0, 1):
                blocks = blocks.repeat_interleave(MASK_BLOCK, dim)
            visible &= blocks[: len(query), : len(keys)]
        out, lse = _one_sequence(query, keys, values, visible, scale, stepwise)
        outs.append(out)
        lses.append(lse)
    if q_offsets is None:
        if not batch:
            length, heads = q.shape[-3:-1]
            return q.new_zeros(0, length, heads, v.shape[-1]), _wide(q).new_zeros(0, heads, length)
        return torch.stack(outs), torch.stack(lses).transpose(1, 2)
    slack = q.shape[0] - int(q_offsets[-1])
    outs.append(q.new_zeros(slack, q.shape[1], v.shape[-1]))
    lses.append(_wide(q).new_full((slack, q.shape[1]), -math.inf))
    return torch.cat(outs), torch.cat(lses)


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, stepwise: bool
) -> tuple[Tensor, Tensor]:
    """q `[Lq, Hq, D]`, k `[Lk, Hkv, D]`, v `[Lk, Hkv, Dv]`, visible `[Lq, Lk]`; out `[Lq, Hq, Dv]`, lse `[Lq, Hq]`."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    lse = _wide(q).new_full(q.shape[:2], -math.inf)
    rows = visible.any(1).nonzero().squeeze(1)
    if not len(rows):
        return out, lse
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))  # (Hq, Lk, D)
    q, mask = q[rows].transpose(0, 1), visible[rows]  # (Hq, rows, D)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~mask, -math.inf)
    if stepwise:
        seen = scores.softmax(2) @ v
    else:
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    out = out.index_copy(0, rows, seen.transpose(0, 1))
    return out, lse.index_copy(0, rows, _wide(scores).logsumexp(2).transpose(0, 1))


def _visible(q_length: int, k_length: int, causal: bool, window: int | tuple[int | None, int | None] | None) -> Tensor:
    """Bool `[Lq, Lk]`: the last query stands on the last key, and sees `left` keys before and `right` after its own."""
    left, right = (window, window) if window is None or isinstance(window, int) else window
    distance = torch.arange(k_length) - torch.arange(q_length)[:, None] - (k_length - q_length)  # key less own place
    visible = torch.ones(q_length, k_length, dtype=torch.bool)
    if left is not None and left >= 0:
        visible &= distance >= -left
    if right is not None and right >= 0:
        visible &= distance <= right
    return visible & (distance <= 0) if causal else visible


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _with_gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> AttentionResult:
    """Gradients of a weighted sum of out and lse; every element has a weight of its own."""
    weight = random_tensor(*out.shape, dtype=out.dtype, seed=11).to(out.device)
    lse_weight = random_tensor(*lse.shape, dtype=lse.dtype, seed=12).to(lse.device)
    results = [(x, w) for x, w in ((out, weight), (lse, lse_weight)) if x.requires_grad]
    tensors, weights = [x for x, _ in results], [w for _, w in results]
    grads = torch.autograd.grad(tensors, leaves, weights, allow_unused=True) if tensors else (None,) * 3
    filled = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
    return AttentionResult(out.detach(), lse.detach(), *filled)


def assert_attention_within_budget(case: AttentionCase, got: AttentionResult, *, multiple: float = 3.0) -> None:
    """Assert that out, lse and all gradients are as near to float64 as the plain formula in the case's dtype."""
    exact, low = case.exact(), case.low()
    for name, mine, rounded, wanted in zip(AttentionResult._fields, got, low, exact, strict=True):
        assert_within_budget(mine, rounded, wanted, f"{name} of {case}", multiple=multiple)
