"""Counts over the source of a package: what a person would not have written."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path

_NUMBERED = re.compile(r"(?P<name>\w*?[A-Za-z_])\d+")
_CONSTANT = re.compile(r"constant(_\d+)?")


@dataclass(frozen=True)
class SourceCounts:
    """What was found in blocks and stages.

    Attributes:
        lines: of source in the whole package.
        numbered: classes ``Name2`` in addition to a class ``Name``.
        operators: uses of ``torch.ops``.
        constants: tensors without a name: ``self.constant`` and so on.
    """

    lines: int
    numbered: int
    operators: int
    constants: int


def count(folder: Path) -> SourceCounts:
    """Count in the source of a package."""
    modules = list(_modules(folder))
    nodes = [node for module in modules for node in ast.walk(module)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    numbered = (_NUMBERED.fullmatch(name) for name in names)
    return SourceCounts(
        lines=sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.glob("*.py")),
        numbered=sum(match is not None and match["name"] in names for match in numbered),
        operators=sum(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops" for node in nodes),
        constants=sum(len(_constants(node)) for node in classes),
    )


def numbers(folder: Path) -> Counter[float]:
    """The numbers that stand in the functions of a package, ``__init__`` left out."""
    functions = [
        node
        for module in _modules(folder)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and node.name != "__init__"
    ]
    constants = [node.value for function in functions for node in ast.walk(function) if isinstance(node, ast.Constant)]
    return Counter(value for value in constants if isinstance(value, (int, float)) and not isinstance(value, bool))


def products(sizes: set[int]) -> set[int]:
    """The sizes, and every product of two or more of them; 0 and 1 say nothing."""
    sizes = sizes - {0, 1}
    chosen = (subset for length in range(1, len(sizes) + 1) for subset in combinations(sorted(sizes), length))
    return {prod(subset) for subset in chosen}


def _modules(folder: Path) -> Iterator[ast.Module]:
    for file in sorted(folder.glob("*.py")):
        if file.stem == "blocks" or file.stem.startswith("stage_"):
            yield ast.parse(file.read_text(encoding="utf-8"))


def _constants(node: ast.ClassDef) -> set[str]:
    attributes = (child for child in ast.walk(node) if isinstance(child, ast.Attribute))
    return {ast.unparse(attribute) for attribute in attributes if _CONSTANT.fullmatch(attribute.attr)}
