"""Blocks for problems: pure functions, which are asked for every shape on every kind of GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from jaggedtensor.kernels.portable.attention_bwd import config as backward
from jaggedtensor.kernels.portable.attention_fwd import config as forward
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

KIB = 1 << 10
DEVICES = {
    "unknown": Device("cuda"),
    "A100": Device("cuda", (8, 0), 108, 163 * KIB),
    "RTX 3090": Device("cuda", (8, 6), 82, 99 * KIB),
    "H200": Device("cuda", (9, 0), 132, 227 * KIB),
    "B200": Device("cuda", (10, 0), 148, 227 * KIB),
    "one processor": Device("cuda", (9, 0), 1, 227 * KIB),
}
DIMS = [(1, 1), (16, 16), (64, 64), (72, 104), (128, 128), (192, 128), (64, 256), (256, 64), (256, 256)]
LENGTHS = [0, 1, 4, 15, 16, 17, 32, 33, 64, 100, 128, 129, 512, 100_000]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def problems(device, dims):
    for kind, length, group, dtype in itertools.product(QueryKind, LENGTHS, (1, 3, 16), DTYPES):
        length = None if kind is QueryKind.JAGGED else length
        yield AttentionProblem(kind, length, 2 * group, 2, *dims, dtype, device)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_every_problem_has_blocks_that_fit(device, dims):
    """DIM-05, TUN-04."""
    for problem in problems(device, dims):
        config = backward.select(problem)
        assert config == backward.select(problem)
        kernels = [forward.select(problem), *(t for t in (config.keys, config.queries, config.broadcast) if t)]
        assert len(kernels) == (2 if config.broadcast else 3)
        for tiling in kernels:
            least = tiling.block_m == tiling.block_n == 16 and device.shared_memory == 64 * KIB
            assert 0 < tiling.shared_memory <= device.shared_memory or least
            assert {tiling.block_m, tiling.block_n} <= {16, 32, 64, 128}
            assert tiling.block_d >= dims[0]
            assert tiling.block_dv >= dims[1]
            assert tiling.group == problem.group
            assert tiling.num_stages >= 1
            assert tiling.num_warps in (4, 8)
        if config.broadcast:
            assert problem.query is QueryKind.BROADCAST
            parts = config.broadcast.q_blocks
            assert parts == max(1, -(-problem.rows // config.broadcast.block_m))
            assert parts <= backward.MOST_PARTS
            assert parts == 1 or config.broadcast.block_m == 128
            assert config.broadcast.workers * 2 >= device.processors  # for each part, one after the other
        elif problem.query is QueryKind.BROADCAST:
            assert config.queries.q_blocks * config.queries.block_m >= problem.rows
            assert config.queries.workers * config.queries.q_blocks * 2 >= device.processors
        else:
            assert config.queries.workers == config.queries.q_blocks == 1


@pytest.mark.parametrize("rows", [1, 4, 17, 32])
def test_a_short_query_is_not_padded_to_a_large_block(rows):
    problem = AttentionProblem(QueryKind.BROADCAST, rows, 1, 1, 128, 128, torch.bfloat16, DEVICES["H200"])
    smallest = max(16, 1 << (rows - 1).bit_length())
    assert forward.select(problem).block_m == smallest
    assert backward.select(problem).broadcast.block_m == smallest


@pytest.mark.parametrize(
    ("rows", "dims", "dtype", "device", "parts"),
    [
        (128, (128, 128), torch.bfloat16, "H200", 1),
        (129, (128, 128), torch.bfloat16, "H200", 2),
        (512, (128, 64), torch.float16, "H200", 4),
        (513, (128, 128), torch.bfloat16, "H200", None),
        (256, (256, 64), torch.bfloat16, "H200", None),
        (256, (128, 128), torch.bfloat16, "B200", 2),
        (256, (64, 64), torch.bfloat16, "A100", 2),
        (256, (128, 128), torch.bfloat16, "A100", None),
        (256, (64, 64), torch.float32, "H200", None),
    ],
    ids=str,
)
def test_a_longer_broadcast_query_comes_in_parts_that_fit_one_program(rows, dims, dtype, device, parts):
    """Or else to the two kernels of other queries; under a block mask always."""
    problem = AttentionProblem(QueryKind.BROADCAST, rows // 2, 2, 1, *dims, dtype, DEVICES[device])
    if rows % 2:
        problem = replace(problem, q_len=rows, q_heads=1)
    config = backward.select(problem)
    assert (config.broadcast and config.broadcast.q_blocks) == parts
    assert backward.select(replace(problem, masked=True)).broadcast is None


def test_tf32_is_used_where_torch_allows_it_and_nowhere_else():
    """NUM-05."""
    for allowed, dtype in itertools.product([False, True], DTYPES):
        problem = AttentionProblem(QueryKind.JAGGED, None, 1, 1, 64, 64, dtype, DEVICES["H200"], tf32=allowed)
        wanted = "tf32" if allowed and dtype == torch.float32 else "ieee"
        assert forward.select(problem).precision == wanted
        assert backward.select(problem).keys.precision == wanted
