"""dK and dV of tiles of the general Hopper backward that are cut: their parts, added in order."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from jaggedtensor import JaggedLayout, ScheduleKind
from jaggedtensor.kernels.hopper.attention_bwd.config import KEYS, Config
from jaggedtensor.kernels.hopper.attention_bwd.parts import merge, scratch
from jaggedtensor.schedules import Tile, TileAxis


@pytest.mark.parametrize(
    ("length", "batch", "heads", "dim", "value_dim", "dtype"),
    [(300, 3, 2, 128, 128, torch.float32), (129, 1, 3, 72, 40, torch.float16), (64, 1, 1, 64, 64, torch.float32)],
)
def test_parts_come_to_rows_of_their_own_tiles_and_no_other(length, batch, heads, dim, value_dim, dtype):
    keys = JaggedLayout.from_lengths(torch.full((batch,), length))
    schedule = keys.schedule(
        ScheduleKind.ZIGZAG, axis=TileAxis.KEY, q_len=200, block_q=64, block_kv=KEYS, heads=heads, workers=16,
        cut_last_round=1,
    )  # fmt: skip
    assert schedule.slots
    config = Config(1, False, False, False, block_d=_block(dim), block_dv=_block(value_dim))
    parts = scratch(16, config, torch.device("cpu"))
    assert parts.shape == (16, KEYS * (config.block_d + config.block_dv))
    parts.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    dk, dv = (torch.full((batch * length + 5, heads, x), torch.nan, dtype=dtype) for x in (dim, value_dim))
    wanted_k, wanted_v = dk.clone(), dv.clone()
    scale, offsets = 0.25, keys.offsets()
    for row in schedule.tiles.tolist():
        if row[Tile.SLOT] < 0:
            continue
        parts[row[Tile.SLOT]] = torch.randn(parts.shape[1:], generator=generator)
        begin = int(offsets[row[Tile.SEQUENCE]]) + KEYS * row[Tile.KV_BEGIN]
        rows = slice(begin, min(begin + KEYS, int(offsets[row[Tile.SEQUENCE] + 1])))
        mine = [other[Tile.SLOT] for other in schedule.tiles.tolist() if other[Tile.MERGE] == row[Tile.MERGE]]
        total = torch.zeros(parts.shape[1:])
        for slot in sorted(mine):
            total = total + parts[slot]
        total_k, total_v = total.split([KEYS * config.block_d, KEYS * config.block_dv])
        for j in range(rows.stop - begin):
            wanted_k[begin + j, row[Tile.HEAD]] = (held(total_k, j, dim) * scale).to(dtype)
            wanted_v[begin + j, row[Tile.HEAD]] = held(total_v, j, value_dim).to(dtype)
    merge(parts, schedule.merges, dk, dv, SimpleNamespace(k_offsets=offsets, scale=scale), config)
    torch.testing.assert_close(dk, wanted_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(dv, wanted_v, rtol=0, atol=0, equal_nan=True)
    assert not dk[: batch * length].isnan().all()


def held(total, key, width):
    """A row of a slot: where threads of a warpgroup hold it, 16 keys a warp."""
    column = torch.arange(width)
    by_warp = total.view(KEYS // 16, -1, 8, 4, 2, 2)
    return by_warp[key // 16, column // 8, key % 8, column % 8 // 2, key % 16 // 8, column % 2]


def _block(dim):
    return 64 if dim <= 64 else 128
