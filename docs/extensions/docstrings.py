"""Docstrings as the source has them: what is indented below a blank line is code, or a drawing, and needs no `::`."""

from __future__ import annotations

from sphinx.application import Sphinx


def mark_code(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Write `::` in front of every indented block that follows a blank line and an indented line does not precede."""
    marked: list[str] = []
    for number, line in enumerate(lines):
        before = next((each for each in reversed(lines[:number]) if each), "")
        begins = line.startswith("    ") and number > 0 and not lines[number - 1]
        if begins and not before.startswith((" ", ":", "..", "*", "-")):
            marked += ["::", ""]
        marked.append(line)
    lines[:] = marked


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
