"""The Blackwell backward compiles for GPUs that are not there, within the budgets that its configurations state."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.dispatch import by_name
from jaggedtensor.kernels.toolchain import GLUON_NEEDS, triton_version
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

from jaggedtensor.kernels.blackwell.attention_bwd_1cta import config as general
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.blackwell.attention_bwd_wide import config as wide
from jaggedtensor.kernels.blackwell.plan import backward_family, backward_lacks, backward_told, plan_backward
from jaggedtensor.testing.launches import GPUS


def problem_of(
    q_len=128, heads=4, kv_heads=4, dim=128, value_dim=None, dtype=torch.bfloat16, device=GPUS[10, 0], **more
):
    value_dim = dim if value_dim is None else value_dim
    return AttentionProblem(QueryKind.BROADCAST, q_len, heads, kv_heads, dim, value_dim, dtype, device, **more)


def general_problem(heads=4, kv_heads=4, dim=128, value_dim=None, dtype=torch.bfloat16, device=GPUS[10, 0], **more):
    value_dim = dim if value_dim is None else value_dim
    return AttentionProblem(QueryKind.JAGGED, None, heads, kv_heads, dim, value_dim, dtype, device, **more)


COMPILED = [
    ("sm_100", "broadcast 128"),
    ("sm_103", "broadcast 128"),
    ("sm_100", "broadcast 64"),
    ("sm_100", "broadcast 72 and 40, 17 rows of 4 heads"),
]


@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_backward_compiles_within_its_budgets(arch, name, compile_within_rules):
    """TUN-04: roles get the registers that they ask for, no loop stores a spilled number, memory is as estimated."""
    (kernel,) = compile_within_rules(name, arch, "backward")
    config, roles = kernel.config, kernel.roles
    assert kernel.tensor_columns == 512 >= config.tensor_columns
    compute, (mma,), (drain,) = (roles[f"{name}_role"].loops for name in ("compute", "mma", "drain"))
    # Of each thread: no score is computed twice.
    assert [loop.counts["MUFU"] for loop in compute] == [broadcast.HALF] * 2
    # Sixteen of the inner dimension each: S, dP and dQ whole, dV and dK in halves.
    d, dv = config.block_d // 16, config.block_dv // 16
    assert mma.counts["UTCHMMA"] == d + dv + 8 + 8 * (config.block_d + config.block_dv) // broadcast.HALF
    assert drain.counts["UTMASTG"] == (config.block_d + config.block_dv) // broadcast.HALF


GENERAL = [
    ("sm_100", "jagged 64"),
    ("sm_100", "jagged 128, the same bits"),
    ("sm_103", "broadcast 128, 256 rows"),
    ("sm_100", "jagged 64, window, groups of 4"),
]


@pytest.mark.parametrize(("arch", "name"), GENERAL)
def test_backward_that_keeps_keys_on_a_cta_compiles_within_its_budgets(arch, name, compile_within_rules):
    (kernel,) = compile_within_rules(name, arch, "backward")
    assert kernel.family.endswith("attention_bwd_1cta")
    config, roles = kernel.config, kernel.roles
    assert kernel.tensor_columns == 512 >= config.tensor_columns
    compute, (mma,), drain = (roles[f"{name}_role"].loops for name in ("compute", "mma", "drain"))
    assert [loop.counts["MUFU"] for loop in compute] == [general.HALF] * 2
    d, dv = config.block_d // 16, config.block_dv // 16  # S and dP; of 128 inner elements: dQ, dK, dV
    assert mma.counts["UTCHMMA"] == d + dv + 3 * 8
    assert drain[0].counts["UTMAREDG"] == config.block_d // general.SLICE


WIDE = [
    ("sm_100", "jagged 256"),
    ("sm_103", "broadcast 256"),
    ("sm_100", "jagged 256, window, 6 heads"),
    ("sm_100", "broadcast 128, a mask"),
]


@pytest.mark.parametrize(("arch", "name"), WIDE)
def test_backward_in_a_pass_for_each_gradient_compiles_within_its_budgets(arch, name, compile_within_rules):
    kernels = compile_within_rules(name, arch, "backward")
    assert [kernel.config.gradient for kernel in kernels] == list(wide.Gradient)
    for kernel in kernels:
        assert kernel.family.endswith("attention_bwd_wide")
        config, roles = kernel.config, kernel.roles
        assert kernel.tensor_columns <= 512 >= config.tensor_columns
        compute, mma = (roles[f"{name}_role"].loops[0] for name in ("compute", "mma"))
        assert compute.counts["MUFU"] - wide.STREAMED in (0, 1)  # one more where a division tells heads of a group
        # Sixteen of the inner dimension each: S, dP, and the gradient of 64 that pass.
        d, dv = config.block_d // 16, config.block_dv // 16
        assert mma.counts["UTCHMMA"] == d + dv * config.differs + 4
        assert compute.counts.get("STL", 0) == mma.counts.get("STL", 0) == 0


def test_a_problem_beyond_the_budgets_is_refused_by_name():
    refused = {
        "1 to 128 query rows": problem_of(33, heads=16, kv_heads=4),
        "no window": problem_of(left=3),
        "no block mask": problem_of(masked=True),
        "float32": problem_of(dtype=torch.float32),
        "groups": problem_of(8, heads=12, kv_heads=4),
        "multiples of 8": problem_of(dim=68),
        "up to 128": problem_of(dim=192),
        "broadcast query": replace(problem_of(), query=QueryKind.PER_SEQUENCE),
    }
    for words, problem in refused.items():
        (reason,) = broadcast.lacks(problem)
        assert re.search(words, reason), reason
    refused = {
        "1 to 1024 rows": problem_of(1025),
        "no block mask of a broadcast query": problem_of(masked=True),
        "no order under a block mask": general_problem(masked=True, deterministic=True),
        "float32": general_problem(dtype=torch.float32),
        "groups": general_problem(heads=12, kv_heads=4),
        "multiples of 8": general_problem(dim=68),
        "up to 128": general_problem(dim=192),
    }
    for words, problem in refused.items():
        (reason,) = general.lacks(problem)
        assert re.search(words, reason), reason
    refused = {
        "float32": general_problem(dtype=torch.float32),
        "multiples of 8": problem_of(dim=68),
        "up to 256": problem_of(dim=264),
    }
    for words, problem in refused.items():
        (reason,) = backward_lacks(problem)
        assert re.search(words, reason), reason


def test_what_other_kernels_lack_has_a_pass_for_each_gradient():
    """Wide heads, any groups, block masks and many rows of a broadcast query, the same bits under a mask."""
    problems = {
        "broadcast takes head dimensions up to 128": problem_of(dim=192),
        "general takes head dimensions up to 128": general_problem(dim=256, value_dim=128, left=3, deterministic=True),
        "general takes groups of 1, 2, 4, ... heads, not 3": general_problem(heads=12, kv_heads=4),
        "general takes no block mask of a broadcast query": problem_of(masked=True),
        "general takes 1 to 1024 rows of a broadcast query for a head of keys, not 2000": problem_of(2000),
        "general adds dQ in no order under a block mask": general_problem(masked=True, deterministic=True),
    }
    for words, problem in problems.items():
        told = backward_told(problem)
        assert told.startswith("wide (passed over: broadcast "), told
        assert words in told


def test_a_pass_has_the_heads_of_a_group_that_a_block_holds():
    for group, heads, parts in ((1, 1, 1), (2, 2, 1), (3, 1, 3), (6, 2, 3), (12, 4, 3), (64, 64, 1), (128, 64, 2)):
        config = wide.select(general_problem(heads=2 * group, kv_heads=2), wide.Gradient.KEY)
        assert (config.group, config.parts) == (heads, parts)


def test_no_cta_is_left_over_for_a_second_round():
    for heads in (1, 3, 4, 5, 8, 60, 148):
        assert heads * broadcast.select(problem_of(heads=heads, kv_heads=heads)).workers <= 148
    for rows, heads in ((1, 4), (128, 4), (300, 4), (1000, 8), (17, 148)):
        config = wide.select(problem_of(rows, heads=heads, kv_heads=heads, dim=256), wide.Gradient.QUERY)
        assert heads * config.q_blocks * config.workers <= 148
    assert broadcast.select(problem_of(device=Device("cuda", (10, 0), 2, 227 << 10))).workers == 1


def test_each_problem_has_the_schedule_of_its_family():
    blackwell, portable = by_name("blackwell"), by_name("portable")
    keys = JaggedLayout.from_lengths(torch.tensor([300, 0, 5]))
    for family, problem in {"broadcast": problem_of(), "general": problem_of(300), "wide": problem_of(dim=192)}.items():
        assert backward_family(problem) == family
        assert blackwell.backward_launcher(problem) is blackwell.launcher()
        _, found = blackwell.schedules(problem, keys, None, 305, 128, True)
        assert all(torch.equal(a, b) for a, b in zip(found, plan_backward(problem, keys, None, 305, 128), strict=True))
        assert blackwell.schedules(problem, keys, None, 305, 128, False)[1] == []
    assert blackwell.backward_launcher(problem_of(dtype=torch.float32)) is portable.launcher()
