"""The Hopper forward compiles for an H200 that is not there, within the budgets that its configurations state."""

import sys

import pytest

from jaggedtensor.kernels.toolchain import GLUON_NEEDS, triton_version

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon for Hopper", allow_module_level=True)

from jaggedtensor.kernels.hopper.attention_fwd import launch
from jaggedtensor.kernels.hopper.attention_fwd.config import LOADING, budget, select
from jaggedtensor.testing.compile_cases import CASES
from jaggedtensor.testing.compile_rules import serialised
from jaggedtensor.testing.compiled import CompileCase, Pass, compiled

COMPILED = [
    "broadcast 128",
    "broadcast 64",
    "broadcast 128, 32 rows",
    "broadcast 128, 256 rows",
    "broadcast 256",
    "jagged 128",
    "jagged 64",
    "jagged 256",
    "jagged 128, causal",
    "jagged 64, window, groups of 4",
    "per sequence 80 and 64, 5 rows of 3 heads, causal",
]


@pytest.mark.parametrize("name", COMPILED)
def test_forward_compiles_within_its_budgets(name, compile_within_rules):
    """TUN-04: roles get the registers that they ask for, hot loops spill none, shared memory is what was estimated."""
    (kernel,) = compile_within_rules(name, "sm_90", "forward")
    config = kernel.config
    assert kernel.shared <= config.shared_memory <= budget(config.ctas)
    assert {config.registers, LOADING} <= kernel.asked, kernel.asked
    for loop in consuming(kernel).loops:
        assert loop.counts["HGMMA"] * 16 * 64 >= config.block_n * config.block_dv / 4, loop.counts
        assert not config.settles or exponentials_after_the_wait(loop) == 0


MUCH = [f"{name}, much" for name in ("jagged 128", "jagged 64", "jagged 72 and 40", "broadcast 128, 256 rows")]


@pytest.mark.parametrize("name", MUCH)
def test_anchored_rows_have_no_maximum_in_the_loop(name, compile_within_rules):
    """Nor anything else that one key's score has to wait for another's for; the second launch is as without anchors."""
    first, redo = compile_within_rules(name, "sm_90", "forward")
    for kernel in (first, redo):
        config = kernel.config
        assert kernel.shared <= config.shared_memory <= budget(config.ctas)
        assert {config.registers, LOADING} <= kernel.asked, kernel.asked
        assert serialised(kernel, "sm_90") == []
    for loop in consuming(first).loops:
        assert loop.counts["SHFL"] == loop.counts["FMNMX"] == 0, loop.counts
        assert not first.config.settles or exponentials_after_the_wait(loop) == 0
    assert all(loop.counts["SHFL"] for loop in consuming(redo).loops)


def consuming(kernel):
    (role,) = (role for role in kernel.roles.values() if role.kind == "consume")
    assert len(role.loops) >= kernel.config.consumers
    return role


def exponentials_after_the_wait(loop):
    """Those beside which no product of the same role runs, see `softmax.settled`."""
    waits = [i for i, x in enumerate(loop.instructions) if x.name.startswith("WARPGROUP.DEPBAR")]
    return sum(x.kind == "MUFU" for x in loop.instructions[waits[-1] :])


@pytest.mark.parametrize("name", ["broadcast 128", "jagged 128", "jagged 256"])
def test_products_overlap(name):
    """ptxas says C75xx where it has to wait for each product before it issues the next."""
    (kernel,) = compiled(CASES[name], "sm_90", Pass.FORWARD)
    assert serialised(kernel, "sm_90") == []


def test_rows_that_see_up_to_themselves_are_anchored(compile_within_rules):
    first, _ = compile_within_rules("jagged 128, causal, much", "sm_90", "forward")
    assert first.config.leads
    assert not first.config.hands
    assert serialised(first, "sm_90") == []


def test_kernels_of_cut_tiles_compile(monkeypatch):
    monkeypatch.setattr(launch, "_CALLS", {})

    def cut(args):
        merges = args.schedule[1].new_zeros(args.problem.device.processors - 1, 6)
        launch.forward(args._replace(schedule=[*args.schedule[:2], merges]), select(args.problem))

    kernel, merge = compiled(CompileCase(CASES["broadcast 128"].case, run=cut), "sm_90", Pass.FORWARD)
    assert kernel.budget_faults() == []
    assert all(not role.spilled.get("STL") for role in kernel.roles.values())
    assert ".local" not in merge.made.asm["ptx"]
