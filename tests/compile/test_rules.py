"""What reads machine code, and what holds kernels to the rules, notice what they are there for."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaggedtensor.kernels.toolchain import GLUON_NEEDS, triton_version

if sys.platform != "linux" or triton_version() < GLUON_NEEDS:
    pytest.skip("needs a Triton with Gluon", allow_module_level=True)

from jaggedtensor.testing import compile_rules
from jaggedtensor.testing.compile_cases import CASES
from jaggedtensor.testing.compile_rules import Counterpart, Reason, look_at
from jaggedtensor.testing.compiled import GPU_OF, Pass, compile_gluon, gluon_launches, role_of
from jaggedtensor.testing.machine_code import Code, Instruction, hot_loops


def code_of(text):
    """A line each: an instruction with its operands, or a label with a colon."""
    instructions, labels = [], {}
    for line in text.split("\n"):
        name, _, operands = line.strip().partition(" ")
        if name.endswith(":"):
            labels[name[:-1]] = len(instructions)
        elif name:
            instructions += [Instruction(name, operands.partition(" x ")[0], [])] * int(
                operands.partition(" x ")[2] or 1
            )
    return Code(instructions, labels)


def loop(work, filling=14):
    return f"L_x_1:\n{work}\nIADD R1 x {filling}\nBRA `(.L_x_1)\n"


def test_only_innermost_loops_that_work_are_hot():
    code = code_of(
        """USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        L_x_0:
        L_x_1:
        MUFU.EX2 R1 x 64
        BRA `(.L_x_1)
        USETMAXREG.TRY_ALLOC.CTAPOOL UP1, 0xc0 ;
        L_x_2:
        UTMALDG.5D R2
        FMUL R1 x 20
        BRA `(.L_x_2)
        L_x_3:
        FMUL R1 x 20
        BRA `(.L_x_3)
        BRA `(.L_x_0)
        L_x_4:
        SYNCS R1
        BRA `(.L_x_4)"""
    )
    loops = hot_loops(code)
    assert [(len(found), found.registers) for found in loops] == [(65, 24), (22, 192)]
    assert [role_of("", [found]).kind for found in loops] == ["softmax", "load"]


def test_the_rolled_inner_dimension_of_a_product_is_part_of_the_loop_around_it():
    code = code_of("L_x_0:\nSYNCS R1 x 40\n" + loop("UTCHMMA R1 x 2") + "SYNCS R1 x 40\nBRA `(.L_x_0)")
    (found,) = hot_loops(code)
    assert len(found) == len(code.instructions)


def kernel_of(text, family="some/family"):
    roles = {"softmax_role": role_of("softmax_role", hot_loops(code_of(text)))}
    return SimpleNamespace(family=family, config=SimpleNamespace(block_d=64, block_dv=64, block_n=128), roles=roles)


def faults_of(kernel, slots=None):
    counterpart = {} if slots is None else {"softmax": Counterpart(slots, 192, 0, 64, {})}
    (row,) = look_at(kernel, "sm_100", Pass.FORWARD, {"sm_100 forward 64": counterpart})
    return row.faults, row.reason


def test_spills_and_a_role_above_its_counterpart_are_faults_without_a_reason(monkeypatch):
    good, bad = kernel_of(loop("MUFU R1 x 64")), kernel_of(loop("MUFU R1 x 64\nLDL R1\nSTL R1 x 2"))
    assert len(good.roles["softmax_role"].loops[0]) == 79
    assert faults_of(good) == faults_of(good, 79) == ([], "")
    assert faults_of(good, 78) == (["1.01 times the counterpart's instructions"], "")
    assert faults_of(bad) == (["1 LDL in a loop", "2 STL in a loop"], "")

    key = ("some/family", "softmax_role")
    monkeypatch.setitem(compile_rules.REASONS, key, Reason("why", most=1.2, loads=1, stores=2))
    assert faults_of(bad) == ([], "why")
    assert faults_of(good, 70) == ([], "why")
    assert faults_of(good, 60) == (["1.32 times the counterpart's instructions"], "")  # reasons are limits
    monkeypatch.setitem(compile_rules.REASONS, key, Reason("why", loads=1, stores=1))
    assert faults_of(bad)[0] == ["2 STL in a loop"]


def test_the_counterpart_is_taken_for_as_much_work():
    """Of blocks of 64 keys for 128."""
    kernel = kernel_of(loop("MUFU R1 x 64"))
    kernel.config.block_n = 64
    assert faults_of(kernel, 158) == ([], "")
    assert faults_of(kernel, 156)[0] == ["1.01 times the counterpart's instructions"]


def test_more_registers_than_there_are_show():
    """The compiler would say nothing: it drops every request."""
    device = GPU_OF["sm_100"]
    (launch,) = gluon_launches(CASES["broadcast 64"], device, Pass.BACKWARD)
    greedy = [
        replace(x, compute_registers=208, k_stages=3, v_stages=3) if hasattr(x, "compute_registers") else x
        for x in launch.args
    ]
    (fault,) = compile_gluon(replace(launch, args=tuple(greedy)), device).budget_faults()
    assert fault.startswith("registers [88, 120, 208] were asked for, and ")
