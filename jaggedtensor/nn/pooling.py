"""Pooling by attention: learned queries ask every sequence the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaggedtensor.errors import fail
from jaggedtensor.nn.attention import JaggedAttention
from jaggedtensor.nn.transformer import Activation, Norm, feed_forward
from jaggedtensor.tensor import JaggedTensor


class PMAPooling(nn.Module):
    """Pooling by multi-head attention (PMA; Lee et al., "Set Transformer", 2019, section 3.2), norm first.

    >>> pool = PMAPooling(32, num_heads=4, num_queries=2)
    >>> pool(JaggedTensor.from_list([torch.randn(n, 32) for n in (5, 0, 3)])).shape
    torch.Size([3, 2, 32])

    The learned queries are projected once, whatever the batch, and attend to every sequence; then come a residual and a
    feed-forward net. An empty sequence gives what the queries alone give, the same for all empty sequences.

    Args:
        dim: features of a token, of a query and of the result.
        num_heads: heads of the query.
        num_queries: results for each sequence.
        hidden: features inside the feed-forward net; `4 * dim` if left out, 0 for no net.
        residual: whether the queries themselves are added. Without, and with `bias=False` and `hidden=0`, an empty
            sequence gives 0.
        norm, activation, dropout, bias, attention: as in `JaggedTransformerLayer`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_queries: int = 1,
        hidden: int | None = None,
        *,
        residual: bool = True,
        norm: Norm = nn.LayerNorm,
        activation: Activation = F.gelu,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        if num_queries < 1:
            fail("num_queries", "at least 1", num_queries)
        for name in ("causal", "window", "rotary"):
            if attention.get(name):
                fail(name, "left out: a learned query has no place", repr(attention[name]))
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = 4 * dim if hidden is None else hidden
        self.residual, self.activation = residual, activation
        self.query = nn.Parameter(torch.empty(num_queries, dim, **factory))
        self.norm_query, self.norm_keys = norm(dim, **factory), norm(dim, **factory)
        self.attention = JaggedAttention(dim, num_heads, bias=bias, **factory, **attention)
        self.dropout1 = nn.Dropout(dropout)
        if hidden:
            self.norm: nn.Module | None = norm(dim, **factory)
            self.linear1 = nn.Linear(dim, hidden, bias=bias, **factory)
            self.linear2 = nn.Linear(hidden, dim, bias=bias, **factory)
            self.dropout, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        else:
            self.norm = None
        nn.init.xavier_uniform_(self.query)

    def forward(self, x: JaggedTensor, *, group: Any = None) -> Tensor:
        """`[tokens, dim]` to `[B, num_queries, dim]`.

        Args:
            group: ranks over which the tokens of each sequence are spread, see `jaggedtensor.attend`.
        """
        pooled = self.dropout1(self.attention(self.norm_query(self.query), self.norm_keys(x), group=group))
        if self.residual:
            pooled = pooled + self.query
        if self.norm is None:
            return pooled
        return pooled + self.dropout2(feed_forward(self, self.norm(pooled)))
