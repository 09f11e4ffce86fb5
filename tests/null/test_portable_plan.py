"""What the portable kernels ask of the schedules."""

import pytest
import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.portable import plan as portable
from jaggedtensor.kernels.portable.attention_bwd import config
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.schedules.types import Tile


@pytest.mark.parametrize("q_len", [100, 512])  # one part, and four
def test_a_sequence_has_a_cost_beside_its_keys_in_the_shares_of_a_broadcast_query(q_len):
    """Without it, programs that have the short sequences would be at work for twice as long as the others."""
    h200 = Device("cuda", (9, 0), 132, 227 << 10)
    problem = AttentionProblem(QueryKind.BROADCAST, q_len, 4, 4, 128, 128, torch.bfloat16, h200)
    lengths = [4096] * 60 + [0] + [1, 64] * 2000
    layout = JaggedLayout.from_lengths(torch.tensor(lengths))
    _, (tiles, offsets) = portable.plan(problem, layout, None, sum(lengths), 0, True)
    broadcast = config.select(problem).broadcast
    assert broadcast is not None
    assert broadcast.q_blocks == -(-q_len // 128)
    blocks = tiles[:, Tile.KV_END] - tiles[:, Tile.KV_BEGIN]
    work = [
        sum(blocks[begin:end].tolist()) + config.SEQUENCE_COST * (end - begin)
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ]
    assert len(work) == 4 * broadcast.workers
    # A cut may leave a sequence's cost, or a part of a block, to either of two programs.
    assert max(work) - min(work) <= 2 * (config.SEQUENCE_COST + 1), sorted(set(work))
