"""Commands begin with a capture and prices."""

from tests.equal_work import shared_work

__all__ = ["shared_work"]
