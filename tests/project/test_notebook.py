"""The notebook in examples/ runs, cell by cell, and holds what its cells show now.

``pytest tests/project/test_notebook.py --renew-golden`` writes that into the file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
from pathlib import Path
from typing import Any

import pytest

from tests.torch_version import is_tested_version

FILE = Path(__file__).parents[2] / "examples" / "walkthrough.ipynb"
FORMS = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _bundle(value: object) -> dict[str, list[str]]:
    """What Jupyter shows of the value of a cell: a picture or a table if it has one, else its repr."""
    for form, method in FORMS.items():
        rendering = getattr(value, method, lambda: None)()
        if rendering is not None:
            return {form: _lines(rendering)}
    return {"text/plain": _lines(repr(value))}


def _run(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as Jupyter does, and return its outputs."""
    file = f"<cell {number}>"
    linecache.cache[file] = len(source), None, _lines(source), file  # as IPython does: capture reads the source
    body, printed, outputs = ast.parse(source).body, io.StringIO(), []
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), file, "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), file, "eval"), names)
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        result = {"data": _bundle(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        outputs.append(result)
    return outputs


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(FILE.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    wrong = []
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        outputs = _run("".join(cell["source"]), number, names)
        wrong += [number] if outputs != cell["outputs"] else []
        cell |= {"outputs": outputs, "execution_count": number}
    forms = {form for cell in cells for output in cell["outputs"] for form in output.get("data", ())}
    assert forms == {*FORMS, "text/plain"}
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert str(tmp_path) not in text and len(text) < 200_000
    if request.config.getoption("renew_golden"):
        FILE.write_text(text, encoding="utf-8")
    elif is_tested_version():
        assert wrong == [], "these cells show something else now: see --renew-golden"
