"""The Blackwell forward compiles for GPUs that are not there, within the budgets that its configurations state."""

import sys
from dataclasses import replace

import pytest
import torch

from jaggedtensor.kernels.dispatch import choose
from jaggedtensor.kernels.toolchain import GLUON_NEEDS, triton_version
from jaggedtensor.problem import AttentionProblem, Device, QueryKind

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Blackwell", allow_module_level=True)

from jaggedtensor.kernels.blackwell.attention_fwd.config import ROWS, anchors_pay, select
from jaggedtensor.testing.compiled import GPU_OF

B200, B300 = GPU_OF["sm_100"], GPU_OF["sm_103"]
COMPILED = [
    ("sm_100", "broadcast 128"),
    ("sm_103", "broadcast 128"),
    ("sm_100", "broadcast 64"),
    ("sm_100", "per sequence 80 and 64, 5 rows of 3 heads, causal"),
    ("sm_100", "jagged 128"),
    ("sm_103", "jagged 128"),
    ("sm_100", "jagged 64"),
    ("sm_100", "jagged 128, causal"),
    ("sm_100", "jagged 64, window, groups of 4"),
    ("sm_100", "broadcast 128, 256 rows"),
    ("sm_100", "broadcast 256"),
    ("sm_100", "jagged 192 and 128, causal"),
    ("sm_100", "broadcast 128, tiles asked for"),
    ("sm_100", "jagged 128, tiles asked for"),
    ("sm_100", "broadcast 256, tiles asked for"),
    ("sm_100", "broadcast 128, cut tiles"),
    ("sm_100", "jagged 128, anchored"),
    ("sm_103", "jagged 128, anchored"),
    ("sm_100", "jagged 128, causal, anchored"),
    ("sm_100", "jagged 64, window, groups of 4, anchored"),
    ("sm_100", "broadcast 128, e4m3"),
    ("sm_100", "jagged 128, e4m3"),
    ("sm_100", "jagged 64, window, groups of 4, e4m3"),
    ("sm_100", "broadcast 256, e4m3"),
]


@pytest.mark.parametrize(("arch", "name"), COMPILED)
def test_forward_compiles_within_its_budgets(arch, name, compile_within_rules):
    """TUN-04: roles get the registers that they ask for, hot loops spill none, memory is what was estimated."""
    kernel, *more = compile_within_rules(name, arch, "forward")
    assert [after.name for after in more] == (
        ["merge_kernel"] * name.endswith("cut tiles") + ["forward_kernel"] * name.endswith("anchored")
    )
    assert ("clusterlaunchcontrol.try_cancel" in kernel.made.asm["ptx"]) == name.endswith("asked for")
    config = kernel.config
    assert kernel.tensor_columns == 1 << (config.tensor_columns - 1).bit_length()
    roles = {role.kind: role for role in kernel.roles.values()}
    assert set(roles) == {"output", "softmax", "mma", "load"}
    groups = 4 if config.anchored else 2
    assert len(roles["softmax"].loops) == (1 if config.wide else groups * (1 + config.windowed + config.left))
    assert len(roles["load"].loops) == len(roles["output"].loops) == 1
    # And one for tiles of one lane, one for the blocks that lane 0 does not see.
    assert len(roles["mma"].loops) == 1 + (config.q_parts == 2) + config.skips
    # Two blocks of scores and two of sums, 32 bytes of the left operand's rows for each.
    product = "UTCHMMA" if config.itemsize == 2 else "UTCQMMA"
    assert roles["mma"].counts[product] == 2 * (config.block_d + config.block_n) * config.itemsize // 32


def test_rows_are_anchored_where_there_is_work_enough():
    """Two tiles in 16 bits without a block mask; 16 blocks of keys for each multiprocessor, less two for each tile."""
    problem = AttentionProblem(QueryKind.JAGGED, None, 16, 16, 128, 128, torch.bfloat16, B200)
    assert anchors_pay(problem, 8 * 4096, 8 * 4096, 8)
    assert not anchors_pay(problem, 8 * 256, 8 * 256, 8)
    assert not anchors_pay(problem, 0, 0, 0)
    assert not anchors_pay(problem, 4096 * 250, 4096 * 250, 4096)  # tiles of two blocks
    for other in (
        replace(problem, dtype=torch.float8_e4m3fn),
        replace(problem, head_dim=256),
        replace(problem, masked=True),
        replace(problem, query=QueryKind.BROADCAST, q_len=128),
    ):
        assert not anchors_pay(other, 8 * 4096, 8 * 4096, 8)


def test_a_short_query_is_not_padded_to_two_tiles():
    for rows, group in ((1, 1), (128, 1), (32, 4), (43, 3)):
        problem = AttentionProblem(QueryKind.BROADCAST, rows // group or 1, group, 1, 128, 128, torch.bfloat16, B200)
        config = select(problem)
        assert config.streams
        assert config.block_m == ROWS
        assert config.kv_stages * config.block_n * config.block_d * 2 >= 64 << 10  # in flight


def test_who_asks_for_blackwell_by_name_gets_it_where_it_runs():
    problem = AttentionProblem(QueryKind.BROADCAST, 128, 4, 4, 128, 128, torch.bfloat16, B200)
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
