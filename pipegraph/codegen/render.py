"""Render the source files of a package through the templates."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.codegen.classes.class_source import ClassSource
from pipegraph.codegen.syntax.line_breaks import wrap

_DOCSTRING_WIDTH = 112
# A name and its shape stay on one line, and so do an arrow and what follows: their spaces are no-break spaces while a
# docstring is filled.
_SIZES = re.compile(r"(?:\w+ )?\w+\[[\d, ]*\]")
_JOINED = "\u00a0"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python, not HTML; every name is escaped where it enters
    )


def templates_folder() -> Path:
    """``codegen_templates``: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "codegen_templates"
    return inside if inside.is_dir() else package.parent / "codegen_templates"


def render_stage(source: ClassSource, blocks: Sequence[ClassSource], header: str, libraries: Mapping[str, str]) -> str:
    """``stage_0.py``."""
    text = "\n".join(class_lines(source))
    used = sorted((block.name for block in blocks if source.mentions(block.name)), key=_import_order)
    imports = _imports(text, libraries)
    return _render("stage.py.jinja", header=_docstring(header, 0), lines=text, imports=imports, blocks=_wrapped(used))


def render_blocks(blocks: Sequence[ClassSource], header: str, libraries: Mapping[str, str]) -> str:
    """``blocks.py``."""
    texts = ["\n".join(class_lines(block)) for block in blocks]
    imports = _imports("\n".join(texts), libraries) if texts else []
    return _render("blocks.py.jinja", header=_docstring(header, 0), classes=texts, imports=imports)


def render_init(stages: Sequence[ClassSource], header: str) -> str:
    """``__init__.py``."""
    return _render("init.py.jinja", header=_docstring(header, 0), stages=[stage.name for stage in stages])


def render_weights(header: str) -> str:
    """``weights.py``."""
    return _render("weights.py.jinja", header=_docstring(header, 0))


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def class_lines(source: ClassSource) -> list[str]:
    """A class as lines; ``forward``'s blocks are indented and long lines broken."""
    lines = [f"class {source.name}({source.base}):", *(_indented(_docstring(source.docstring, 4), 4)), ""]
    made = wrap(f"def __init__({', '.join(('self', *source.arguments))}):", 4)
    if source.children:
        return [*lines, *made, *wrap(f"super().__init__({', '.join(source.children)})", 8)]
    if source.assignments:
        lines += [*made, "        super().__init__()"]
        lines += [line for text in source.assignments for line in wrap(text, 8)]
        lines += [""]
    lines += wrap(f"def forward({', '.join(('self', *source.parameters))}):", 4)
    open_regions: tuple[str, ...] = ()
    for regions, text in source.body:
        shared = 0
        while shared < min(len(regions), len(open_regions)) and regions[shared] == open_regions[shared]:
            shared += 1
        for depth in range(shared, len(regions)):
            lines += wrap(regions[depth], 8 + 4 * depth)
        open_regions = regions
        inner = len(text) - len(text.lstrip())
        lines += wrap(text.lstrip(), 8 + 4 * len(regions) + inner)
    return lines


def _docstring(text: str, indent: int) -> list[str]:
    """A docstring as lines without indentation, broken where it is too long."""
    if len(text) + indent + 6 <= _DOCSTRING_WIDTH + 8:
        return [f'"""{text}"""']
    joined = _SIZES.sub(lambda found: found[0].replace(" ", _JOINED), text)
    head, *parts = joined.replace("→ ", f"→{_JOINED}").split("  ")
    lines = textwrap.wrap(head, _DOCSTRING_WIDTH - indent - 3, break_long_words=False, break_on_hyphens=False)
    body = [
        line
        for part in parts
        for line in textwrap.wrap(part, _DOCSTRING_WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    ]
    filled = [f'"""{lines[0]}', *lines[1:], *([""] if body else []), *body, '"""']
    return [line.replace(_JOINED, " ") for line in filled]


def _indented(lines: Sequence[str], indent: int) -> list[str]:
    return [f"{' ' * indent}{line}" if line else "" for line in lines]


def _imports(text: str, libraries: Mapping[str, str]) -> list[str]:
    """The imports that a file needs, in isort's order."""
    code = re.sub(r'"""(?:.|\n)*?"""', "", text)
    found = {"torch": "import torch"} if re.search(r"\btorch\.", code) else {}
    if re.search(r"\bF\.", code):
        found["torch.nn.functional"] = "import torch.nn.functional as F"
    for namespace, module in libraries.items():
        if f"torch.ops.{namespace}." in code:
            found[module] = f"import {module}  # noqa: F401 (defines torch.ops.{namespace})"
    return [*(found[module] for module in sorted(found)), "from torch import nn"]


def _import_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """isort's order of imported names: CONSTANTS, Classes, and numbers by their value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _wrapped(names: Sequence[str]) -> list[str]:
    return (
        wrap(f"from .blocks import {', '.join(names)}", 0)
        if names and len(", ".join(names)) < 90
        else (["from .blocks import (", *(f"    {name}," for name in names), ")"] if names else [])
    )
