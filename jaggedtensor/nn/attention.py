"""Multi-head attention of jagged batches as a module, with the parameters of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaggedtensor.errors import fail
from jaggedtensor.nn.rotary import Rotary
from jaggedtensor.tensor import JaggedTensor

Batch = Tensor | JaggedTensor


class JaggedAttention(nn.Module):
    """Projections to heads, attention, and a projection back.

    >>> attention = JaggedAttention(32, num_heads=4, causal=True, rotary=True)
    >>> batch = JaggedTensor.from_list([torch.randn(n, 32) for n in (5, 0, 3)])
    >>> attention(batch).shape  # self-attention
    (3, None, 32)
    >>> JaggedAttention(32, num_heads=4)(torch.randn(2, 32), batch).shape  # two queries, the same for every sequence
    torch.Size([3, 2, 32])

    Parameters have the names, shapes and initial values of `torch.nn.MultiheadAttention`, so that the state dict of one
    loads into the other; only `kv_heads` makes shapes, and `qk_norm` names, that it doesn't have.

    Args:
        dim: features of queries and of the result.
        num_heads: heads of the query, Hq.
        kv_heads: heads of keys and values, which divide Hq (grouped-query attention, Ainslie et al. 2023); Hq if left
            out.
        head_dim: D; `dim / num_heads` if left out.
        key_dim, value_dim: features of keys and values in cross-attention; `dim`, and those of the keys, if left out.
        causal, window, scale: as in `jaggedtensor.attend`.
        qk_norm: RMS norm of each head of queries and keys (Henry et al. 2020), before positions.
        rotary: a `Rotary`, or True for one with its defaults; for jagged queries only.
        bias: of the four projections.

    Weights of attention are never dropped: no kernel does it. Dropout of the result is the caller's.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = False,
        window: int | tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        rotary: bool | Rotary = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        if dim < 1 or num_heads < 1:
            fail("dim and num_heads", "at least 1", f"{dim} and {num_heads}")
        if head_dim is None and dim % num_heads:
            fail("dim", f"a multiple of num_heads ({num_heads})", dim, "or name head_dim")
        if kv_heads < 1 or num_heads % kv_heads:
            fail("kv_heads", f"a divisor of num_heads ({num_heads})", kv_heads)
        self.dim, self.num_heads, self.kv_heads = dim, num_heads, kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.key_dim = key_dim or dim
        self.value_dim = value_dim or self.key_dim
        self.causal, self.window, self.scale = causal, window, scale
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        q_rows, kv_rows = num_heads * self.head_dim, kv_heads * self.head_dim
        self.rows = (q_rows, kv_rows, kv_rows)  # of the projections, one below the other
        together = self.key_dim == self.value_dim == dim
        shapes = zip("qkv", self.rows, (dim, self.key_dim, self.value_dim), strict=True)
        for name, rows, features in shapes:
            weight = None if together else nn.Parameter(torch.empty(rows, features, **factory))
            self.register_parameter(f"{name}_proj_weight", weight)
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self.rows), dim, **factory)) if together else None
        self.in_proj_bias = nn.Parameter(torch.empty(sum(self.rows), **factory)) if bias else None
        self.out_proj = nn.Linear(q_rows, dim, bias=bias, **factory)
        self.q_norm = nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, **factory) if qk_norm else None
        self.rotary = Rotary(self.head_dim) if rotary is True else rotary or None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.MultiheadAttention`: Glorot's uniform for the projections to heads, zero biases."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Batch,
        key: JaggedTensor | None = None,
        value: JaggedTensor | None = None,
        *,
        block_mask: Tensor | None = None,
        group: Any = None,
    ) -> Any:
        """Attention of `query` to `key`, or to itself.

        Args:
            query: JaggedTensor `[tokens_q, dim]`; or, with `key`, Tensor `[Lq, dim]`, the same for every sequence, or
                `[B, Lq, dim]`, one for each.
            key: `[tokens, key_dim]`; the query if left out.
            value: `[tokens, value_dim]` on the layout of the keys; the keys if left out.
            block_mask: see `jaggedtensor.attend`.
            group: see `jaggedtensor.attend`; every rank has all queries and a part of the keys.

        Returns:
            JaggedTensor `[tokens_q, dim]` for a jagged query, else Tensor `[B, Lq, dim]`.
        """
        if key is None and not isinstance(query, JaggedTensor):
            fail("query", "a JaggedTensor for self-attention", query, "or pass key", error=TypeError)
        if self.rotary is not None and not isinstance(query, JaggedTensor):
            fail("query", "a JaggedTensor where positions are rotary", query, "a learned query has no place")
        if self.rotary is not None and group is not None:
            fail("group", "None where positions are rotary", "a group", "a part of a sequence does not know its place",
                 error=NotImplementedError)  # fmt: skip
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self._project(query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            wide = self.q_norm.weight.dtype  # under autocast the projections come in half precision
            q, k = self.q_norm(q.to(wide)), self.k_norm(k.to(wide))
        if self.rotary is not None:
            q, k = self.rotary(q, k.layout), self.rotary(k)
        options = {"scale": self.scale, "causal": self.causal, "window": self.window, "block_mask": block_mask}
        out = k.attend(q, v, group=group, **options)
        return self.out_proj(out.flatten(-2))

    def _project(self, query: Batch, key: JaggedTensor | None, value: JaggedTensor | None) -> tuple[Any, Any, Any]:
        """Features of all heads, `[tokens, heads * D]` each; one product where all three come from one input."""
        if key is None and value is None and self.in_proj_weight is not None:
            together: Any = F.linear(query, self.in_proj_weight, self.in_proj_bias)  # type: ignore[arg-type]
            q, k, v = torch.split(together, list(self.rows), dim=-1)
            return q, k, v
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.split(self.rows)
        else:
            weights = tuple(getattr(self, f"{name}_proj_weight") for name in "qkv")
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(self.rows)
        key = query if key is None else key  # type: ignore[assignment]  # forward has seen to it
        inputs = (query, key, key if value is None else value)
        q, k, v = (F.linear(*part) for part in zip(inputs, weights, biases, strict=True))  # type: ignore[arg-type]
        return q, k, v

    def extra_repr(self) -> str:
        """For printing."""
        shown = f"{self.dim}, num_heads={self.num_heads}"
        options = {"kv_heads": self.num_heads, "causal": False, "window": None, "scale": None}
        return shown + "".join(
            f", {name}={value}" for name, default in options.items() if (value := getattr(self, name)) != default
        )
