"""The source of a class."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from torch import nn

from pipegraph.graph.model_structure import class_text


class Outer:
    class Inner:
        a = 1

    if __name__:

        class Conditional:
            b = 2


def local() -> type:
    @dataclass
    class Local:
        a: int

    return Local


@pytest.mark.parametrize("cls", [Outer, Outer.Inner, Outer.Conditional, local(), nn.Linear, nn.MultiheadAttention])
def test_it_is_what_inspect_finds(cls: type) -> None:
    lines, first = inspect.getsourcelines(cls)
    source = class_text(cls)
    assert source is not None
    assert (source.file, source.line) == (Path(inspect.getsourcefile(cls) or ""), first)
    assert source.text.rstrip() == "".join(lines).rstrip()


@pytest.mark.parametrize("cls", [type("Made", (), {}), int, Enum("Called", "A B")])
def test_a_class_that_a_call_made_has_no_source(cls: type) -> None:
    assert class_text(cls) is None
