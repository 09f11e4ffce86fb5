"""The Blackwell forward compiles for GPUs that are not there, within the budgets that its configurations state."""

import sys
from dataclasses import replace

import pytest
import torch

from jaggedtensor.kernels.dispatch import GLUON_NEEDS, choose, triton_version
from jaggedtensor.problem import AttentionProblem, Device

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

from jaggedtensor.kernels.blackwell.attention_fwd.config import ROWS, SHARED_MEMORY, select
from jaggedtensor.testing.blackwell import B200, B300, CASES, B, compile_forward, registers_of, roles_of

FA4_SOFTMAX = 514  # instructions for each block of 128 keys that FlashAttention-4's softmax has, compiled for sm_100a


@pytest.mark.parametrize(("device", "case"), CASES.values(), ids=CASES.keys())
def test_forward_compiles_within_its_budgets(device, case):
    """TUN-04: roles get the registers that they ask for, hot loops spill none, memory is what was estimated."""
    made, config = compile_forward(device, case)
    assert made.metadata.shared <= config.shared_memory <= SHARED_MEMORY
    assert made.metadata.tmem_size == max(config.tensor_columns, 1 << (config.tensor_columns - 1).bit_length()) <= 512
    # Asking for more than there is drops every request, silently.
    asked = {config.correction_registers, config.softmax_registers, config.single_registers}
    assert asked <= set(registers_of(made))
    roles = roles_of(made, config)
    softmax, fades = roles["softmax"], roles["correction"]
    assert len(softmax) == (1 if config.wide else 2 * (1 + config.windowed + config.left))
    assert len(roles["load"]) == len(fades) == 1
    # And one for tiles of one lane, one for the blocks that lane 0 does not see.
    assert len(roles["mma"]) == 1 + (config.q_parts == 2) + config.skips
    for body in softmax + roles["mma"] + roles["load"]:
        assert not body["STL"], body
        assert not body["LDL"], body
    assert fades[0]["LDL"] <= 2  # who it is among the threads and the rows; no part of O
    assert not fades[0]["STL"]
    bulk = [sum(body.values()) for body in softmax][:2]
    masks = 256 * (config.wide and config.windowed)  # two for each score; others have them in loops of their own
    blind = 2 * config.windowed  # rows may have seen nothing
    assert bulk[-1] <= FA4_SOFTMAX + masks + blind, bulk
    # Two blocks of scores and two of sums, 16 columns of the left operand for each.
    assert roles["mma"][0]["UTCHMMA"] == 2 * (config.block_d + config.block_n) // 16


@pytest.mark.parametrize("name", ["streams 128", "tiles 128", "wide 256"])
def test_ctas_that_ask_for_their_tiles_fit_too(name):
    made, config = compile_forward(*CASES[name], answers=2)
    assert made.metadata.shared <= config.shared_memory <= SHARED_MEMORY
    assert {config.correction_registers, config.softmax_registers, config.single_registers} <= set(registers_of(made))
    assert "clusterlaunchcontrol.try_cancel" in made.asm["ptx"]
    roles = roles_of(made, config)
    for body in roles["softmax"] + roles["mma"] + roles["load"]:
        assert not body["STL"] + body["LDL"], body


def test_tiles_that_are_cut_between_ctas_fit_too():
    """And the kernel that merges their parts compiles."""
    made, config = compile_forward(*CASES["streams 128"], splits=1)
    assert made.metadata.shared <= config.shared_memory <= SHARED_MEMORY
    for bodies in roles_of(made, config).values():
        for body in bodies:
            assert not body["STL"] + body["LDL"], body


def test_a_short_query_is_not_padded_to_two_tiles():
    for rows, group in ((1, 1), (128, 1), (32, 4), (43, 3)):
        problem = AttentionProblem(B, rows // group or 1, group, 1, 128, 128, torch.bfloat16, B200)
        config = select(problem)
        assert config.streams
        assert config.block_m == ROWS
        assert config.kv_stages * config.block_n * config.block_d * 2 >= 64 << 10  # in flight


def test_who_asks_for_blackwell_by_name_gets_it_where_it_runs():
    problem = AttentionProblem(B, 128, 4, 4, 128, 128, torch.bfloat16, B200)
    assert choose(problem, "blackwell").implementation.name == "blackwell"
    for device in (B300, replace(B200, processors=1)):
        assert choose(replace(problem, device=device), "blackwell").implementation.name == "blackwell"
    assert choose(problem).implementation.name != "blackwell"  # not by itself: no doctor has passed it here
    refused = {
        r"compute capability 10\.x, not 9\.0": replace(problem, device=Device("cuda", (9, 0), 132, 227 << 10)),
        r"head dimensions up to 256, not 264": replace(problem, head_dim=264),
        r"multiples of 8\), not 128 and 100": replace(problem, value_dim=100),
        r"up to 128 query heads": replace(problem, q_heads=516),
    }
    for message, lacking in refused.items():
        with pytest.raises(NotImplementedError, match=message):
            choose(lacking, "blackwell")
