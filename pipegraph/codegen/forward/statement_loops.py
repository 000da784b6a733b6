"""Find the iterations of loops of the model's source that capture has unrolled: over time steps, experts, pieces."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.forward.items import Item, ModuleCall, Operation, StatementLoop, Step, operands
from pipegraph.codegen.forward.local_variables import goes_over_modules
from pipegraph.codegen.names.source_loops import SourceLoop, loops_at
from pipegraph.codegen.names.source_statements import SourceStatements, is_of_torch
from pipegraph.graph.captured import BRANCH
from pipegraph.graph.nodes import shape_of
from pipegraph.torch_private.pytrees import pytree

# ---- step keys -------------------------------------------------------------------------------------------------------
# What tells whether two items of a ``forward`` are one step of two iterations of a loop of the model's source.


LoopFrame = tuple[int, SourceLoop]
"""A loop of the source, and the number of the frame in which it is."""


def lines_of(item: Item, source: SourceStatements, fqn: str) -> tuple[tuple[str, int], ...]:
    """The files and lines of the source that led to an item, outermost first."""
    if not isinstance(item, (Operation, ModuleCall)):
        return ()
    return source.lines_within(fqn, item.nodes[0], item.fqn if isinstance(item, ModuleCall) else None)


def loops_around(lines: Sequence[tuple[str, int]]) -> tuple[LoopFrame, ...]:
    """The loops of the source that lines are in, outermost first."""
    model_lines = ((frame, file, line) for frame, (file, line) in enumerate(lines) if not is_of_torch(file))
    return tuple((frame, loop) for frame, file, line in model_lines for loop in loops_at(file, line))


def key_of(item: Item, lines: object) -> object:
    """What two steps have in common if they are one step of two iterations; for an item that is in none, the item."""
    if not isinstance(item, (Operation, ModuleCall)) or any(BRANCH in node.meta for node in item.nodes):
        return item
    if isinstance(item, Operation):
        node = item.node
        leaves = tuple(_kind(leaf) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
        structure = str(pytree.tree_structure((node.args, node.kwargs)))
        return node.target, leaves, structure, lines, repr(node.meta["regions"]), "writes" in node.meta
    path = re.sub(r"\b\d+\b", "#", item.fqn)
    arguments = item.arguments
    form = arguments.form if arguments is not None else tuple(("", 1) for _ in item.reads)
    return (
        path,
        item.model_class,
        form,
        repr((arguments.settings, arguments.unpacked) if arguments else ()),
        item.parameters,
        lines,
    )


def _kind(leaf: object) -> object:
    """A value is like any other, and so is a whole number."""
    return fx.Node if isinstance(leaf, fx.Node) else int if type(leaf) is int else repr(leaf)


def rank_of(node: fx.Node) -> object:
    """The dtype of a tensor and the number of its dimensions, which may be longer in each iteration: ``x[:i]``. Of any
    other value, all of its form."""
    value = node.meta.get("val")
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else form_of(node)


def form_of(node: fx.Node) -> object:
    """The shape and dtype of a value, or of those in a tuple."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return shape_of(node), value.dtype
    if not isinstance(value, (tuple, list)):
        return value
    return tuple((part.shape, part.dtype) if isinstance(part, torch.Tensor) else part for part in value)


# ---- statement loops -------------------------------------------------------------------------------------------------


# Fewer iterations read as well without a loop.
_ITERATIONS = 3
# How many periods are tried at a place, those that cover most first.
_TRIED = 4

aten = torch.ops.aten

# The place of a value in an iteration: the number of the step, and of the result.
_Place = tuple[int, int]
_Iterations = Sequence[Sequence[Step | None]]


def roll_statements(
    items: Sequence[Item], outputs: Iterable[fx.Node], source: SourceStatements, fqn: str
) -> tuple[Item, ...]:
    """Replace the iterations of loops of the source by loops.

    Args:
        items: the items of a ``forward``.
        outputs: the values that it returns.
        source: the statements of the model's source.
        fqn: of the module whose ``forward`` it is.
    """
    finder = _Finder(items, outputs, source, fqn)
    rolled: list[Item] = []
    position = 0
    while position < len(items):
        loop, count = finder.loop_at(position)
        rolled.append(loop or items[position])
        position += count
    return tuple(rolled)


class _Finder:
    def __init__(self, items: Sequence[Item], outputs: Iterable[fx.Node], source: SourceStatements, fqn: str) -> None:
        self._items = items
        self._outputs = frozenset(outputs)
        self._lines = [lines_of(item, source, fqn) for item in items]
        self._loops = [loops_around(lines) for lines in self._lines]
        numbers: dict[object, int] = {}
        keys = (key_of(item, lines) for item, lines in zip(items, self._lines, strict=True))
        self._keys = [numbers.setdefault(key, len(numbers)) for key in keys]
        self._forms = [tuple(map(rank_of, item.makes)) for item in items]

    def loop_at(self, start: int) -> tuple[StatementLoop | None, int]:
        """The loop that begins with an item, and the number of items that it replaces; None and 1 without a loop."""
        counts = {size: self._count(start, size) for size in self._periods(start)}
        sizes = [size for size, count in counts.items() if count >= _ITERATIONS]
        for size in sorted(sizes, key=lambda size: (-counts[size] * size, size))[:_TRIED]:
            loop_and_length = self._loop(start, size, counts[size])
            if loop_and_length is not None:
                return (None, 1) if self._begins_inside(start, size, loop_and_length[0]) else loop_and_length
        return None, 1

    def _begins_inside(self, start: int, size: int, loop: StatementLoop) -> bool:
        """Return whether a loop that begins up to one iteration later hands on the results of fewer steps.

        Then this one begins inside an iteration of the source, as a stage may.
        """
        loops = (self._loop(begin, size, self._count(begin, size)) for begin in range(start + 1, start + size))
        return any(inner_loop is not None and _handed_on(inner_loop[0]) < _handed_on(loop) for inner_loop in loops)

    def _count(self, start: int, size: int) -> int:
        """The number of iterations of this size that begin with an item."""
        count = 1
        while self._repeats(start, start + count * size, size):
            count += 1
        return count

    def _periods(self, start: int) -> Iterator[int]:
        """The distances to later items like this one, in the same loop of the source."""
        around = set(self._loops[start])
        for position in range(start + 1, len(self._items)):
            if around.isdisjoint(self._loops[position]):
                return
            if self._keys[position] == self._keys[start]:
                yield position - start

    def _repeats(self, start: int, next_start: int, size: int) -> bool:
        first, second = slice(start, start + size), slice(next_start, next_start + size)
        return self._keys[first] == self._keys[second] and self._forms[first] == self._forms[second]

    def _loop(self, start: int, size: int, count: int) -> tuple[StatementLoop, int] | None:
        if count < _ITERATIONS:
            return None
        common = [outer for outer in self._loops[start] if all(outer in self._loops[start + at] for at in range(size))]
        if common and self._calls_several(start, size, common[-1]):
            common.pop()  # it is not the loop over these modules, but one around it
        if not common:
            return None
        frame, source = common[-1]
        if any(self._lines[start + at][frame][1] < self._lines[start][frame][1] for at in range(size)):
            return None  # it would begin inside one iteration and end inside the next
        full_iterations: list[list[Step | None]] = [
            [self._step(start + number * size + at) for at in range(size)] for number in range(count)
        ]
        last, used = self._part(start, size, start + count * size)
        stop = start + count * size + used
        if stop < len(self._items) and (frame, source) in self._loops[stop]:
            used = 0  # the loop continues: that was no last iteration
        for iterations, items in (([*full_iterations, last], count * size + used), (full_iterations, count * size)):
            if used or iterations is full_iterations:
                outside = (*self._items[:start], *self._items[start + items :])
                loop = _checked(iterations, {node for item in outside for node in item.reads} | self._outputs, source)
                if loop is not None and not _is_module_loop(loop) and not _is_the_same(loop):
                    return loop, items
        return None

    def _calls_several(self, start: int, size: int, loop: LoopFrame) -> bool:
        """Return whether one step calls several modules of a list, in no loop inside of this one."""
        modules: dict[int, set[str]] = {}
        for at in range(start, start + size):
            item = self._items[at]
            if isinstance(item, ModuleCall) and self._loops[at][-1] == loop:
                modules.setdefault(self._keys[at], set()).add(item.fqn)
        return any(len(fqns) > 1 for fqns in modules.values())

    def _part(self, start: int, size: int, end: int) -> tuple[list[Step | None], int]:
        """A last iteration that lacks steps, and how many items it has."""
        steps: list[Step | None] = []
        position = end
        for at in range(size):
            if position < len(self._items) and self._may_lack_results(position, start + at):
                steps.append(self._step(position))
                position += 1
            else:
                steps.append(None)
        return steps, position - end

    def _may_lack_results(self, position: int, reference: int) -> bool:
        """Return whether an item is the same step as another one, perhaps without the last results of a call."""
        forms, reference_forms = self._forms[position], self._forms[reference]
        return self._keys[position] == self._keys[reference] and forms == reference_forms[: len(forms)]

    def _step(self, position: int) -> Step:
        item = self._items[position]
        assert isinstance(item, (Operation, ModuleCall))
        return item


# ---- checks ----------------------------------------------------------------------------------------------------------


def _checked(iterations: _Iterations, outside_reads: set[fx.Node], source: SourceLoop) -> StatementLoop | None:
    """The loop of these iterations, if each does with its own values what the others do with theirs.

    Args:
        outside_reads: what is read outside of them.
    """
    places = [_places(steps) for steps in iterations]
    begin: dict[_Place, fx.Node] = {}
    outside: set[tuple[fx.Node, ...]] = set()
    for steps in zip(*iterations, strict=True):
        present = [(number, step) for number, step in enumerate(steps) if step is not None]
        if not _progress([_numbers(step) for _, step in present]):
            return None
        if not _progress([_dimensions(step) for _, step in present]):
            return None
        instances = [step for _, step in present]
        if len(present) < len(steps) and not (_is_constant(instances) or _has_element(instances, len(steps))):
            return None  # in the last iteration it might go beyond the end of what the loop goes over
        for operand_nodes in zip(*(operands(step) for _, step in present), strict=True):
            kinds = [_origin(node, number, places) for (number, _), node in zip(present, operand_nodes, strict=True)]
            if not _is_alike(kinds, operand_nodes, begin):
                return None
            outside |= {operand_nodes} if all(origin == "outside" for origin, _ in kinds) else set()
    varying = [nodes for nodes in outside if len(set(nodes)) > 1]
    shared = [node for nodes in outside for node in set(nodes)]
    if any(len(nodes) < len(iterations) or shared.count(node) > 1 for nodes in varying for node in nodes):
        return None
    values = [{place: node for node, place in iteration_places.items()} for iteration_places in places]
    if any(form_of(node) != form_of(values[0][place]) for place, node in begin.items()):
        return None
    second, last = values[1], values[-1]
    collected, final = [], []
    for place, node in second.items():
        instances = [iteration_nodes.get(place) for iteration_nodes in values]
        read = [instance in outside_reads for instance in instances]
        if any(read[:-1]):
            nodes = tuple(instance for instance in instances if instance is not None)
            if not all(read) or len(nodes) < len(instances):
                return None
            collected.append(nodes)
        elif read[-1]:
            final.append((node, last[place]))
    carried = tuple((begin[place], values[0][place], second[place], last.get(place)) for place in begin)
    steps = tuple(map(tuple, iterations))
    return StatementLoop(steps, carried, tuple(varying), tuple(collected), tuple(final), source)


def _places(steps: Sequence[Step | None]) -> dict[fx.Node, _Place]:
    return {
        node: (number, result)
        for number, step in enumerate(steps)
        if step is not None
        for result, node in enumerate(step.makes)
    }


def _origin(node: fx.Node, number: int, places: Sequence[dict[fx.Node, _Place]]) -> tuple[str, object]:
    """Where an iteration has a value from: itself, the iteration before, or outside of the loop."""
    if node in places[number]:
        return "own", places[number][node]
    if number and node in places[number - 1]:
        return "before", places[number - 1][node]
    return ("other", node) if any(node in iteration_places for iteration_places in places) else ("outside", node)


def _is_alike(kinds: Sequence[tuple[str, Any]], nodes: Sequence[fx.Node], begin: dict[_Place, fx.Node]) -> bool:
    """Return whether the iterations have an operand from the same place.

    Args:
        kinds, nodes: the operand of each iteration.
        begin: is given the values before the loop, by the place of those that follow them.
    """
    origins = [origin for origin, _ in kinds]
    if set(origins) == {"own"}:
        return len(set(kinds)) == 1
    if set(origins) == {"outside"}:
        return len(set(nodes)) in (1, len(nodes))
    if origins[0] == "outside" and set(origins[1:]) == {"before"} and len(set(kinds[1:])) == 1:
        place = kinds[1][1]
        return begin.setdefault(place, nodes[0]) is nodes[0]
    return False


def _progress(rows: Sequence[Sequence[int]]) -> bool:
    """Return whether each number of a step is the same in all iterations, or grows by the same number."""
    columns = zip(*rows, strict=False)  # the last iteration may lack results
    return all(len({second - first for first, second in pairwise(numbers)}) <= 1 for numbers in columns)


def _dimensions(step: Step) -> list[int]:
    """The fixed sizes of what a step makes, as far as all iterations make it."""
    tensors = (node for node in step.makes if isinstance(node.meta.get("val"), torch.Tensor))
    shapes = [shape_of(node) for node in tensors]
    return [int(size) for shape in shapes for size in shape]


def _is_constant(steps: Sequence[Step]) -> bool:
    """Return whether a step has the same numbers, and calls the same module, in all iterations."""
    modules = {step.fqn for step in steps if isinstance(step, ModuleCall)}
    return len(modules) <= 1 and len({tuple(_numbers(step)) for step in steps}) == 1


def _has_element(steps: Sequence[Step], iterations: int) -> bool:
    """Return whether a step takes an element, ``x[:, t]``, that there also is in the last iteration, which lacks it."""
    if not all(isinstance(step, Operation) and step.node.target is aten.select.int for step in steps):
        return False
    tensor, dim, first = steps[0].nodes[0].args
    growth = _numbers(steps[1])[1] - _numbers(steps[0])[1]
    assert isinstance(tensor, fx.Node) and isinstance(dim, int) and isinstance(first, int)
    size = shape_of(tensor)[dim]
    return type(size) is int and type(first) is int and 0 <= first + growth * (iterations - 1) < size


def _handed_on(loop: StatementLoop) -> int:
    """The number of steps whose results an iteration hands on; the parts of a tuple are results of one."""
    places = _places(loop.iterations[1])
    values = [node.args[0] if node.target is operator.getitem else node for _, _, node, _ in loop.carried]
    return len({places[node][0] if node in places else node for node in values if isinstance(node, fx.Node)})


def _numbers(step: Step) -> list[int]:
    if not isinstance(step, Operation):
        return []
    node = step.node
    args = list(node.args)
    if node.target is aten.slice.Tensor and len(args) > 3 and isinstance(args[0], fx.Node):
        size = shape_of(args[0])[args[1]]  # type: ignore[index]
        args[3] = min(args[3], size) if type(size) is int and type(args[3]) is int else args[3]
    return [leaf for leaf in pytree.tree_leaves((args, node.kwargs)) if type(leaf) is int]


def _is_module_loop(loop: StatementLoop) -> bool:
    """Return whether each iteration is the call of another module with the result of the one before."""
    calls = [step for steps in loop.iterations for step in steps]
    modules = {step.fqn for step in calls if isinstance(step, ModuleCall)}
    return len(loop.inner) == 1 and len(modules) == len(calls) and bool(loop.carried) and not loop.collected


def _is_the_same(loop: StatementLoop) -> bool:
    """Return whether all iterations compute the same, or nothing: each may be read as a separate value."""
    numbers = {
        tuple(number for step in steps if step is not None for number in _numbers(step)) for steps in loop.iterations
    }
    is_unpacking = all(isinstance(step, Operation) and step.node.target is operator.getitem for step in loop.inner)
    return is_unpacking or not (loop.carried or loop.varying or goes_over_modules(loop) or len(numbers) > 1)
