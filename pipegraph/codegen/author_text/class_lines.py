"""The lines that the modules of a class run, taken together: the class then has the branches of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.graph.captured import Captured, ExecutedLines, LineStep
from pipegraph.graph.nodes import path_of


class ClassLines:
    """The lines of the classes of a captured model.

    Args:
        captured: the model.
        source: the statements of its source.
    """

    def __init__(self, captured: Captured, source: SourceStatements) -> None:
        self._captured = captured
        self._source = source

    @cached_property
    def _steps(self) -> Mapping[type, frozenset[LineStep]]:
        """The steps of all modules of a class, for classes whose modules run different lines."""
        lines = self._captured.lines
        by_class: dict[type, set[frozenset[LineStep]]] = {}
        for fqn, entry in self._captured.modules.items():
            if lines is not None and fqn in lines.modules:
                by_class.setdefault(type(entry.module), set()).add(lines.modules[fqn])
        return {
            module_class: frozenset[LineStep]().union(*steps)
            for module_class, steps in by_class.items()
            if len(steps) > 1
        }

    @cached_property
    def _graph_lines(self) -> Mapping[type, frozenset[int]]:
        """Of these classes, the lines of ``forward`` that led to operations."""
        by_class: dict[type, set[int]] = {module_class: set() for module_class in self._steps}
        for node in self._captured.nodes:
            for _, fqn in path_of(node):
                module_class = type(self._captured.modules[fqn].module)
                if module_class in by_class:
                    by_class[module_class].add(self._source.line_within(fqn, node))
        return {module_class: frozenset(numbers) for module_class, numbers in by_class.items()}

    def differ(self, fqn: str) -> bool:
        """Return whether the modules of the class of a module run different lines."""
        return type(self._captured.modules[fqn].module) in self._steps

    def executed(self, fqn: str) -> ExecutedLines:
        """The lines of the model, with those of the class of a module for the lines of the module."""
        assert self._captured.lines is not None
        steps = self._steps[type(self._captured.modules[fqn].module)]
        return replace(self._captured.lines, modules={**self._captured.lines.modules, fqn: steps})

    def module_lines(self, fqn: str) -> frozenset[tuple[str, int]]:
        """The files and lines that the module itself runs."""
        assert self._captured.lines is not None
        steps = self._captured.lines.modules[fqn]
        return frozenset((step.file, line) for step in steps for line in (step.start, step.end))

    def graph_lines(self, fqn: str) -> frozenset[int]:
        """The lines of the ``forward`` of the class of a module that led to operations."""
        return self._graph_lines[type(self._captured.modules[fqn].module)]
