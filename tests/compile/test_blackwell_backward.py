"""The Blackwell backward compiles for GPUs that are not there, within the budgets that its configurations state."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from jaggedtensor import JaggedLayout
from jaggedtensor.kernels.dispatch import GLUON_NEEDS, by_name, triton_version
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

from jaggedtensor.kernels.blackwell.attention_bwd_1cta import config as general
from jaggedtensor.kernels.blackwell.attention_bwd_broadcast import config as broadcast
from jaggedtensor.kernels.blackwell.plan import backward_family, backward_lacks, plan_backward
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
        (reason,) = backward_lacks(problem)
        assert re.search(words, reason), reason


def test_no_cta_is_left_over_for_a_second_round():
    for heads in (1, 3, 4, 5, 8, 60, 148):
        assert heads * broadcast.select(problem_of(heads=heads, kv_heads=heads)).workers <= 148
    assert broadcast.select(problem_of(device=Device("cuda", (10, 0), 2, 227 << 10))).workers == 1


def test_the_portable_kernels_do_what_is_refused():
    """Launchers and schedules."""
    blackwell, portable = by_name("blackwell"), by_name("portable")
    keys = JaggedLayout.from_lengths(torch.tensor([300, 0, 5]))
    families = {"broadcast": problem_of(), "general": problem_of(300), None: problem_of(dim=192)}
    for family, problem in families.items():
        serves = portable if family is None else blackwell
        assert blackwell.backward_launcher(problem) is serves.launcher()
        _, found = blackwell.schedules(problem, keys, None, 305, 128, True)
        assert family is None or backward_family(problem) == family
        own = plan_backward(problem, keys, None, 305, 128) if serves is blackwell else None
        wanted = own or portable.schedules(problem, keys, None, 305, 128, True)[1]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert blackwell.schedules(problem, keys, None, 305, 128, False)[1] == []
