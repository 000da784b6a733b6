"""docs/architecture.md says what the source says."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.project.private_interfaces import ROOT, SOURCE, table, uses_outside_torch_private

PAGE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"\| interface of torch .*\n(\|.*\n?)+")
NOT_FOLDERS = {"__pycache__", "codegen_templates"}


def test_private_interfaces_stand_in_torch_private_alone() -> None:
    assert uses_outside_torch_private() == []


def test_the_page_lists_every_private_interface(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("renew_golden"):
        PAGE.write_text(TABLE.sub(lambda _: table() + "\n", PAGE.read_text()))
    match = TABLE.search(PAGE.read_text())
    assert match is not None
    assert match[0].strip() == table()


def test_every_folder_has_a_paragraph() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir()} - NOT_FOLDERS
    assert folders == set(re.findall(r"^\*\*`(\w+)/`\*\*", PAGE.read_text(), re.MULTILINE))


def test_every_file_that_is_named_is_there() -> None:
    missing = [name for name in _named_files() if not _is_there(name)]
    assert missing == []


def test_the_recipe_of_a_device_names_every_file_that_knows_one() -> None:
    """A device has its own streams, events, counters or backend in the files that use these."""
    knows = re.compile(r"torch\.cuda\.|\"cuda\"|'cuda'")
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if knows.search(_code(path))}
    text = PAGE.read_text()
    recipe = text[text.index("### Add a device type") : text.index("### Support a new torch")]
    named = set(re.findall(r"`(?:pipegraph/)?([\w/]+\.py)`", recipe))
    assert {file for file in files if not any(file == name or file.endswith("/" + name) for name in named)} == set()


def test_a_class_name_stands_once() -> None:
    nodes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def _named_files() -> list[str]:
    return sorted(set(re.findall(r"`([\w/]+\.(?:py|json|md|toml|txt))`", PAGE.read_text())) - {"NAME.py", "NAME.json"})


def _is_there(name: str) -> bool:
    """Names are from the root of the checkout, of pipegraph, or of the folder that the paragraph is about."""
    if "NAME" in name or (ROOT / name).is_file() or (SOURCE / name).is_file():
        return True
    return any(path.match(name) for path in [*SOURCE.rglob("*"), *(ROOT / "tests").rglob("*")])


def _code(path: Path) -> str:
    """A file without its docstrings and comments."""
    return re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text())
