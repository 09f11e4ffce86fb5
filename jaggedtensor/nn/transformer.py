"""A layer of a transformer, and a stack of them, with the parameters of `torch.nn.TransformerEncoderLayer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jaggedtensor.errors import fail
from jaggedtensor.nn.attention import Batch, JaggedAttention
from jaggedtensor.tensor import JaggedTensor

Activation = Callable[[Any], Any]
Norm = Callable[..., nn.Module]  # of the number of features, with device and dtype: nn.LayerNorm, nn.RMSNorm


class JaggedTransformerLayer(nn.Module):
    """Attention and a feed-forward net, each with a norm and a residual (Vaswani et al. 2017).

    >>> layer = JaggedTransformerLayer(32, num_heads=4, kv_heads=2, causal=True, rotary=True)
    >>> layer(JaggedTensor.from_list([torch.randn(n, 32) for n in (5, 0, 3)])).shape
    (3, None, 32)

    Parameters have the names, shapes and initial values of `torch.nn.TransformerEncoderLayer`, which
    `jaggedtensor.nn.from_torch` turns into this.

    Args:
        dim: features of a token.
        num_heads: heads of the query.
        hidden: features inside the feed-forward net; `4 * dim` if left out.
        norm: what makes a norm from a number of features.
        norm_first: norm before attention and net (Xiong et al. 2020), rather than after the residual.
        activation: any function of tokens.
        dropout: of both results and inside the net.
        bias: of the linear layers; norms keep theirs.
        attention: further arguments of `JaggedAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden: int | None = None,
        *,
        norm: Norm = nn.LayerNorm,
        norm_first: bool = True,
        activation: Activation = F.gelu,
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = 4 * dim if hidden is None else hidden
        self.norm_first, self.activation = norm_first, activation
        self.self_attn = JaggedAttention(dim, num_heads, bias=bias, **factory, **attention)
        self.linear1 = nn.Linear(dim, hidden, bias=bias, **factory)
        self.linear2 = nn.Linear(hidden, dim, bias=bias, **factory)
        self.norm1, self.norm2 = norm(dim, **factory), norm(dim, **factory)
        self.dropout, self.dropout1, self.dropout2 = (nn.Dropout(dropout) for _ in range(3))

    def forward(
        self, x: JaggedTensor, keys: JaggedTensor | None = None, *, block_mask: Tensor | None = None
    ) -> JaggedTensor:
        """`[tokens, dim]` to `[tokens, dim]` on the same layout; attends to itself, or to `keys` `[tokens_k, dim]`."""
        if self.norm_first:
            x = x + self.dropout1(self.self_attn(self.norm1(x), keys, block_mask=block_mask))
            return x + self.dropout2(feed_forward(self, self.norm2(x)))
        x = self.norm1(x + self.dropout1(self.self_attn(x, keys, block_mask=block_mask)))
        return self.norm2(x + self.dropout2(feed_forward(self, x)))


class JaggedTransformer(nn.Module):
    """Layers one after the other on one layout, and a norm at the end: torch's `nn.TransformerEncoder` without padding.

    >>> stack = JaggedTransformer([JaggedTransformerLayer(32, num_heads=4) for _ in range(2)], torch.nn.LayerNorm(32))
    >>> stack(JaggedTensor.from_list([torch.randn(n, 32) for n in (5, 0, 3)])).shape
    (3, None, 32)
    """

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x: JaggedTensor, *, block_mask: Tensor | None = None) -> JaggedTensor:
        """`[tokens, dim]` to the same on the same layout; every layer has the same `block_mask`."""
        if not isinstance(x, JaggedTensor):
            fail("x", "a JaggedTensor", x, "for a padded tensor use JaggedTensor.from_padded", error=TypeError)
        for layer in self.layers:
            x = layer(x) if block_mask is None else layer(x, block_mask=block_mask)
        return x if self.norm is None else self.norm(x)


def feed_forward(layer: Any, x: Batch) -> Any:
    """The two linear layers of a layer, token by token."""
    return layer.linear2(layer.dropout(layer.activation(layer.linear1(x))))
