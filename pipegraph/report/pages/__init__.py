"""HTML pages that load nothing. Their templates, styles and scripts are in this folder.

Names of a model may hold anything: templates escape them, and JSON in a script cannot end the script.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.report.text import is_number

_FOLDER = Path(__file__).parent


@lru_cache(maxsize=1)
def templates() -> jinja2.Environment:
    """Return the templates of this folder; they escape their values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    environment.tests["number"] = is_number
    return environment


def read_text(*names: str) -> str:
    """Return the text of files of this folder, one after the other."""
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def script_json(data: Any) -> str:
    """Return JSON for a script element: ASCII, and without the signs that end one or begin a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
