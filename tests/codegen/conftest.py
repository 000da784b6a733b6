"""``--renew-golden`` writes what ``test_golden.py`` compares with."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write tests/codegen/golden anew, then compare")
