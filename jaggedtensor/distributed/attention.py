"""Attention to sequences whose keys are spread over ranks, merged by the logarithms of sums of exponentials."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jaggedtensor.distributed.collectives import agree, all_reduce, replicated, resolve, sum_over
from jaggedtensor.errors import fail
from jaggedtensor.ops.attention import attend
from jaggedtensor.tensor import JaggedTensor

Query = Tensor | JaggedTensor


def attend_over(
    group: Any,
    query: Query,
    key: JaggedTensor,
    value: JaggedTensor | None = None,
    *,
    causal: bool = False,
    window: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`attend(query, key, value, group=group)`: each rank attends to its part of every sequence, and parts are merged.

    With m the largest lse of a query row over ranks and `w = exp(lse - m)` of each part:

        out = sum(w * out_part) / sum(w)        lse = m + log(sum(w))

    which is how split rows are merged within a GPU, too. Two all-reduces forward, one of lse and one of out; backward
    one, of the gradient of the query. Gradients of keys and values stay where these are.

    Args:
        group: a ProcessGroup or one-dimensional DeviceMesh.
        query: the same on every rank.
        key, value: this rank's part of each sequence; a part may be empty.
        return_lse, options: as in `attend`.

    Raises:
        NotImplementedError: causal, window or block_mask, which ask for the place of a part in its sequence.
        ValueError: shapes or dtypes differ between ranks: on every rank. What one rank alone is refused, it raises as
            `attend` does, and the others raise RuntimeError.
    """
    tensor = query.values() if isinstance(query, JaggedTensor) else query
    device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
    group = resolve(group, device)
    failure: Exception | None = None
    facts: dict[str, int | torch.dtype] = {}
    try:
        if causal or window is not None:
            fail("causal and window", "left out with group", "a mask", "attend without one, or gather the keys first",
                 error=NotImplementedError)  # fmt: skip
        if options.get("block_mask") is not None:
            fail("block_mask", "left out with group", options["block_mask"], "gather the keys first",
                 error=NotImplementedError)  # fmt: skip
        wants_grad = torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
        if wants_grad:
            tensor = replicated(tensor, group)
        part, lse = attend(_with(query, tensor), key, value, return_lse=True, **options)
        out = part.values() if isinstance(part, JaggedTensor) else part
        facts = _facts(query, tensor, out, wants_grad)
    except Exception as error:  # whatever it is, the others are told
        failure = error
    agree("attend with group", facts, group, device, failure)

    by_head = not isinstance(query, JaggedTensor) and out.dim() == 4
    rows = lse.transpose(1, 2) if by_head else lse  # beside out: [B, Lq, Hq], [B, Lq], [tokens_q, Hq] or [tokens_q]
    merged, rows = _merge(out, rows, group)
    result = _with(query, merged) if isinstance(query, JaggedTensor) else merged
    return (result, rows.transpose(1, 2) if by_head else rows) if return_lse else result


def _merge(out: Tensor, lse: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """out `[..., Dv]` and lse `[...]` of this rank's part to those of all."""
    most = all_reduce(lse.detach(), "max", group)
    most = torch.where(most == -torch.inf, 0, most)  # a row that sees no key anywhere: its weights are exp(-inf) = 0
    weight = (lse - most).exp().unsqueeze(-1)
    sums = sum_over(weight * F.pad(out.to(lse.dtype), (0, 1), value=1.0), group)  # the last column is of weights
    weights = sums[..., -1]
    seen = weights > 0
    safe = torch.where(seen, weights, 1)
    merged = (sums[..., :-1] / safe.unsqueeze(-1)).to(out.dtype)
    return merged, torch.where(seen, most + safe.log(), -torch.inf)


def _with(query: Query, tensor: Tensor) -> Query:
    return query._of(tensor, query.layout) if isinstance(query, JaggedTensor) else tensor


def _facts(query: Query, q: Tensor, out: Tensor, wants_grad: bool) -> dict[str, int | torch.dtype]:
    """What the merge takes for granted."""
    jagged = isinstance(query, JaggedTensor)
    sizes = list(out.shape) + [0] * (4 - out.dim())
    names = ("query rows", "heads of query", "the value dimension", "") if jagged else (
        "batch size", "query length", "heads of query", "the value dimension"
    )  # fmt: skip
    facts: dict[str, int | torch.dtype] = {"a jagged query": jagged, "dimensions of the result": out.dim()}
    facts |= {name or "size": size for name, size in zip(names, sizes, strict=True)}
    return facts | {"the head dimension": q.shape[-1], "dtype": out.dtype, "requires_grad of query": wants_grad}
