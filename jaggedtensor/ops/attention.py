"""`attend`: check what the user gave, bring it into one form, call the operator, give back what the user expects."""

from __future__ import annotations

import math
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jaggedtensor import env
from jaggedtensor.block_masks import check_block_mask
from jaggedtensor.errors import check_same_device, check_tensor, describe, fail
from jaggedtensor.kernels.dispatch import BACKENDS, MAX_HEAD_DIM, choose
from jaggedtensor.layout import JaggedLayout
from jaggedtensor.ops import contract
from jaggedtensor.ops.reference import attend_reference
from jaggedtensor.problem import UNLIMITED, AttentionProblem
from jaggedtensor.schedules.types import Identity
from jaggedtensor.tensor import JaggedTensor

Window = int | tuple[int | None, int | None] | None
_BEYOND = 1 << 30  # further than any sequence is long; with less, places of keys stay within int32
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def attend(
    query: Tensor | JaggedTensor,
    key: JaggedTensor,
    value: JaggedTensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window = None,
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = False,
    group: Any = None,
    block_mask: Tensor | None = None,
) -> Any:
    """Softmax attention of queries to the sequences of a jagged batch (Vaswani et al. 2017).

    >>> keys = JaggedTensor.from_list([torch.randn(n, 2, 16) for n in (5, 0, 3)])
    >>> attend(torch.randn(4, 2, 16), keys).shape  # one learned query for every sequence
    torch.Size([3, 4, 2, 16])
    >>> attend(keys, keys, causal=True).shape  # self-attention
    (3, None, 2, 16)

    Of long sequences a block mask leaves out whole blocks, here all but a query's own 128 keys and the first 128:

    >>> long = JaggedTensor.from_list([torch.randn(n, 2, 16) for n in (700, 0, 300)])
    >>> mask = torch.eye(6, dtype=torch.bool)  # 6 blocks of 128 hold up to 768 tokens
    >>> mask[:, 0] = True
    >>> attend(long, long, block_mask=mask[None], causal=True).shape  # [None]: the same for every sequence
    (3, None, 2, 16)

    Args:
        query: which sequences are asked what. Tensor `[Lq, Hq, D]`: one query for every sequence. Tensor
            `[B, Lq, Hq, D]`: one for each. JaggedTensor `[tokens_q, Hq, D]`: its own lengths. Without the head axis if
            the keys have none.
        key: `[tokens, Hkv, D]` with `Hq % Hkv == 0`, or `[tokens, D]` for one head. D at most 256.
        value: `[tokens, Hkv, Dv]` on the layout of the keys; the keys themselves if left out.
        scale: multiplies `q . k`; 1 / sqrt(D) if left out.
        causal: query i sees keys up to its own place, both counted from the end of the sequence.
        window: `(left, right)`: query i sees key j when `i + Lk - Lq - left <= j <= i + Lk - Lq + right`; an int means
            both sides, None or -1 no limit.
        return_lse: also the logarithm of the sum of exponentials, which is differentiable: `[B, Hq, Lq]`, or
            `[tokens_q, Hq]` for a jagged query; fp32, fp64 for fp64 inputs.
        backend: "cpu", "hopper" (SM90), "blackwell" (SM100), "portable" (any GPU that runs Triton) or "reference"; runs
            there or raises, never falls back. None chooses.
        deterministic: same bits in the gradients from run to run. (Forward, and the gradient of a broadcast query,
            always are.)
        group: a process group or one-dimensional `DeviceMesh` over whose ranks the keys of each sequence are spread:
            every rank has the same queries and its part of each sequence, as `keys.shard(mesh)` gives it, and gets the
            whole result (see `jaggedtensor.distributed`).
        block_mask: bool `[B, blocks of queries, blocks of keys]`, or `[1, ...]` for all sequences, on the device of the
            keys: query i of sequence b sees key j only if `block_mask[b, i // 128, j // 128]`, and if `causal` and
            `window` allow it too. Its places count from the beginning of a sequence. It has `ceil(longest / 128)`
            blocks or more; those past the end of a sequence mean nothing. What it leaves out is not computed. Use one
            tensor in all layers: schedules are kept by its identity, until it is changed in place. (For a mask made
            under `torch.inference_mode`, which has no count of changes, they are built anew at each call.)

    Returns:
        Tensor `[B, Lq, Hq, Dv]`, or a JaggedTensor on the layout of a jagged query, in the dtype of the inputs. A query
        that sees no key, as in an empty sequence, gives 0 and lse -inf, and adds 0 to every gradient.

    Under autocast, query, key and value are cast together to its dtype.

    Raises:
        TypeError: not jagged keys; dtypes differ or are not bf16, fp16, fp32 or (on the CPU) fp64; a mask not of bool.
        ValueError: shapes, heads, batch sizes, devices, layouts or blocks of the mask do not fit.
        NotImplementedError: the backend cannot serve this; the message says what it lacks.
    """
    if group is not None:
        from jaggedtensor.distributed.attention import attend_over

        return attend_over(
            group, query, key, value, scale=scale, causal=causal, window=window, return_lse=return_lse,
            backend=backend, deterministic=deterministic, block_mask=block_mask,
        )  # fmt: skip
    if not isinstance(key, JaggedTensor):
        fail("key", "a JaggedTensor", key, "for dense keys use torch's scaled_dot_product_attention", error=TypeError)
    value = key if value is None else value
    if not isinstance(value, JaggedTensor):
        fail("value", "a JaggedTensor on the layout of the keys", value, "use key.with_values(v)", error=TypeError)
    if not isinstance(query, (Tensor, JaggedTensor)):
        fail("query", "a Tensor or a JaggedTensor", query, error=TypeError)
    if block_mask is not None:
        check_tensor(block_mask, "block_mask", "blocks of queries by blocks of keys, for each sequence")
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    left, right = _window(causal, window)
    backend = _backend(backend)

    q = query.values() if isinstance(query, JaggedTensor) else query
    k, v = key.values(), value.values()
    one_head = k.dim() == 2
    _check_ranks(query, q, k, v, one_head)
    if one_head:
        q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-2)  # the head axis that everything inside has
    q, k, v = _autocast(q, k, v)
    q_layout = query.layout if isinstance(query, JaggedTensor) else None
    q_offsets = None if q_layout is None else q_layout.offsets()

    if backend == "reference":
        _check(query, key, value, q, k, v, block_mask)
        scale = _scale(scale, k)
        with contract.no_autocast(k.device):
            out, lse = attend_reference(
                q, k, v, q_offsets, key.offsets(), scale=scale, left=left, right=right, block_mask=block_mask
            )
    else:
        train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)

        def prepare() -> Recipe:
            _check(query, key, value, q, k, v, block_mask)
            problem = AttentionProblem.of(q, k, v, q_offsets, left, right, deterministic, block_mask is not None)
            implementation = choose(problem, backend).implementation
            rows = (k.shape[0], q.shape[0])
            schedules = implementation.schedules(problem, key.layout, q_layout, *rows, train, block_mask)
            return Recipe(
                *schedules, _scale(scale, k), left, right, implementation.name, deterministic,
                _slack(query, key, value), key.layout.is_complete,
            )  # fmt: skip

        if (
            torch.compiler.is_compiling()
            or value.layout is not key.layout
            or (q_layout is not None and q_layout.is_static)
            or (block_mask is not None and block_mask.is_inference())
        ):
            recipe = prepare()
        else:
            signature = (
                q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, v.device, left, right, scale, backend,
                deterministic, train, None if q_layout is None else Identity(q_layout),
                None if block_mask is None else Identity(block_mask),
            )  # fmt: skip
            recipe = key.layout._remember(signature, prepare)
        out, lse = contract.attend(q, k, v, q_offsets, key.offsets(), block_mask, *recipe)

    if one_head:
        out, lse = out.squeeze(-2), lse.squeeze(1)
    result = query._of(out, query.layout) if isinstance(query, JaggedTensor) else out
    return (result, lse) if return_lse else result


class Recipe(NamedTuple):
    """What a call comes to once its shapes are known to be right: the last arguments of the operator.

    Kept with the layout of the keys, so that a layer that asks again, or the next one, pays for none of it.
    """

    forward_schedule: list[Tensor]
    backward_schedule: list[Tensor]
    scale: float
    left: int
    right: int
    backend: str
    deterministic: bool
    slack: bool
    complete: bool


def _check(
    query: Tensor | JaggedTensor,
    key: JaggedTensor,
    value: JaggedTensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor | None,
    dtypes: tuple[torch.dtype, ...] = _DTYPES,
) -> None:
    _check_shapes(q, k, v, dtypes)
    _check_layouts(query, key, value, q, k, v)
    if block_mask is not None:
        longest = query.layout.longest_on_host if isinstance(query, JaggedTensor) else q.shape[-3]
        check_block_mask(block_mask, key.batch_size, k.device, longest, key.layout.longest_on_host)


def _scale(scale: float | None, k: Tensor) -> float:
    scale = 1 / math.sqrt(index(k.shape[2])) if scale is None else float(scale)
    if not torch.compiler.is_compiling() and not math.isfinite(scale):
        fail("scale", "finite", scale)
    return scale


def _window(causal: bool, window: Window) -> tuple[int, int]:
    """Both sides, -1 for no limit."""
    if window is None:
        sides: list[Any] = [None, None]
    elif isinstance(window, int) and not isinstance(window, bool):
        sides = [window, window]
    elif isinstance(window, (tuple, list)) and len(window) == 2:
        sides = list(window)
    else:
        fail("window", "an int or a pair (left, right)", repr(window), error=TypeError)
    for i, side in enumerate(sides):
        if side is None:
            sides[i] = UNLIMITED
        elif not isinstance(side, int) or isinstance(side, bool):
            fail("window", "of ints or None", repr(window), error=TypeError)
        elif side < UNLIMITED:
            fail("window", "at least 0 on each side (None or -1: no limit)", repr(window))
        elif side >= _BEYOND:
            sides[i] = UNLIMITED
    if causal:
        sides[1] = 0 if sides[1] == UNLIMITED else min(sides[1], 0)
    return sides[0], sides[1]


def _backend(backend: str | None) -> str | None:
    backend = env.forced_backend() if backend is None else backend
    if backend is not None and backend not in BACKENDS:
        fail("backend", f"one of {', '.join(map(repr, BACKENDS))} or None", repr(backend))
    return backend


def _check_ranks(query: Tensor | JaggedTensor, q: Tensor, k: Tensor, v: Tensor, one_head: bool) -> None:
    if k.dim() not in (2, 3):
        fail("key", "of shape [tokens, Hkv, D] or [tokens, D]", k, "split heads with key.unflatten(-1, (heads, -1))")
    if v.dim() != k.dim():
        fail("value", f"of rank {k.dim()}, as key", v)
    heads = "" if one_head else "Hq, "
    if isinstance(query, JaggedTensor):
        if q.dim() != k.dim():
            fail("query", f"of shape [tokens_q, {heads}D], as key has {k.dim()} dimensions", q)
    elif q.dim() not in (k.dim(), k.dim() + 1):
        fail("query", f"of shape [Lq, {heads}D] or [B, Lq, {heads}D], as key has {k.dim()} dimensions", q)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = k.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if not any(x.dtype == torch.float64 for x in (q, k, v)) and all(x.is_floating_point() for x in (q, k, v)):
            return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = _DTYPES) -> None:
    if not q.dtype == k.dtype == v.dtype:
        got = f"query {q.dtype}, key {k.dtype}, value {v.dtype}"
        fail("query, key and value", "of one dtype", got, "cast them, or run under torch.autocast", error=TypeError)
    if k.dtype not in dtypes:
        remedy = "use attend_fp8" if k.dtype == torch.float8_e4m3fn else "convert with .float()"
        fail("query, key and value", "bf16, fp16, fp32 or fp64", k, remedy, error=TypeError)
    (q_heads, dim), (kv_heads, key_dim), value_heads = q.shape[-2:], k.shape[-2:], v.shape[-2]
    if dim != key_dim:
        fail("the head dimension of query", f"{key_dim}, as of key", f"{dim}")
    if value_heads != kv_heads:
        fail("heads of value", f"{kv_heads}, as of key", f"{value_heads}")
    if kv_heads == 0 or q_heads % kv_heads != 0 or q_heads == 0:
        fail("heads of query", f"a positive multiple of the {kv_heads} heads of key", f"{q_heads}")
    for name, size in (("key", key_dim), ("value", v.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            fail(
                f"the head dimension of {name}",
                f"in 1..{MAX_HEAD_DIM}",
                f"{size}",
                error=NotImplementedError if size else ValueError,
            )


def _check_layouts(
    query: Tensor | JaggedTensor, key: JaggedTensor, value: JaggedTensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    check_same_device(q, "query", k.device)
    check_same_device(v, "value", k.device)
    if not key.layout.same_as(value.layout):
        _fail_layouts(key.layout, value.layout)
    if isinstance(query, JaggedTensor):
        if query.batch_size != key.batch_size:
            fail("the batch size of query", f"{key.batch_size}, as of key", f"{query.batch_size}")
    elif q.dim() == 4 and q.shape[0] != key.batch_size:
        fail(
            "dimension 0 of query",
            f"{key.batch_size} (the batch size of key)",
            describe(query),
            "leave it out to broadcast one query",
        )


def _slack(*operands: Tensor | JaggedTensor) -> bool:
    return any(x.layout.has_slack(x.values().shape[0]) for x in operands if isinstance(x, JaggedTensor))


def _fail_layouts(key: JaggedLayout, value: JaggedLayout) -> None:
    fail("value", f"on the layout of key, {key}", str(value), "use key.with_values(v)")
