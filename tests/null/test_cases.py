"""docs/cases.md and the tests say the same of which test covers which case."""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()
CASE = re.compile(r"\b(?:EMP|TAIL|SLK|OVF|DIM|STR|NUM|MSK|GQA|ISO|DET|TUN|CMP|CUG|DEV|AUT)-\d\d\b")


def told():
    """Case -> the tests of its row."""
    rows = re.findall(r"^\| ([A-Z]+-\d\d) \| .* \| (.*) \|$", PAGE, re.M)
    files = {case: re.findall(r"([a-z]+/\w+): ([\w, ]+)", tests) for case, tests in rows}
    return {case: {(f, name) for f, names in of for name in names.split(", ")} for case, of in files.items()}


def named():
    """Case -> the tests that name it anywhere between their decorators and their end."""
    found = defaultdict(set)
    for path in set(TESTS.rglob("test_*.py")) - {Path(__file__)}:
        lines = path.read_text().splitlines()
        for test in ast.parse("\n".join(lines)).body:
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                begin = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
                place = (f"{path.parent.name}/{path.stem}", test.name.removeprefix("test_"))
                for case in CASE.findall("\n".join(lines[begin - 1 : test.end_lineno])):
                    found[case].add(place)
    return dict(found)


def test_the_page_names_each_test_that_names_a_case():
    page, tests = told(), named()
    assert page.keys() == tests.keys()
    for case, places in tests.items():
        assert page[case] == places, case


def test_each_case_of_a_kernel_has_a_test_that_runs_kernels():
    for case, places in told().items():
        folders = {place.split("/")[0] for place, _ in places}
        assert folders & {"gpu", "interpret"} or case in ("EMP-10", "EMP-11", "TUN-04"), case
