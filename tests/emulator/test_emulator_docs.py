"""The worked example of docs/emulator.md: its race is found in every run, with the words that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton.experimental.gluon")
pytest.importorskip("greenlet")

from jaggedtensor.kernels.emulator import ORDERS
from jaggedtensor.kernels.emulator.errors import Race
from jaggedtensor.testing.mutants import load_module

PAGE = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text()


def example(folder: Path, mended: bool) -> ModuleType:
    """The page's kernel, as it stands or mended as the page says."""
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    change = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    assert block
    assert change
    text = block[1]
    if mended:
        lines = [line[1:] + "\n" for line in change[1].splitlines()]
        before = "".join(line for line, old in zip(lines, change[1].splitlines(), strict=True) if old[0] != "+")
        assert text.count(before) == 1
        text = text.replace(before, "".join(lines))
    path = folder / "scale.py"
    path.write_text(text)
    return load_module(str(path))


def test_the_race_is_found_in_every_run_in_the_words_of_the_page(tmp_path: Path) -> None:
    module = example(tmp_path, mended=False)
    for order in ORDERS:
        for seed in range(2):
            with pytest.raises(Race) as error:
                module.run(order, seed)
            if order == "round_robin":
                said = str(error.value.report.findings[0]).replace(f"{tmp_path}/", "")
                assert said in PAGE


def test_the_mended_kernel_passes_and_its_timeline_is_the_one_on_the_page(tmp_path: Path) -> None:
    module = example(tmp_path, mended=True)
    for order in ORDERS:
        for seed in range(5):
            report = module.run(order, seed)
            if order == "round_robin":
                rows = [line.rstrip() for line in report.timeline(26).splitlines()]
                shown = re.search(r"```\n(scale_kernel  .*?)```", PAGE, re.DOTALL)
                assert shown
                assert [row for row in rows if not row.startswith("init")][: shown[1].count("\n")] == shown[
                    1
                ].splitlines()
