"""Private names of torch and Python in the source of pipegraph, found by reading it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "pipegraph"
PRIVATE = SOURCE / "torch_private"


def uses_outside_torch_private() -> list[str]:
    """``file:line name`` of each private name that is used outside of ``torch_private``."""
    defined_names = _defined_names()
    return [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != PRIVATE
        for line, name in _private_names(ast.parse(path.read_text()), defined_names)
    ]


def table() -> str:
    """A Markdown table of the functions of every file of ``torch_private`` and the private names that each uses."""
    defined_names = _defined_names()
    rows = ["| interface of torch | used by | 2.11 | 2.13 | 2.15 |", "|---|---|---|---|---|"]
    for path in sorted(PRIVATE.glob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if _is_private_import(f"{node.module}.{alias.name}")
        }
        users: dict[str, list[str]] = defaultdict(list)
        for node in tree.body:
            name = _name(node)
            if not name:
                continue
            read = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            interfaces = {private_name for _, private_name in _private_names(node, defined_names)} | {
                imported[local_name] for local_name in read & set(imported)
            }
            for private_interface in interfaces:
                users[private_interface].append(name)
        for unused_interface in set(imported.values()) - set(users):
            users[unused_interface].append("names of its own")
        place = path.stem
        for interface, names in sorted(users.items(), key=lambda item: item[0].lstrip("….")):
            who = ", ".join(f"`{name}`" if name.isidentifier() else name for name in names)
            rows.append(f"| `{interface}` | `{place}`: {who} | ✓ | ✓ | ✓ |")
    return "\n".join(rows)


def _name(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return ", ".join(child.id for child in ast.walk(target) if isinstance(child, ast.Name))
    return ""


def _defined_names() -> set[str]:
    """Names that pipegraph itself defines: its own private ones are no interface of others."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def _private_names(tree: ast.AST, defined_names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private import and attribute. Names of operators, and of namedtuples, are public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if _is_private_import(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in defined_names:
            name = _dotted(node)
            if not name.startswith(("torch.ops.", "aten.")) and node.attr not in ("_exit", "_replace", "_fields"):
                yield node.lineno, name


def _is_private_import(name: str) -> bool:
    return name.startswith("torch.") and any(map(_is_private, name.split(".")))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name) and node.id in ("torch", "dist", "aten"):
        return {"dist": "torch.distributed"}.get(node.id, node.id)
    return "…"
