"""A generated class, ready for a template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClassSource:
    """The parts of a class, ready for a template.

    ``body`` holds the statements of ``forward``, each with the ``with`` headers it stands under; ``children`` the
    constructors that a subclass of ``nn.Sequential`` hands to its base. ``arguments`` are those of ``__init__``,
    ``model_class`` is the model's own class and ``numbers`` what a module of it holds under the names of the model.
    """

    name: str
    docstring: str
    assignments: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    body: tuple[tuple[tuple[str, ...], str], ...] = ()
    base: str = "nn.Module"
    children: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    model_class: str = ""
    numbers: Mapping[str, str] = field(default_factory=dict)

    def mentions(self, name: str) -> bool:
        """Whether it makes an object of the class ``name``."""
        return any(re.search(rf"(?<![\w.]){name}\(", text) for text in (*self.assignments, *self.children))
