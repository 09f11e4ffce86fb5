"""Rotary positions (Su et al., "RoFormer", 2021), counted in each sequence from its own start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jaggedtensor.errors import fail
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.schedules.types import Identity
from jaggedtensor.tensor import JaggedTensor


class Rotary(nn.Module):
    """Turns pairs of features of queries and keys by angles that grow with the token's place in its sequence.

    >>> heads = JaggedTensor.from_list([torch.randn(n, 2, 16) for n in (5, 0, 3)])
    >>> Rotary(16)(heads).shape
    (3, None, 2, 16)

    Angles are worked out once for a layout, in float64, and kept with it: every layer, and keys as well as queries,
    take the same. There are no parameters.

    Args:
        head_dim: D, even.
        base: of the wavelengths, `2 pi base^(2 i / D)` tokens for pair i.
        interleaved: pairs are features (0, 1), (2, 3), ... as in the paper, rather than (0, D/2), (1, D/2 + 1), ...
    """

    def __init__(self, head_dim: int, *, base: float = 10_000.0, interleaved: bool = False) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            fail("head_dim", "even and at least 2 for rotary positions", head_dim)
        if not base > 0:
            fail("base", "positive", base)
        self.head_dim, self.base, self.interleaved = head_dim, float(base), interleaved

    def forward(self, x: JaggedTensor, keys: JaggedLayout | None = None) -> JaggedTensor:
        """The batch `[tokens, H, D]` with its pairs turned, in its own dtype.

        Args:
            keys: for queries of other lengths than the keys, the layout of the keys: query i then stands at
                `i + Lk - Lq`, the place from which `causal` and `window` count too.
        """
        if not isinstance(x, JaggedTensor) or x.ndim < 3 or x.shape[-1] != self.head_dim:
            fail("x", f"a JaggedTensor whose last dimension is {self.head_dim}", _described(x))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        turns = self._turns(x.layout, x.values().shape[0], None if keys is x.layout else keys, wide)
        cos, sin = (t.view(-1, *[1] * (x.ndim - 3), self.head_dim // 2) for t in turns)
        return x.map_values(lambda values: self._turned(values, cos, sin))

    def _turned(self, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pairs = values.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
        a, b = pairs.unbind(-1 if self.interleaved else -2)  # (rows, ..., D / 2) each
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1 if self.interleaved else -2)
        return turned.flatten(-2).to(values.dtype)

    def _turns(
        self, layout: JaggedLayout, rows: int, keys: JaggedLayout | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine, `[rows, D / 2]`."""

        def compute() -> tuple[Tensor, Tensor]:
            place = layout.positions(rows)
            if keys is not None:
                ahead = keys.lengths().to(torch.int64) - layout.lengths().to(torch.int64)
                place = place + nn.functional.pad(ahead, (0, 1))[layout.sequence_ids(rows)]
            power = torch.arange(0, self.head_dim, 2, device=layout.device, dtype=torch.float64) / self.head_dim
            angle = place.to(torch.float64)[:, None] * self.base**-power
            return angle.cos().to(dtype), angle.sin().to(dtype)

        if keys is not None and (keys.is_static or torch.compiler.is_compiling()):
            return compute()
        key = ("rotary", rows, self.head_dim, self.base, dtype, None if keys is None else Identity(keys))
        return layout._remember(key, compute)

    def extra_repr(self) -> str:
        """For printing."""
        return f"{self.head_dim}, base={self.base:g}, interleaved={self.interleaved}"


def _described(x: object) -> str:
    return str(x.shape) if isinstance(x, (Tensor, JaggedTensor)) else type(x).__name__
