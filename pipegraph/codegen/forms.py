"""How plainly each class is written: a class that differs from the captured graph is written again in the next form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

FORMS: Final = ("as the model's source", "without loops", "as a separate class", "with numbers for attributes")
"""The forms of a class, each with what the forms before it do without."""


@dataclass(frozen=True)
class Forms:
    """The form of each class.

    Attributes:
        levels: name of a class of the model, of a stage or of a function → index in `FORMS`; 0 if it is missing.
    """

    levels: Mapping[str, int] = field(default_factory=dict)

    def rolls_loops(self, name: str) -> bool:
        """Return whether repeated statements of a class are written as loops, and a function as a function."""
        return self.levels.get(name, 0) < 1

    def merges(self, name: str) -> bool:
        """Return whether several structures of a class are written as one class with arguments."""
        return self.levels.get(name, 0) < 2

    def reads_attributes(self, name: str) -> bool:
        """Return whether numbers are written as the attributes that the model's source reads."""
        return self.levels.get(name, 0) < 3

    def plainer(self, names: Sequence[str]) -> Iterator[Forms]:
        """Yield plainer forms: one class in the next form, the first of them first; at last all of them in the last."""
        for level in range(1, len(FORMS)):
            for name in names:
                if level > self.levels.get(name, 0):
                    yield Forms({**self.levels, name: level})
        last = {**self.levels, **dict.fromkeys(names, len(FORMS) - 1)}
        if len(names) > 1 and last != self.levels:
            yield Forms(last)

    def described(self) -> dict[str, str]:
        """The classes that are not written as usual → their forms, in words."""
        return {name: FORMS[level] for name, level in sorted(self.levels.items())}


USUAL: Final = Forms()
"""All classes as the model's source has them."""
