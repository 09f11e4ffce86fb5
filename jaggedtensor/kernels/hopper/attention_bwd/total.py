"""dQ in fp32 as threads of a consumer hold it: what a warp stores at once lies together, in shared memory and outside.

`[heads of keys, blocks, 2, 4, D / 16, 8, 4, 2, 2]`: a block has 64 packed query rows of one sequence. Element
(half, w, j, l, c, r, e) of it is row 16 w + 8 r + l, column half * D / 2 + 8 j + 2 c + e. The first block of sequence b
is number (its first packed row + 63 (b + 1)) // 64 of a head, so that no two sequences share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jaggedtensor.kernels.hopper.attention_bwd.config import ROWS, Config
from jaggedtensor.kernels.shared.direct import Descriptor
from jaggedtensor.kernels.shared.dsl import TensorDescriptor, gl
from jaggedtensor.kernels.shared.slack import clear_slack
from jaggedtensor.problem import AttentionArgs

MOST = 4  # programs that bring a sequence and head back, at most: long ones take several blocks each


def blocks_of(rows: int, batch: int) -> int:
    """Blocks of a head, at most, where `batch` sequences have so many packed rows."""
    return (rows + (ROWS - 1) * (batch + 1)) // ROWS


def workspace(
    heads: int, blocks: int, config: Config, device: torch.device, cleared: bool = True
) -> tuple[Tensor, Descriptor]:
    """Zeros if `cleared`, and what the kernel adds to: half a block of columns at once."""
    new = torch.zeros if cleared else torch.empty
    total = new(heads * blocks * 2 * ROWS, config.half, dtype=torch.float32, device=device)

    def make() -> TensorDescriptor:
        layout = gl.NVMMASharedLayout(0, 32, 2)
        return TensorDescriptor(total, list(total.shape), [config.half, 1], [ROWS, config.half], layout)

    return total, ((total.data_ptr(), *total.shape), make)


def unpacked(total: Tensor, args: AttentionArgs, blocks: int, config: Config) -> Tensor:
    """scale * dQ in the shape of Q, rounded once; 0 past the last sequence."""
    result = torch.empty_like(args.q, memory_format=torch.contiguous_format)
    if args.slack and args.q_offsets is not None:
        clear_slack(result, args.q_offsets)
    batch, heads, length = args.k_offsets.shape[0] - 1, result.shape[-2], args.problem.q_len or 0
    share = min(64, max(MOST, triton.cdiv(2 * blocks, batch)))
    unpack_kernel[(batch * share, heads // config.group)](
        total, result, args.q_offsets, length, blocks, heads, args.scale,
        GROUP=config.group, WIDTH=result.shape[-1], D=config.block_d, ROWS=ROWS, SHARE=share,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["length", "blocks", "scale"])
def unpack_kernel(
    total,
    result,
    offsets,  # or None: all sequences have `length` queries
    length,
    blocks,
    heads,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,  # programs of a sequence and head of keys
):
    sequence, head = tl.program_id(0) // SHARE, tl.program_id(1)
    if offsets is None:
        start, count = sequence.to(tl.int64) * length, length
    else:
        start = tl.load(offsets + sequence).to(tl.int64)
        count = (tl.load(offsets + sequence + 1).to(tl.int64) - start).to(tl.int32)
    first = head.to(tl.int64) * blocks + (start * GROUP + (ROWS - 1) * (sequence + 1)) // ROWS
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    every = tl.arange(0, ROWS * D)
    for block in range(tl.program_id(0) % SHARE, tl.cdiv(count * GROUP, ROWS), SHARE):
        packed = block * ROWS + row
        inside = (packed < count * GROUP) & (column < WIDTH)
        x = tl.load(total + (first + block) * (ROWS * D) + every) * scale
        x = tl.reshape(x.to(result.dtype.element_ty), (2, 4, D // 16, 8, 4, 2, 2))
        x = tl.reshape(tl.permute(x, (1, 5, 3, 0, 2, 4, 6)), (ROWS, D))
        place = ((start + packed // GROUP) * heads + head * GROUP + packed % GROUP) * WIDTH
        tl.store(result + place + column, x, mask=inside)
