"""What the tests ask of an error or a warning: what it names and what it advises, in whatever sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest

from pipegraph.errors import PipegraphError

Error = TypeVar("Error", bound=PipegraphError)


@contextmanager
def refused(kind: type[Error], *parts: str, advice: str = "") -> Iterator[pytest.ExceptionInfo[Error]]:
    """What happens within raises an error of exactly this class. Its problem names each of ``parts``: the place and
    the values, such as arguments, modules, ranks and files; its advice names ``advice``, if that is given."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, repr(error)
    assert not missing(error.problem, *parts), error.problem
    assert advice in error.advice, error.advice


def missing(text: str, *parts: str) -> list[str]:
    """Those of ``parts`` that a text does not name, such as that of an error of another process."""
    return [part for part in parts if part not in text]


def warned(*parts: str) -> AbstractContextManager[pytest.WarningsRecorder]:
    """What happens within gives a UserWarning that names each of ``parts``."""
    return pytest.warns(UserWarning, match="(?s)" + "".join(f"(?=.*{re.escape(part)})" for part in parts))
