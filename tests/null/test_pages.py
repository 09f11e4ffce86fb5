"""What the pages name exists: files and headings that they link to, commands and options, environment variables."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.name != "CHANGELOG.md"  # tells of what is no more
]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
NOT_OURS = ("pytest", "pip", "venv")


def anchors_of(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def code_of(page):
    """What stands in backticks, and the lines of blocks."""
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [line for block in blocks for line in block.splitlines()] + [re.sub(r"\s+", " ", code) for code in inline]


def source_of(module):
    """The text of a module, or of all of a package's."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    files = Path(spec.origin).parent.glob("*.py") if spec.submodule_search_locations else [Path(spec.origin)]
    return "".join(file.read_text() for file in files)


@pages
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            file = (page.parent / name) if name else page
            assert file.exists(), link
            assert not anchor or anchor in anchors_of(file), link


@pages
def test_commands_are_there(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for code in code_of(page):
        for target in re.findall(r"^(?:\w+=\S* )?make ([a-z-]+)", code):
            assert target in targets, code
        for module, script, options in re.findall(r"\bpython3? (?:-m ([\w.]+)|([\w./-]+\.py))([^#|]*)", code):
            if module not in NOT_OURS:
                source = source_of(module) if module else (ROOT / script).read_text()
                for option in re.findall(r"(?<!\S)--[a-z][\w-]*", options):
                    assert f'"{option}"' in source, code


@pages
def test_paths_are_there(page):
    for code in code_of(page):
        for path in re.findall(r"(?<![\w/.-])((?:tests|benchmarks|jaggedtensor|docs|examples)/[\w./*-]*[\w*])", code):
            assert any(ROOT.glob(path)), code


def test_environment_variables_are_explained():
    read = set(re.findall(r"JAGGEDTENSOR_\w+", (ROOT / "jaggedtensor" / "env.py").read_text()))
    assert read == {"JAGGEDTENSOR_BACKEND", "JAGGEDTENSOR_CACHE", "JAGGEDTENSOR_DOCTOR"}
    assert read <= set(re.findall(r"JAGGEDTENSOR_\w+", (ROOT / "README.md").read_text()))
