"""Attention in float64 with a bound on the error of every single element, on any device, one sequence after the other.

The bounds follow from how a kernel computes, by a running error analysis (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, chapter 3): products and sums in fp32; P and dS rounded to the dtype of the inputs before they enter
a product; P of backward from a stored lse. With e the epsilon of fp32, u that of the dtype, and |.| of every factor:

    P    relative error r = e (4 + (2 + D/32) |scale| |q||k| + 2 |lse|), and u for its rounding
    out  P (r + u) |v|                        lse  the largest r of its row
    dS   P (|dP - delta| (r + u) + 4 e |dP| + (u + 4 e) |delta|),   delta from an out that is rounded already
    dv   (P (r + u))^T |dO|       dk  |scale| dS^T |q|       dq  |scale| dS |k|       and u of each result

So a result near 0 must be as near to it as the terms that cancel there allow, and not as the largest result would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jaggedtensor.block_masks import mask_of_sequence, visible_through
from jaggedtensor.ops.attention import _window, attend
from jaggedtensor.ops.reference import visible_keys
from jaggedtensor.problem import QueryKind
from jaggedtensor.tensor import JaggedTensor
from jaggedtensor.testing.attention import AttentionCase, AttentionResult
from jaggedtensor.testing.cases import offsets_of
from jaggedtensor.testing.guards import guarded_allocations

_PART = 128  # rows of a broadcast query after which kernels may round what they have of dK and dV
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 1e-35, torch.float32: 1e-35}  # what underflows, with room


class Bounded(NamedTuple):
    """float64 both."""

    value: Tensor
    error: Tensor  # that a kernel may make at most


def bounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    mask: Tensor | None = None,
    in_parts: bool = False,
) -> dict[str, Bounded]:
    """Of one sequence: q `[Lq, Hq, D]`, k `[Lk, Hkv, D]`, v `[Lk, Hkv, Dv]`, grad_out as out, grad_lse `[Lq, Hq]`,
    mask a block mask of the sequence. `in_parts`: dK and dV may be added up in their dtype, 128 rows after 128.

    Returns "out" `[Lq, Hq, Dv]`, "lse" `[Lq, Hq]`, "dq", "dk" and "dv". Gradients of rows that see nothing are ignored.
    """
    dtype, group = q.dtype, q.shape[1] // max(k.shape[1], 1)
    u, e, least = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, _LEAST[dtype]
    visible = visible_keys(q.shape[0], k.shape[0], left, right, q.device)
    if mask is not None:
        visible &= visible_through(mask, q.shape[0], k.shape[0])
    seen = visible.any(1)
    columns: dict[str, list[Bounded]] = {name: [] for name in AttentionResult._fields}
    for h in range(k.shape[1]):
        heads = slice(h * group, (h + 1) * group)
        qh, do = (x[:, heads].double().transpose(0, 1) for x in (q, grad_out))  # (g, Lq, .)
        kh, vh = k[:, h].double(), v[:, h].double()
        score = (scale * (qh @ kh.T)).masked_fill(~visible, -math.inf)  # (g, Lq, Lk)
        lse = score.logsumexp(2) if k.shape[0] else score.new_full(score.shape[:2], -math.inf)
        some = lse.masked_fill(~seen, 0)
        p = (score - some[..., None]).exp()
        sums = (2 + q.shape[2] / 32) * abs(scale) * (qh.abs() @ kh.abs().T)
        relative = e * (4 + sums + 2 * some.abs()[..., None])
        worst = (relative * visible).amax(2, keepdim=True) if k.shape[0] else relative.new_zeros(*lse.shape, 1)
        p_error = p * (relative + u) + least * visible
        out = p @ vh
        out_error = p_error @ vh.abs() + (worst + u) * out.abs() + least

        dlse = torch.where(seen, grad_lse[:, heads].double().T, 0.0)
        do = torch.where(seen[:, None], do, 0.0)
        dp = do @ vh.T
        delta = (out * do).sum(2) - dlse
        ds = p * (dp - delta[..., None])
        terms = (out.abs() * do.abs()).sum(2) + dlse.abs()
        ds_error = p * ((dp - delta[..., None]).abs() * (relative + u) + 4 * e * (do.abs() @ vh.abs().T))
        ds_error = ds_error + p * ((u + 4 * e) * terms + (out_error * do.abs()).sum(2))[..., None] + least * visible
        results = {
            "out": (out, out_error),
            "lse": (lse[..., None], worst + e * some.abs()[..., None]),
            "dq": (scale * (ds @ kh), abs(scale) * (ds_error @ kh.abs())),
        }
        for name, (value, error) in results.items():
            if name == "dq":
                error = error + u * value.abs() + least
            columns[name].append(Bounded(value.transpose(0, 1), error.transpose(0, 1)))
        dk = scale * (ds.transpose(1, 2) @ qh).sum(0)
        dk_error = abs(scale) * (ds_error.transpose(1, 2) @ qh.abs()).sum(0)
        dv = (p.transpose(1, 2) @ do).sum(0)
        dv_error = (p_error.transpose(1, 2) @ do.abs()).sum(0)
        if in_parts:
            dk_error = dk_error + abs(scale) * u * _sums_of_parts(ds, qh)
            dv_error = dv_error + u * _sums_of_parts(p, do)
        for name, value, error in (("dk", dk, dk_error), ("dv", dv, dv_error)):
            columns[name].append(Bounded(value[:, None], (error + u * value.abs() + least)[:, None]))
    joined = {
        name: Bounded(torch.cat([x.value for x in parts], 1), torch.cat([x.error for x in parts], 1))
        for name, parts in columns.items()
    }
    joined["lse"] = Bounded(*(x.squeeze(2) for x in joined["lse"]))
    return joined


def _sums_of_parts(weights: Tensor, rows: Tensor) -> Tensor:
    """`[Lk, D]` of weights `[g, Lq, Lk]` and rows `[g, Lq, D]`: half the sum of what is rounded before the last sum.

    That is each part of the packed rows but the first, and the sum after each.
    """
    weights, rows = (x.transpose(0, 1).flatten(0, 1) for x in (weights, rows))
    total = torch.zeros(weights.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    rounded = torch.zeros_like(total)
    for first in range(0, weights.shape[0], _PART):
        part = weights[first : first + _PART].T @ rows[first : first + _PART]
        rounded += total.abs() + (part.abs() if first else 0)
        total += part
    return rounded / 2


@dataclass(frozen=True)
class Call:
    """A call of attention with the gradients of its results; leaves are packed."""

    query: Tensor | JaggedTensor
    keys: JaggedTensor
    values: JaggedTensor
    options: dict[str, Any]
    grad_out: Tensor
    grad_lse: Tensor

    @classmethod
    def of(
        cls, query: Tensor | JaggedTensor, keys: JaggedTensor, values: JaggedTensor, seed: int = 0, **options: Any
    ) -> Call:
        """With random gradients, NaN in slack."""
        q = _packed(query)
        rows = (len(keys), *q.shape[-3:-1]) if not isinstance(query, JaggedTensor) else tuple(q.shape[:2])
        generator = torch.Generator(q.device).manual_seed(seed + 77)
        shape = (*rows, values.values().shape[-1])
        grad_out = torch.randn(shape, generator=generator, device=q.device, dtype=torch.float32).to(q.dtype)
        lse_shape = rows if isinstance(query, JaggedTensor) else (rows[0], rows[2], rows[1])
        grad_lse = torch.randn(lse_shape, generator=generator, device=q.device)
        if isinstance(query, JaggedTensor):
            grad_out[query.num_tokens :] = math.nan
            grad_lse[query.num_tokens :] = math.nan
        return cls(query, keys, values, options, grad_out, grad_lse)

    @classmethod
    def random(
        cls,
        k_lengths: Sequence[int],
        query: int | Sequence[int],
        *,
        heads: tuple[int, int] = (2, 2),
        dims: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.bfloat16,
        per_sequence: bool = False,
        slack: int = 0,
        offsets_dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cuda",
        seed: int = 0,
        **options: Any,
    ) -> Call:
        """Made on the device, for batches that would take long on a CPU. `query`: a number of rows, or lengths."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        def draw_jagged(lengths: Sequence[int], heads: int, dim: int) -> JaggedTensor:
            values = draw(sum(lengths) + slack, heads, dim)
            values[sum(lengths) :] = math.nan
            return JaggedTensor(values, offsets_of(lengths, offsets_dtype).to(device))

        keys = draw_jagged(k_lengths, heads[1], dims[0])
        values = keys.with_values(draw_jagged(k_lengths, heads[1], dims[1]).values())
        if isinstance(query, int):
            q: Tensor | JaggedTensor = draw(*([len(k_lengths)] if per_sequence else []), query, heads[0], dims[0])
        else:
            q = draw_jagged(query, heads[0], dims[0])
        return cls.of(q, keys, values, seed, **options)

    @classmethod
    def of_case(cls, case: AttentionCase, device: torch.device | str = "cpu") -> Call:
        """From a case of `jaggedtensor.testing`."""
        options = case.options
        if case.mask_share is not None:
            options["block_mask"] = case.block_mask(device)
        return cls.of(*case.inputs(device), seed=case.seed, **options)

    def run(self, backend: str | None, **options: Any) -> AttentionResult:
        """Forward and backward through the public API, from fresh leaves."""
        leaves = [_packed(x).detach().requires_grad_() for x in (self.query, self.keys, self.values)]
        query: Any = self.query.with_values(leaves[0]) if isinstance(self.query, JaggedTensor) else leaves[0]
        out, lse = attend(
            query, self.keys.with_values(leaves[1]), self.values.with_values(leaves[2]), **self.options,
            return_lse=True, backend=backend, **options,
        )  # fmt: skip
        out = _packed(out)
        grads = torch.autograd.grad([out, lse], leaves, [self.grad_out, self.grad_lse])
        return AttentionResult(out.detach(), lse.detach(), *grads)

    def checked(self, backend: str | None, **options: Any) -> AttentionResult:
        """`run` and `check`; results stand between guards, and what is not written is NaN."""
        with guarded_allocations():
            got = self.run(backend, **options)
        self.check(got)
        return got

    def check(self, got: AttentionResult, sequences: Iterable[int] | None = None) -> None:
        """Assert that results are within their bounds, of the given sequences or of all, and slack rows exactly 0.

        The gradient of a broadcast query is checked where all are.

        Raises:
            AssertionError: with the element that is farthest out, its value and its bound.
        """
        q, k, v = (_packed(x).detach() for x in (self.query, self.keys, self.values))
        jagged = isinstance(self.query, JaggedTensor)
        broadcast = not jagged and q.dim() == 3
        for name, mine, like in zip(("dq", "dk", "dv"), got[2:], (q, k, v), strict=True):
            assert mine.shape == like.shape, f"{name} has shape {list(mine.shape)}, expected {list(like.shape)}"
            assert mine.dtype == like.dtype, f"{name} is {mine.dtype}, expected {like.dtype}"
        left, right = _window(self.options.get("causal", False), self.options.get("window"))
        scale = self.options.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ends = self.keys.layout.host_offsets().tolist()
        q_ends = self.query.layout.host_offsets().tolist() if isinstance(self.query, JaggedTensor) else []
        block_mask = self.options.get("block_mask")
        total: Bounded | None = None
        for b in range(len(self.keys)) if sequences is None else sequences:
            rows = slice(ends[b], ends[b + 1])
            part: Any = slice(q_ends[b], q_ends[b + 1]) if jagged else b
            q_rows = slice(None) if broadcast else part
            grad_lse = self.grad_lse[part] if jagged else self.grad_lse[part].T
            mask = None if block_mask is None else mask_of_sequence(block_mask, b)
            wanted = bounded_attention(
                q[q_rows], k[rows], v[rows], self.grad_out[part], grad_lse, scale=scale, left=left, right=right,
                mask=mask, in_parts=broadcast,
            )  # fmt: skip
            found = {
                "out": got.out[part],
                "lse": got.lse[part] if jagged else got.lse[part].T,
                "dk": got.dk[rows],
                "dv": got.dv[rows],
            }
            if broadcast:
                total = (
                    wanted["dq"]
                    if total is None
                    else Bounded(*(x + y for x, y in zip(total, wanted["dq"], strict=True)))
                )
            else:
                found["dq"] = got.dq[part]
            for name, value in found.items():
                assert_within(value, wanted[name], f"{name} of sequence {b}")
        if broadcast and sequences is None:
            nothing = torch.zeros_like(q, dtype=torch.float64)
            assert_within(got.dq, Bounded(nothing, nothing) if total is None else total, "dq")
        self._check_slack(got)

    def _check_slack(self, got: AttentionResult) -> None:
        tokens = self.keys.num_tokens
        slack = {"dk": got.dk[tokens:], "dv": got.dv[tokens:]}
        if isinstance(self.query, JaggedTensor):
            tokens = self.query.num_tokens
            slack |= {"out": got.out[tokens:], "dq": got.dq[tokens:]}
            assert (got.lse[tokens:] == -math.inf).all(), "lse is not -inf in slack rows"
        for name, rows in slack.items():
            assert torch.equal(rows, torch.zeros_like(rows)), f"{name} is not 0 in slack rows"


def query_of(kind: QueryKind, rows: int, lengths: Sequence[int]) -> dict[str, Any]:
    """What `Call.random` takes for a kind of query: of so many rows, or with lengths of its own."""
    if kind is QueryKind.JAGGED:
        return {"query": lengths}
    return {"query": rows, "per_sequence": kind is QueryKind.PER_SEQUENCE}


def check_attention(
    case: AttentionCase, backend: str | None, device: torch.device | str = "cpu", **options: Any
) -> AttentionResult:
    """Run a case forward and backward and check every element of every result."""
    call = Call.of_case(case, device)
    got = call.run(backend, **options)
    try:
        call.check(got)
    except AssertionError as error:
        raise AssertionError(f"{error}, in {case}") from None
    return got


def assert_within(got: Tensor, wanted: Bounded, name: str) -> None:
    """Assert |got - value| <= error for each element, and infinities where they must be."""
    assert got.shape == wanted.value.shape, f"{name} has shape {list(got.shape)}, expected {list(wanted.value.shape)}"
    got = got.double()
    infinite = wanted.value.isinf()
    assert torch.equal(got[infinite], wanted.value[infinite]), f"{name} is not infinite where it must be"
    over = ((got - wanted.value).abs() - wanted.error).masked_fill(infinite, 0).nan_to_num(torch.inf)
    if over.numel() and over.max() > 0:
        place = tuple(int(i) for i in torch.unravel_index(over.flatten().argmax(), over.shape))
        bad = int((over > 0).sum())
        raise AssertionError(
            f"{bad} of {over.numel()} elements of {name} are wrong; at {list(place)} it is {got[place].item():.7g}, "
            f"expected {wanted.value[place].item():.7g} within {wanted.error[place].item():.2g}"
        )


def _packed(x: Any) -> Tensor:
    return x.values() if isinstance(x, JaggedTensor) else x
