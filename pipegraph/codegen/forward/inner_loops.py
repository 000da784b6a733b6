"""Roll what a loop inside a loop of the model's source has unrolled: ``for e in range(8): y = y + experts[e](x)``.

The iterations of the outer loop are one already. Those of an inner one are statements of its body that differ in
numbers that grow. The loop that stands for them runs exactly these statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.names.source_loops import SourceLoop
from pipegraph.codegen.syntax.expressions import Expression, Name, Slice, call, literal
from pipegraph.codegen.syntax.loop_index import (
    StructureMismatch,
    at_iteration,
    in_all_iterations,
    progressions,
    with_variable,
)
from pipegraph.codegen.syntax.statements import For, Statement

# As for the outer loops.
_ITERATIONS = 3


class _Run(NamedTuple):
    """Iterations in a row: the statements of all of them, and how many there are."""

    statements: tuple[Statement, ...]
    iterations: int

    @property
    def length(self) -> int:
        return len(self.statements) * self.iterations


def with_inner_loops(
    loop: For, inner: Sequence[SourceLoop], used_names: set[str], number: Callable[[SourceLoop, int], Expression | None]
) -> For:
    """The loop, with the loops inside it that the source has.

    Args:
        loop: its body has no progressions any more.
        inner: the loops of the source that are inside of it.
        used_names: the names that no index may have.
        number: returns the number of iterations as the source writes it; None if it is no attribute.
    """
    if not inner:
        return loop
    body: list[Statement] = []
    position = 0
    while position < len(loop.body):
        run = _longest_run(loop.body[position:])
        if run is None:
            body.append(loop.body[position])
            position += 1
            continue
        names = used_names.union(loop.variables, *(_names(statement) for statement in loop.body))
        body.append(_loop(run, inner[-1], names, number))
        position += run.length
    return replace(loop, body=tuple(body))


def _longest_run(statements: Sequence[Statement]) -> _Run | None:
    """The iterations that these statements begin with and that stand for most of them; None if there are none."""
    runs = (_run(statements, size) for size in range(1, len(statements) // _ITERATIONS + 1))
    long_runs = [run for run in runs if run.iterations >= _ITERATIONS]
    return max(long_runs, key=lambda run: (run.length, run.iterations), default=None)


def _run(statements: Sequence[Statement], size: int) -> _Run:
    """The iterations of so many statements that come first."""
    second, third = statements[size : 2 * size], statements[2 * size : 3 * size]
    try:
        body = tuple(in_all_iterations(node, next_node) for node, next_node in zip(second, third, strict=True))
    except StructureMismatch:
        return _Run((), 0)
    if not any(True for _ in progressions(body)):
        return _Run((), 0)  # nothing but a repetition
    count = 0
    while _says(body, count, statements[count * size : (count + 1) * size]):
        count += 1
    return _Run(body, count)


def _says(body: Sequence[Statement], iteration: int, statements: Sequence[Statement]) -> bool:
    if len(statements) < len(body):
        return False
    pairs = zip(body, statements, strict=True)
    return all(_plain(at_iteration(pattern, iteration)) == _plain(statement) for pattern, statement in pairs)


def _plain(node: Any) -> Any:
    """Source with ``x[:2]`` in place of ``x[0:2]``."""
    if isinstance(node, Slice) and node.start == literal(0):
        return replace(node, start=None)
    return node.rebuilt(_plain)


def _loop(
    run: _Run, source: SourceLoop, used_names: set[str], number: Callable[[SourceLoop, int], Expression | None]
) -> For:
    steps = [progression for progression in progressions(run.statements) if abs(progression.difference) == 1]
    start, step = (steps[0].first, steps[0].difference) if steps else (0, 1)
    index = Name(unused(variable(source.index or "j", "j"), used_names))
    stop = start + step * run.iterations
    if (start, step) == (0, 1):
        iterable = call("range", number(source, run.iterations) or literal(stop))
    else:
        iterable = call("range", literal(start), literal(stop), *([literal(step)] if step != 1 else []))
    return For((index.name,), iterable, tuple(with_variable(node, index, start, step) for node in run.statements))


def _names(statement: Statement) -> set[str]:
    return {part.name for part in statement.walk() if isinstance(part, Name)}
