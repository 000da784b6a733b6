"""An error has a problem and an advice, also after it crossed to another process as text."""

from __future__ import annotations

import pickle

from pipegraph.errors import BatchError, PipegraphError, ScheduleError


def test_the_two_parts_are_the_text() -> None:
    error = PipegraphError("The file is missing.", "another folder.")
    assert (error.problem, error.advice) == ("The file is missing.", "another folder.")
    assert str(error) == "The file is missing.\nTry: another folder."
    assert (PipegraphError("Broken.").advice, str(PipegraphError("Broken."))) == ("", "Broken.")


def test_a_text_is_taken_apart() -> None:
    for error in (PipegraphError("a\nb", "c"), ScheduleError("a\nb", "c", {0: 1}), BatchError("a\nb", "c")):
        for copy in (type(error)(str(error)), pickle.loads(pickle.dumps(error))):
            assert (type(copy), copy.problem, copy.advice) == (type(error), "a\nb", "c")
