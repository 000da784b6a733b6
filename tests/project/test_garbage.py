"""Python looks for garbage as before once nobody asked for less."""

from __future__ import annotations

import gc

from pipegraph.garbage import rare_collection


def test_two_users_that_overlap_leave_the_thresholds_as_they_were() -> None:
    thresholds = gc.get_threshold()
    first, second = rare_collection(), rare_collection()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold()[0] > thresholds[0]
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] > thresholds[0]
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
