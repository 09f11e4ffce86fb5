"""Launches the forward kernel. Its arguments are checked already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_fwd.config import Config, select
from jaggedtensor.kernels.hopper.attention_fwd.device import forward_kernel, merge_kernel
from jaggedtensor.kernels.shared.direct import Descriptor, Variant
from jaggedtensor.kernels.shared.fill import outputs
from jaggedtensor.kernels.shared.forwards import MANY, Call, check_rows, log2_units, merge_parts, new_parts
from jaggedtensor.kernels.shared.ragged import ragged, strides_fit
from jaggedtensor.problem import AttentionArgs

MUCH = 8192  # keys of all tiles of a CTA below which a second launch costs more than anchored rows save
_CALLS: dict[Any, Call | None] = {}  # a model has a few; None: operands that TMA cannot address


def forward(args: AttentionArgs, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """out and lse, 0 and -inf for a row that sees no key.

    Operands that TMA cannot address (columns apart, rows not at multiples of 16 bytes) are copied first, and so is the
    query for a negative scale.
    """
    problem, q, k, v, q_offsets, k_offsets = args[:6]
    device = torch.cuda.current_device() if k.is_cuda else 0
    if k.is_cuda and k.device.index != device:
        with torch.cuda.device(k.device):
            return forward(args, config)
    scale, splits = args.scale, len(args.schedule) == 3 and not problem.masked
    tiles, worker_offsets, *more = args.schedule
    workers = worker_offsets.shape[0] - 1
    much = tiles.shape[0] * k.shape[0] >= MUCH * workers * args.batch_size
    places = q.data_ptr() | k.data_ptr() | v.data_ptr()
    key = (
        problem, config, splits, much, device, scale, q.stride(), k.stride(), v.stride(), q.shape[0] == 1,
        k.shape[0] == 1, args.batch_size == 1, k_offsets.dtype, None if q_offsets is None else q_offsets.dtype,
    )  # fmt: skip
    call = _CALLS.get(key, _UNKNOWN)
    if call is _UNKNOWN:
        if len(_CALLS) > MANY:
            _CALLS.clear()
        chosen = select(problem) if config is None else config
        call = _CALLS[key] = _prepare(args, replace(chosen if much else chosen.exact, splits=splits))
    if call is None or places % 16:
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        return forward(args._replace(q=-q if scale < 0 else q, k=k, v=v, scale=abs(scale)), config)

    listed = more[0] if problem.masked else None
    if problem.masked or not tiles.shape[0]:
        out, lse = outputs(args)
        if out.numel() == 0 or not tiles.shape[0]:
            return out, lse
    else:  # what no tile writes is filled by the kernel
        out, lse = q.new_empty(args.out_shape), q.new_empty(args.lse_shape, dtype=torch.float32)
    check_rows(args)
    places = tiles.data_ptr() | worker_offsets.data_ptr() | k_offsets.data_ptr()
    if q_offsets is not None:
        places |= q_offsets.data_ptr()
    parts = new_parts(q, workers, call.config, splits)
    flags = None
    if call.config.anchored:
        flags = q.new_empty(tiles.shape[0] * call.config.flags, dtype=torch.int32)
    descriptors = [_descriptor(x, block) for x, block in zip((q, k, v, out), call.blocks, strict=True)]
    rest = (
        out, lse, *call.steps, *parts, flags, tiles, worker_offsets, listed, q_offsets, k_offsets,
        problem.q_len or 0, args.batch_size, q.shape[0], *call.ends,
    )  # fmt: skip
    call.variant.launch(workers, descriptors, rest, not places % 16)
    if call.redo is not None:
        variant, redo = call.redo
        variant.launch(workers, descriptors, (*rest[:-1], redo), not places % 16)
    if splits:
        merge_parts(call, args, out, lse, parts, more[0], places)
    return out, lse


_UNKNOWN: Any = object()


def _descriptor(x: Tensor, block: tuple[int, int, int]) -> Descriptor:
    """Its shape and strides are the call's."""
    return x.data_ptr(), lambda: ragged(x if x.dim() == 3 else x.flatten(0, 1), *block)[1]()


def _prepare(args: AttentionArgs, config: Config) -> Call | None:
    problem, q = args.problem, args.q
    merges = q.dim() == 3 or q.shape[0] == 1 or q.stride(0) == q.shape[1] * q.stride(1)  # [B, Lq] into one dimension
    strides = q if q.dim() == 3 or not merges else q.flatten(0, 1)
    if args.scale < 0 or not merges or not all(strides_fit(x) for x in (strides, args.k, args.v)):
        return None
    # Of lse, which is new: [B, Hq, Lq] or [rows, Hq].
    *_, first, second = args.lse_shape
    steps = (0, second, 1) if args.q_offsets is not None else (first * second, 1, second)
    query, key = (config.rows // config.group, config.group), (config.block_n, 1)
    blocks = ((*query, config.block_d), (*key, config.block_d), (*key, config.block_dv), (*query, config.block_dv))
    ends = (*log2_units(args.scale), problem.left, problem.right, config)
    merge = Variant(merge_kernel, {"num_warps": 4, "enable_fp_fusion": True})
    variant = Variant(forward_kernel, config.options)
    redo = (Variant(forward_kernel, config.redo.options), config.redo) if config.anchored else None
    return Call(variant, blocks, steps, ends, merge, config, redo)
