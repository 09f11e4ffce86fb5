"""dQ of the general Hopper backward as threads hold it, brought back into rows."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from jaggedtensor.kernels.hopper.attention_bwd.config import Config
from jaggedtensor.kernels.hopper.attention_bwd.total import blocks_of, unpacked, workspace


@pytest.mark.parametrize(
    ("lengths", "group", "heads", "dim", "jagged"),
    [((70, 0, 64, 1, 130), 1, 2, 128, True), ((5, 33, 100), 4, 1, 72, True), ((70, 70), 2, 2, 40, False)],
)
def test_every_element_comes_from_its_place(lengths, group, heads, dim, jagged):
    config = Config(group, jagged, False, False, packed=True, block_d=64 if dim <= 64 else 128)
    slack, offsets = 3 * jagged, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tokens = sum(lengths)
    blocks = blocks_of((tokens + slack) * group, len(lengths))
    held, _ = workspace(heads, blocks, config, torch.device("cpu"))
    assert held.numel() == heads * blocks * 64 * config.block_d
    assert not held.any()
    held.fill_(torch.nan)
    wanted = torch.randn(tokens + slack, heads * group, dim, generator=torch.Generator().manual_seed(0))
    wanted[tokens:] = 0
    place = held.view(heads, blocks, 2, 4, config.half // 8, 8, 4, 2, 2)
    for b, length in enumerate(lengths):
        begin = int(offsets[b])
        row, column = torch.arange(length * group)[:, None], torch.arange(dim)[None, :]
        block, r = (begin * group + 63 * (b + 1)) // 64 + row // 64, row % 64
        half, c = column // config.half, column % config.half
        rows = wanted[begin : begin + length].unflatten(1, (heads, group)).transpose(1, 2)
        for head in range(heads):
            mine = rows[:, :, head].reshape(-1, dim)
            place[head, block, half, r // 16, c // 8, r % 8, c % 8 // 2, r % 16 // 8, c % 2] = mine
    q = torch.empty_like(wanted) if jagged else torch.empty(len(lengths), lengths[0], heads * group, dim)
    problem = SimpleNamespace(q_len=None if jagged else lengths[0])
    args = SimpleNamespace(
        q=q, slack=True, q_offsets=offsets if jagged else None, k_offsets=offsets, problem=problem, scale=0.5
    )
    assert torch.equal(unpacked(held, args, blocks, config).view(wanted.shape), wanted * 0.5)
