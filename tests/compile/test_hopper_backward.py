"""The Hopper backward kernels compile without a GPU: no spills, no serialised products, budgets kept."""

import re
import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.hopper.attention_bwd import config as general
from jaggedtensor.kernels.hopper.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.hopper.plan import plan_broadcast_backward
from jaggedtensor.problem import AttentionProblem, Device, QueryKind
from jaggedtensor.schedules.types import Tile
from jaggedtensor.testing.compile_rules import serialised
from jaggedtensor.testing.launches import GPUS


def problem_of(
    q_len=128, heads=4, kv_heads=4, dim=128, value_dim=None, dtype=torch.bfloat16, device=GPUS[9, 0], **more
):
    value_dim = dim if value_dim is None else value_dim
    return AttentionProblem(QueryKind.BROADCAST, q_len, heads, kv_heads, dim, value_dim, dtype, device, **more)


@pytest.mark.parametrize(
    "name",
    ["broadcast 128", "broadcast 128, 256 rows", "broadcast 64", "broadcast 72 and 40, 17 rows of 4 heads"],
)
def test_no_hot_loop_spills_and_no_product_is_serialised(name, compile_within_rules):
    (kernel,) = compile_within_rules(name, "sm_90", "backward")
    config = kernel.config
    assert {192, 96, 24} <= kernel.asked
    scores, makes = (kernel.roles[name].loops for name in ("score_role", "make_role"))
    assert len(scores) == 2  # one of each scorer
    assert all(loop.counts["HGMMA"] >= 12 for loop in scores)
    assert [loop.counts["HGMMA"] for loop in makes] == [16]
    assert serialised(kernel, "sm_90") == []
    # The memory of a barrier that no role uses is given to a buffer, which its initial value then spoils.
    made = (i for i in kernel.code.instructions if i.name == "SYNCS.EXCH.64")
    places = [place for i in made if (place := re.search(r"URZ, \[UR\d+(?:\+0x([0-9a-f]+))?\]", i.operands))]
    assert len(places) == 2 * (1 + config.grad_stages + config.k_stages + config.v_stages) + 12
    assert min(int(place[1] or "0", 16) for place in places) >= config.buffers


@pytest.mark.parametrize(
    "name",
    [
        "jagged 128",
        "jagged 128, cut tiles",
        "jagged 64",
        "jagged 64, window, groups of 4",
        "jagged 128, causal, groups of 4",
    ],
)
def test_the_general_kernel_spills_in_no_loop_without_a_mask(name, compile_within_rules):
    (kernel,) = compile_within_rules(name, "sm_90", "backward")
    (consume,) = (role for role in kernel.roles.values() if role.kind == "consume")
    assert kernel.config.cut == ("cut" in name)
    assert len(consume.loops) == 2
    for loop in consume.loops:
        assert loop.counts["HGMMA"] == (34 if kernel.config.block_d == 128 else 26)
        assert loop.counts["FENCE"] == 1  # for dS and dQ
        assert loop.counts["STL"] == 0 or (kernel.config.block_d == 128 and kernel.config.right)
    assert serialised(kernel, "sm_90") == []


@pytest.mark.parametrize("name", ["jagged 128, the same bits", "jagged 128 and 64"])
def test_what_ptxas_12_9_crashes_on_is_assembled(name, compile_within_rules):
    (kernel,) = compile_within_rules(name, "sm_90", "backward")
    assert all(not role.spilled for role in kernel.roles.values() if role.kind == "consume")
    assert serialised(kernel, "sm_90") == []


@pytest.mark.parametrize("name", ["jagged 128, waves", "jagged 64, waves"])
def test_no_wave_of_the_general_kernel_spills_in_a_loop(name, compile_within_rules):
    kernels = compile_within_rules(name, "sm_90", "backward")
    assert [kernel.config.last for kernel in kernels] == [False, False, True]
    for kernel in kernels:
        (consume,) = (role for role in kernel.roles.values() if role.kind == "consume")
        for loop in consume.loops:
            assert loop.counts["HGMMA"] == (34 if kernel.config.block_d == 128 else 26)
            assert loop.counts["FENCE"] == 1
            assert loop.counts["STL"] == 0
            assert loop.counts["LDL"] == 0
        assert serialised(kernel, "sm_90") == []


def test_heads_of_few_dimensions_are_left_to_the_portable_kernels():
    def lacks(*dims):
        problem = AttentionProblem(QueryKind.JAGGED, None, 4, 2, *dims, torch.float16, GPUS[9, 0])
        return general.lacks(problem)

    assert not lacks(40, 128)
    assert not lacks(128, 64)
    assert lacks(32, 64) == ["takes head dimensions of 40 to 128 that are multiples of 8, not 32"]


def test_a_problem_beyond_the_budgets_is_refused_by_name():
    refused = {
        "1 to 512 query rows": problem_of(129, heads=16, kv_heads=4),
        "window": problem_of(left=3),
        "float32": problem_of(dtype=torch.float32),
        "groups": problem_of(8, heads=12, kv_heads=4),
        "multiples of 8": problem_of(dim=68),
        "up to 128": problem_of(dim=192),
    }
    for words, problem in refused.items():
        (reason,) = set(broadcast.lacks(problem))
        assert re.search(words, reason), reason


def test_no_cta_is_left_over_for_a_second_round():
    for heads in (1, 3, 4, 5, 8, 60, 131, 132):
        for q_len in (1, 128, 129, 512):
            config = broadcast.select(problem_of(q_len, heads=heads, kv_heads=heads))
            assert config.parts == -(-q_len // 128)
            assert 132 - config.parts < config.workers * config.parts <= 132


def test_a_cta_of_many_sequences_has_fewer_tiles():
    """One has most of a long sequence, the other its last tile and 100 sequences of a tile each."""
    problem = problem_of(512, heads=1, kv_heads=1, device=Device("cuda", (9, 0), 8, 227 << 10))
    keys = JaggedLayout.from_lengths(torch.tensor([64 * 300] + [64] * 100))
    tiles, offsets, _ = plan_broadcast_backward(problem, keys, 64 * 400)
    blocks = (tiles[:, Tile.KV_END] - tiles[:, Tile.KV_BEGIN]).cumsum(0)
    assert offsets.tolist() == [0, 1, 102]
    assert blocks[offsets[1:] - 1].tolist() == [299, 299 + 101]


def test_a_device_of_fewer_processors_than_parts_has_a_worker():
    assert broadcast.select(problem_of(512, device=Device("cuda", (9, 0), 2, 227 << 10))).workers == 1
