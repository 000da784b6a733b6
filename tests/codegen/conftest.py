"""What tests of generated source share."""

from __future__ import annotations

import pytest

from pipegraph.codegen.forms import Forms


@pytest.fixture
def from_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every class from the graph: tests of how statements are written have models whose own text would do."""
    monkeypatch.setattr(Forms, "has_author_text", lambda forms, name: False)
