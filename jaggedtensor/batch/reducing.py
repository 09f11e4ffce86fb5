"""What acts along a dimension: of each sequence, or of features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from jaggedtensor.batch.core import Batch
from jaggedtensor.errors import check_floating
from jaggedtensor.ops import reductions
from jaggedtensor.ops.reductions import zero_slack


class Reducing(Batch):
    """Sums and the like, softmax, cumulative sums."""

    def sum(self, dim: int | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
        """`dim=1`: per sequence, Tensor `[B, *feature]`, 0 for an empty one. None: over all. From 2: a feature."""
        return self._reduce(torch.sum, reductions.sum, dim, keepdim, dtype=dtype)

    def mean(self, dim: int | None = None, *, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
        """As `sum`; the mean of an empty sequence is 0, as of an empty bag in `torch.nn.EmbeddingBag`."""
        return self._reduce(torch.mean, reductions.mean, dim, keepdim, dtype=dtype)

    def amax(self, dim: int | None = None, *, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence. Equal maxima share the gradient."""
        return self._reduce(torch.amax, reductions.amax, dim, keepdim)

    def amin(self, dim: int | None = None, *, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence. Equal minima share the gradient."""
        return self._reduce(torch.amin, reductions.amin, dim, keepdim)

    def logsumexp(self, dim: int, *, keepdim: bool = False) -> Any:
        """As `sum`; -inf for an empty sequence."""
        return self._reduce(torch.logsumexp, reductions.logsumexp, dim, keepdim)

    def std(self, dim: int | None = None, *, correction: float = 1, keepdim: bool = False) -> Any:
        """As `sum`; 0 for an empty sequence, NaN for one of at most `correction` tokens, as in torch."""
        return self._reduce(torch.std, reductions.std, dim, keepdim, correction=correction)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """`dim=1`: over each sequence; from 2: over a feature."""
        return self._scan(torch.softmax, reductions.softmax, dim, dtype)

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """`dim=1`: over each sequence; from 2: over a feature."""
        return self._scan(torch.log_softmax, reductions.log_softmax, dim, dtype)

    def cumsum(self, dim: int, dtype: torch.dtype | None = None) -> Self:
        """`dim=1`: from the start of each sequence; from 2: along a feature."""
        return self._scan(torch.cumsum, reductions.cumsum, dim, dtype)

    def _reduce(
        self,
        dense: Callable[..., Tensor],
        ragged: Callable[..., Tensor],
        dim: int | None,
        keepdim: bool,
        **options: Any,
    ) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        if dim is None:
            return self._reduce_all(dense, **options)
        dim = self._dimension(dim)
        if dim == 1:
            result = ragged(self._values, self._layout, **options)
            return result.unsqueeze(1) if keepdim else result
        return self._with_tokens(dense(self._tokens(), dim=self._feature_dim(dim), keepdim=keepdim, **options))

    def _reduce_all(self, dense: Callable[..., Tensor], **options: Any) -> Tensor:
        if self._layout.known_num_tokens is None and dense in (torch.sum, torch.mean):
            # As in a CUDA graph: slack is 0 for the sum, and the count stays on the device.
            if dense is torch.sum:
                return torch.sum(self._tokens(), **options)
            tokens = self._tokens().to(options.get("dtype"))
            check_floating(tokens, "values", "mean")
            entries = self.offsets()[-1] * tokens.shape[1:].numel()
            wide = torch.float32 if tokens.dtype in (torch.float16, torch.bfloat16) else tokens.dtype
            return (tokens.sum(dtype=wide) / entries).to(tokens.dtype)
        return dense(self._values[: self.num_tokens], **options)

    def _scan(
        self, dense: Callable[..., Tensor], ragged: Callable[..., Tensor], dim: int, dtype: torch.dtype | None
    ) -> Self:
        values = self._values if dtype is None else self._values.to(dtype)
        if self._dimension(dim) == 1:
            result = self._of(ragged(values, self._layout), self._layout)
        else:
            result = self._with_tokens(dense(zero_slack(values, self._layout), dim=self._feature_dim(dim)))
        return result if dtype is None else result.to(dtype)  # of integers, cumsum is int64
