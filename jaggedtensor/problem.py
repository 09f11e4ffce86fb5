"""AttentionProblem: all that the choice and the configuration of a kernel may look at."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = -1  # a window side without a limit


class QueryKind(enum.Enum):
    BROADCAST = "broadcast"  # [Lq, Hq, D]: one query for every sequence
    PER_SEQUENCE = "per sequence"  # [B, Lq, Hq, D]
    JAGGED = "jagged"  # [tokens_q, Hq, D] with its own offsets


@dataclass(frozen=True)
class AttentionProblem:
    """One call of attention without its values: a frozen input, so that choosing is a pure function of it.

    `left` and `right` are the window of DESIGN's contract 3: query i sees key j when
    `i + Lk - Lq - left <= j <= i + Lk - Lq + right`, with -1 for no limit; causal is `right = 0`.
    """

    query: QueryKind
    batch_size: int
    q_rows: int  # rows of the query tensor: Lq, B * Lq, or rows of a jagged one
    kv_rows: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    left: int = UNLIMITED
    right: int = UNLIMITED
    deterministic: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        left: int,
        right: int,
        deterministic: bool,
    ) -> AttentionProblem:
        if q_offsets is not None:
            kind = QueryKind.JAGGED
        else:
            kind = QueryKind.PER_SEQUENCE if q.dim() == 4 else QueryKind.BROADCAST
        return cls(
            query=kind,
            batch_size=k_offsets.shape[0] - 1,
            q_rows=q.shape[:-2].numel(),
            kv_rows=k.shape[0],
            q_heads=q.shape[-2],
            kv_heads=k.shape[1],
            head_dim=k.shape[2],
            value_dim=v.shape[2],
            dtype=k.dtype,
            device_type=k.device.type,
            left=left,
            right=right,
            deterministic=deterministic,
        )

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.q_heads // self.kv_heads

    @property
    def masked(self) -> bool:
        return self.left != UNLIMITED or self.right != UNLIMITED
