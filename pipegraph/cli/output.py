"""Results on stdout as JSON."""

from __future__ import annotations

import json
from typing import Any

SCHEMA_VERSION = 1


def print_json(result: dict[str, Any]) -> None:
    """Print one object with its ``schema_version`` first."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **result}, indent=1, ensure_ascii=False), flush=True)
