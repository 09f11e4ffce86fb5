"""What benchmarks/sanitize.py overlooks among the reports of racecheck is ordered by a barrier, in the machine code."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux", allow_module_level=True)

from jaggedtensor.testing.compile_cases import CASES
from jaggedtensor.testing.compiled import Pass, compiled

TOOL = Path(__file__).parents[2] / "benchmarks" / "sanitize.py"
SHARED = {"LD", "LDS", "LDSM", "ST", "STS", "STSM", "ATOM", "ATOMS", "SYNCS"}  # what may touch shared memory


@pytest.fixture(scope="module")
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def is_barrier(instruction):
    """The named barrier that all warps of a CTA pass."""
    return instruction.kind == "BAR" and instruction.operands.split() == ["0x1", ";"]


@pytest.mark.parametrize(
    ("name", "which"),
    [("broadcast 128", "forward"), ("jagged 64", "forward"), ("broadcast 128", "backward"), ("jagged 128", "backward")],
)
def test_roles_are_told_what_to_do_between_barriers(name, which, sanitize):
    """Two messages, each right before a barrier, of a byte for each warp of a worker: up to 16 bytes need two stores.
    They are read right behind a barrier, and twice more all pass one before the next is written: when roles begin, and
    when they have ended."""
    (kernel,) = compiled(CASES[name], "sm_90", Pass(which))
    code = kernel.code.instructions
    mine = [
        i
        for i, x in enumerate(code)
        if len(x.frames) == 1 and sanitize.is_first_line(kernel.name, *map(str, x.frames[0]))
    ]
    touching = [i for i in mine if code[i].kind in SHARED]
    written = [i for i in touching if code[i].kind == "STS"]
    read = [i for i in touching if code[i].kind == "LDS"]
    half = len(written) // 2
    messages = written[:half], written[half:]
    assert half in {1, 2}
    assert all(stores == [*range(stores[0], stores[0] + half)] for stores in messages)
    assert sorted(written + read) == touching  # and nothing else would be overlooked
    assert [code[i].name for i in read] == ["LDS.U8"]
    assert all(is_barrier(code[stores[-1] + 1]) for stores in messages)
    assert is_barrier(next(code[i] for i in range(read[0] - 1, 0, -1) if code[i].kind in {*SHARED, "BAR"}))
    between = [i for i in range(messages[0][-1], messages[1][0]) if is_barrier(code[i])]
    assert len(between) == 3
    first, second = ([re.search(r"\+0x([0-9a-f]+)\]", code[i].operands)[1] for i in stores] for stores in messages)
    assert first == second
    assert max(i for i in range(len(code)) if is_barrier(code[i])) > read[0]


@pytest.mark.parametrize("name", ["jagged 128", "jagged 128, waves", "jagged 128, causal, groups of 4"])
def test_only_roles_of_several_warps_store_and_all_of_these_meet_before_they_arrive(name):
    """What racecheck cannot see: that the lanes of one warp meet before one of them arrives at an mbarrier."""
    for kernel in compiled(CASES[name], "sm_90", Pass.BACKWARD):
        steps = re.findall(
            r"^\s*(?:@%p\d+ )?(st\.shared|stmatrix|bar\.warp\.sync|bar(?:rier)?\.sync|mbarrier\.arrive)",
            kernel.made.asm["ptx"],
            re.M,
        )
        before_arrivals = [x for x, y in itertools.pairwise(steps) if y == "mbarrier.arrive"]
        assert len(before_arrivals) > 10
        assert not {"st.shared", "stmatrix"} & set(before_arrivals)
        assert ("st.shared", "bar.warp.sync", "mbarrier.arrive") not in zip(steps, steps[1:], steps[2:], strict=False)


def test_reports_of_other_lines_count(sanitize):
    (kernel,) = compiled(CASES["jagged 64"], "sm_90", Pass.FORWARD)
    lines = [x.frames[-1] for x in kernel.code.instructions if x.frames]
    file = Path(lines[0][0])
    first = next(i for i, line in enumerate(file.read_text().splitlines(), 1) if line.startswith("def forward_kernel("))

    def report(*lines):
        one, *others = (f"access at forward_kernel+0x10 in {file}:{line}" for line in lines)
        return f"Error: Race reported between Write {one}" + "".join(f" and Read {x} [3 hazards]" for x in others)

    assert sanitize.of_the_compiler(report(first, first))
    assert sanitize.of_the_compiler(report(first, first).replace(str(file.parent) + "/", ""))
    assert not sanitize.of_the_compiler(report(first, first + 1))
    assert not sanitize.of_the_compiler(report(first - 100, first))
    assert not sanitize.of_the_compiler(report(first))
    assert not sanitize.of_the_compiler(report(first, first, first - 100))


def test_a_fault_that_a_tool_must_find_is_an_error_where_it_does_not(sanitize):
    def fine(tool, name, verdict="0.1 s: right", *reports):
        return sanitize.Finding(name, verdict, list(reports)).is_fine(tool)

    race = "Error: Race reported between Write access at kernel+0x10 in nowhere.py:3 and Read access"
    assert fine("racecheck", "hopper, 20 rows for all")
    assert not fine("racecheck", "hopper, 20 rows for all", "0.1 s: right", race)
    assert not fine("racecheck", "hopper, 20 rows for all", "0.1 s: AssertionError: out")
    assert not fine("racecheck", "hopper, 20 rows for all", "did not finish")
    assert fine("racecheck", "careless", "0.1 s: right", race)
    assert not fine("racecheck", "careless")
    assert "its fault is not found" in sanitize.Finding("careless", "0.1 s: right").line("racecheck")
    assert fine("racecheck", "hasty")
    assert fine("racecheck", "hasty", "0.1 s: right", race)
    assert not fine("consan", "hasty")
    assert fine("consan", "hasty", "0.1 s: AcceleratorError: device-side assert")
    assert fine("racecheck", "channel", "0.1 s: right", race)
    assert not fine("racecheck", "channel", "0.1 s: AssertionError: out")
    assert not fine("consan", "channel", "0.1 s: AcceleratorError: device-side assert")
    assert set(sanitize.WRONG) == {name for tool in sanitize.FAULTS.values() for name in tool}
