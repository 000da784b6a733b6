"""How fast a training loop is."""

from __future__ import annotations

import time

from pipegraph.units import format_count, format_duration


class Pace:
    """Counts the steps of a loop and their tokens, with all that is between them: data, optimizer, checkpoints.

    The first step, which compiles, is left out of the figures.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._tokens = 0.0
        self._began = 0.0

    def step_done(self, tokens: float = 0.0) -> None:
        """A step on so many tokens is done."""
        if self.steps == 0:
            self._began = time.monotonic()
        else:
            self._tokens += tokens
        self.steps += 1

    @property
    def tokens_per_second(self) -> float | None:
        """None if no tokens were counted yet."""
        return self._tokens / (time.monotonic() - self._began) if self._tokens else None

    def seconds_left(self, steps: int) -> float | None:
        """How long so many more steps will take; None if that is not known yet."""
        if self.steps < 2:
            return None
        return (time.monotonic() - self._began) / (self.steps - 1) * steps

    def text(self, steps: int | None) -> str:
        """The figures with so many steps to come, if that is known; empty if there are none yet."""
        rate, remaining_seconds = self.tokens_per_second, None if steps is None else self.seconds_left(steps)
        parts = [f"{format_count(rate)} tokens/s"] if rate is not None else []
        parts += [f"{format_duration(remaining_seconds)} left"] if remaining_seconds is not None else []
        return ", ".join(parts)
