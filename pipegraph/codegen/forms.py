"""How plainly each class is written: a class that differs from the captured graph is written again in the next form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

FORMS: Final = (
    "as the author's text",
    "as the author's text, without branches of other modules",
    "as the author's text, with functions that are written from the graph",
    "as the author's text, with no functions in statements from the graph",
    "from the graph",
    "without loops",
    "as a separate class",
    "with numbers for attributes",
)
"""The forms of a class, each with what the forms before it do without."""


@dataclass(frozen=True)
class Forms:
    """The form of each class.

    Attributes:
        levels: name of a class of the model, or of a stage → index in `FORMS`; 0 if it is missing.
        graph_lines: files and lines of statements that are written from the graph inside of an author's text.
        any_author_text: whether classes may have their author's text at all.
    """

    levels: Mapping[str, int] = field(default_factory=dict)
    graph_lines: frozenset[tuple[str, int]] = frozenset()
    any_author_text: bool = True

    def has_author_text(self, name: str) -> bool:
        """Return whether a class that one stage has whole is written as its author wrote it, if that is possible."""
        return self.any_author_text and self.levels.get(name, 0) < 4

    def joins_branches(self, name: str) -> bool:
        """Return whether an author's text has the branches that any module of its class runs."""
        return self.levels.get(name, 0) < 1

    def calls_functions(self, name: str) -> bool:
        """Return whether statements from the graph in an author's text call functions."""
        return self.levels.get(name, 0) < 3

    def has_text_of_functions(self, name: str) -> bool:
        """Return whether these functions are the author's."""
        return self.levels.get(name, 0) < 2

    def rolls_loops(self, name: str) -> bool:
        """Return whether repeated statements of a class are written as loops."""
        return self.levels.get(name, 0) < 5

    def merges(self, name: str) -> bool:
        """Return whether several structures of a class are written as one class with arguments."""
        return self.levels.get(name, 0) < 6

    def reads_attributes(self, name: str) -> bool:
        """Return whether numbers are written as the attributes that the model's source reads."""
        return self.levels.get(name, 0) < 7

    def plainer(
        self, names: Sequence[str], general: AbstractSet[str], with_functions: AbstractSet[str]
    ) -> Iterator[Forms]:
        """Yield plainer forms: for each form, one class in it, the first class first, then all of them.

        At last no class has its author's text.

        Args:
            names: the classes.
            general: those that have branches of other modules.
            with_functions: those whose statements from the graph call functions.
        """
        classes: dict[int, AbstractSet[str]] = {1: general, 2: with_functions, 3: with_functions}
        for level in range(1, len(FORMS)):
            plainer_names = [
                name for name in names if level > self.levels.get(name, 0) and name in classes.get(level, names)
            ]
            for name in plainer_names:
                yield replace(self, levels={**self.levels, name: level})
            if len(plainer_names) > 1:
                yield replace(self, levels={**self.levels, **dict.fromkeys(plainer_names, level)})
        if self.any_author_text:
            yield replace(self, any_author_text=False)

    def described(self) -> dict[str, str]:
        """The classes that are written more plainly than usual from the graph → their forms, in words."""
        return {name: FORMS[level] for name, level in sorted(self.levels.items()) if level > 4}


USUAL: Final = Forms()
"""All classes as the model's source has them."""
