"""Calls of the author's functions among the steps of a ``forward`` that are written from the graph."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import Final

import sympy
import torch
from torch import fx

from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.author_text.simplify import CalledFunctions
from pipegraph.codegen.expressions.operator_call import TRAINING
from pipegraph.codegen.expressions.torch_modules import CallArguments, Passed, unpacked_places
from pipegraph.codegen.forward.items import FunctionStep, Operation, Step, has_effects
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import Name
from pipegraph.graph.calls import RETURNED, FunctionRun, ModuleValue, PlainValue, functions_of
from pipegraph.graph.captured import BRANCH
from pipegraph.graph.nodes import arguments_of, shape_of
from pipegraph.graph.operators import MODE_ARGUMENTS
from pipegraph.graph.symbolic_size import SymbolicSize, in_dimensions
from pipegraph.torch_private.operators import OpOverload

AddFunction = Callable[[FunctionRun, AbstractSet[fx.Node]], None]
"""Lets a text have a function or a method, with the operations of a call; raises UnwritableError."""

_Places = dict[tuple[str, tuple[int, ...]], fx.Node]
"""The tensors that a call takes and returns, by parameter (or `RETURNED`) and indices in tuples."""


StepOfCall = Callable[[FunctionRun, Sequence[Step]], tuple[FunctionStep, list[int]]]
"""(a call of a function, steps) → its step, and the positions of the steps that it stands for; raises
UnwritableError."""


def with_function_steps(steps: Sequence[Step], call: str, step_of: StepOfCall) -> list[Step]:
    """Steps of a call of a module, with one step for each call of a function, the outermost ones that can have one."""
    joined = list(steps)
    unwritable = set[str]()
    at = 0
    while at < len(joined):
        for run in _functions_around(joined[at]):
            if run.call != call or run.key in unwritable:
                continue
            try:
                step, members = step_of(run, joined)
            except UnwritableError:
                unwritable.add(run.key)
                continue
            joined[members[-1]] = step
            for member in reversed(members[:-1]):
                del joined[member]
            break
        else:
            at += 1
    return joined


def _functions_around(step: Step) -> Sequence[FunctionRun]:
    """The calls of functions that a step is in, outermost first."""
    runs = functions_of(step.nodes[0])
    if not isinstance(step, FunctionStep):
        return runs
    # What the function of the step calls may have all of its operations too: `return swapped(x)`.
    return runs[: [run.key for run in runs].index(step.run.key)]


class FunctionSteps:
    """Finds the operations that are all of one call of a function.

    Args:
        nodes: the operations of the model.
        source: the statements of its source.
        called_functions: what is left of its functions.
    """

    def __init__(self, nodes: Iterable[fx.Node], source: SourceStatements, called_functions: CalledFunctions) -> None:
        self._source, self._called_functions = source, called_functions
        self._nodes: dict[str, set[fx.Node]] = {}
        self._places: dict[str, _Places] = {}
        self._branches: dict[int, set[fx.Node]] = {}
        operations = list(nodes)
        for node in operations:
            for run in functions_of(node):
                self._nodes.setdefault(run.key, set()).add(node)
            if (part := node.meta.get(BRANCH)) is not None:
                self._branches.setdefault(part.number, set()).add(node)
        for value in dict.fromkeys(value for node in operations for value in (*node.all_input_nodes, node)):
            for key, places in value.meta.get("variables", {}).items():
                if key in self._nodes:
                    self._places.setdefault(key, {}).update({(place.name, place.path): value for place in places})

    def joined(
        self, steps: Sequence[Step], call: str, results: AbstractSet[fx.Node], is_part: bool, add_function: AddFunction
    ) -> list[Step]:
        """Return steps with one step for each call of a function that the text can have, the outermost ones.

        Args:
            steps: the steps of a call of a module.
            call: that call.
            results: the values that are read after it.
            is_part: whether the text is that of a part of the module. Its static methods are functions, which all
                parts share.
            add_function: lets the text have the function.
        """

        def step_of(run: FunctionRun, remaining: Sequence[Step]) -> tuple[FunctionStep, list[int]]:
            if is_part and run.function.__code__.co_varnames[:1] != ("self",):
                run = replace(run, is_method=False)
            step, members = self._step(run, remaining, results)
            add_function(run, self._nodes[run.key])
            return step, members

        joined = with_function_steps(steps, call, step_of)
        return _without_dead(joined, results) if len(joined) < len(steps) else joined

    def _step(
        self, run: FunctionRun, steps: Sequence[Step], results: AbstractSet[fx.Node]
    ) -> tuple[FunctionStep, list[int]]:
        """The step of a call, and the positions of the steps that it stands for. Raises UnwritableError.

        The call stands in the place of the last of them: all that it takes is computed before.
        """
        members, nodes, read_after = self.members(run, steps, results)
        inside = set(nodes)
        available = set(self.available(steps, members)) - inside
        arguments, reads = self._arguments(run, available, self.depends_on_mode(inside))
        makes = self._results(run, read_after)
        paths = list(makes)
        if isinstance(run.result, tuple) and len(run.result) > 2 * len(paths):
            raise UnwritableError("most of what it returns is not read")
        takes_first = paths == [(0,)]
        unpacked = None if takes_first or paths == [()] else unpacked_places(run.result, paths)
        arguments = replace(arguments, takes_first=takes_first, unpacked=unpacked)
        name = f"self.{run.name}" if run.is_method else run.name
        return FunctionStep(name, run, reads, tuple(makes.values()), nodes, arguments), members

    def members(
        self, run: FunctionRun, steps: Sequence[Step], results: AbstractSet[fx.Node]
    ) -> tuple[list[int], tuple[fx.Node, ...], set[fx.Node]]:
        """The positions of the steps that are of a call, their operations, and the values of these that are read after
        it. Raises UnwritableError if a step of the call cannot stand for them.

        Args:
            results: the values that are read after all steps.
        """
        inside = self._nodes[run.key]
        members = [at for at, step in enumerate(steps) if not inside.isdisjoint(step.nodes)]
        nodes = tuple(node for at in members for node in steps[at].nodes)
        calls_modules = not all(isinstance(steps[at], (Operation, FunctionStep)) for at in members)
        takes_modules = any(isinstance(form, ModuleValue) for _, form in run.arguments)
        if set(nodes) != inside or (calls_modules and not (run.is_method or takes_modules)):
            raise UnwritableError("it calls other modules, or only a part of it is here")
        names = {node.name for node in nodes}
        if any(node.meta.get("writes", node.name) not in names for node in nodes):
            raise UnwritableError("it writes into a tensor that it is given")
        read_after = {node for node in nodes if node in results or any(user not in inside for user in node.users)}
        between = [
            step for at, step in enumerate(steps[members[0] : members[-1]], members[0]) if at not in set(members)
        ]
        if any(not read_after.isdisjoint(step.reads) for step in between):
            raise UnwritableError("a statement in between reads a result")
        if any(map(has_effects, between)) and any(has_effects(steps[at]) for at in members):
            raise UnwritableError("the order of random numbers would change")
        return members, nodes, read_after

    @staticmethod
    def available(steps: Sequence[Step], members: Sequence[int]) -> list[fx.Node]:
        """The values before the last of some steps: those that steps take, and then what steps before it return."""
        computed = {node for step in steps for node in step.makes}
        inputs = [node for step in steps for node in step.reads if node not in computed]
        results = [node for at, step in enumerate(steps[: members[-1]]) if at not in members for node in step.makes]
        return list(dict.fromkeys([*inputs, *results]))

    def argument_name(self, run: FunctionRun, value: fx.Node) -> str:
        """The parameter of a call that took a value; empty without one."""
        places = self._places.get(run.key, {}).items()
        return next((name for (name, path), node in places if node is value and not path and name != RETURNED), "")

    def _results(self, run: FunctionRun, read_after: AbstractSet[fx.Node]) -> dict[tuple[int, ...], fx.Node]:
        """The results of a call that are read after it, by their indices in tuples. Raises UnwritableError if another
        value inside is read after it."""
        places = self._places.get(run.key, {})
        results = {path: places[name, path] for name, path in sorted(places) if name == RETURNED}
        results = {path: node for path, node in results.items() if node in read_after}
        if not results or set(results.values()) != read_after or len(results) != len(read_after):
            raise UnwritableError("a value inside is read outside, or returned twice")
        return results

    def depends_on_mode(self, inside: AbstractSet[fx.Node]) -> bool:
        """Return whether the modes compute something else in a call. Raises UnwritableError if only a part of what one
        mode runs is in it."""
        parts = {node.meta.get(BRANCH) for node in inside}
        if len(parts) > 1 and any(not self._branches[part.number] <= inside for part in parts if part is not None):
            raise UnwritableError("only a part of what a mode runs is in it")
        operations = (node for node in inside if isinstance(node.target, OpOverload))
        return len(parts) > 1 or any(not arguments_of(node).keys().isdisjoint(MODE_ARGUMENTS) for node in operations)

    def _arguments(
        self, run: FunctionRun, available: AbstractSet[fx.Node], depends_on_mode: bool
    ) -> tuple[CallArguments, tuple[fx.Node, ...]]:
        """The arguments of a call, and the values that it takes. Raises UnwritableError.

        Args:
            available: the values that the text has before the call.
            depends_on_mode: whether the modes compute something else in it.
        """
        places = self._places.get(run.key, {})
        parameters = inspect.signature(run.function).parameters
        callee = None if run.is_method else self._called_functions.callee(run.function)
        reads: list[fx.Node] = []

        def position_of(name: str, path: tuple[int, ...]) -> int:
            node = places.get((name, path))
            if node is None or not (node in available or node.op == "get_attr"):
                raise UnwritableError(f"the text does not have {name}")
            if node not in reads:
                reads.append(node)
            return reads.index(node)

        author_call = self._source.call_of(run)
        author_positional = _positional(author_call)
        tensors = (node for node in available if isinstance(node.meta.get("val"), torch.Tensor))
        sizes = {size.expression for node in tensors for size in shape_of(node) if isinstance(size, SymbolicSize)}
        values: list[tuple[str, int | tuple[int, ...] | Passed | None]] = []
        settings: list[tuple[str, object]] = []
        is_positional = True
        for number, (name, form) in enumerate(run.arguments):
            if callee is not None and name in callee.unread:
                continue
            parameter = parameters.get(name)
            if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise UnwritableError(f"{name} is one of several arguments")
            is_positional &= parameter.kind is not parameter.KEYWORD_ONLY
            is_positional &= number < author_positional or parameter.default is parameter.empty
            keyword = "" if is_positional else name
            if form is ...:
                values.append((keyword, position_of(name, ())))
            elif isinstance(form, tuple) and form and all(part is ... for part in form):
                values.append((keyword, tuple(position_of(name, (index,)) for index in range(len(form)))))
            elif isinstance(form, ModuleValue) and keyword:
                settings.append((name, form))
            elif isinstance(form, ModuleValue):
                values.append(("", Passed(form)))
            else:
                value = _plain(name, form, sizes)
                if depends_on_mode and isinstance(value, (bool, int, float)):
                    value = _in_every_mode(value, _author_argument(author_call, number, name), name)
                if _follows_dtype(value) and not _is_fixed(author_call, number, name):
                    raise UnwritableError(f"{name} may follow the dtype of the model")
                if not keyword:
                    values.append(("", Passed(value)))
                elif not _equal(value, parameter.default):
                    settings.append((name, value))
        return CallArguments(tuple(values), tuple(settings)), tuple(reads)


def _without_dead(steps: Sequence[Step], results: AbstractSet[fx.Node]) -> list[Step]:
    """Steps without those whose results nothing reads: a choice of the mode that stands inside of a function."""
    live, read = list[Step](), set(results)
    for step in reversed(steps):
        if has_effects(step) or not read.isdisjoint(step.makes):
            live.append(step)
            read.update(step.reads)
    return live[::-1]


def _plain(name: str, form: object, sizes: AbstractSet[sympy.Expr]) -> object:
    """The number, size or tuple of these that an argument is. Raises UnwritableError for anything else.

    Args:
        sizes: those of the tensors that the text has.
    """
    if isinstance(form, tuple):
        return tuple(_plain(name, part, sizes) for part in form)
    if not isinstance(form, PlainValue):
        raise UnwritableError(f"{name} is neither a tensor nor a number")
    if isinstance(form.value, SymbolicSize) and in_dimensions(form.value.expression, sizes) is None:
        raise UnwritableError(f"no tensor has the size {name}")
    return form.value


def _positional(author_call: ast.Call | None) -> int:
    """How many arguments the author gives by position; 0 if that is not known."""
    if author_call is None or any(isinstance(value, ast.Starred) for value in author_call.args):
        return 0
    return len(author_call.args)


_LIMITS: Final = frozenset(
    abs(getattr(torch.finfo(dtype), limit))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for limit in ("min", "max", "eps", "tiny")
)


def _follows_dtype(value: object) -> bool:
    """Return whether an argument may be another one in a model of another dtype."""
    if isinstance(value, torch.dtype):
        return value.is_floating_point
    return isinstance(value, float) and abs(value) in _LIMITS


def _author_argument(author_call: ast.Call | None, number: int, name: str) -> ast.expr | None:
    """The argument that the author gives to a parameter; None if it is its default. Raises UnwritableError if that is
    not known."""
    if author_call is None or any(isinstance(value, ast.Starred) for value in author_call.args):
        raise UnwritableError(f"the author's {name} is not known")
    keywords = {keyword.arg: keyword.value for keyword in author_call.keywords}
    if None in keywords:  # **settings
        raise UnwritableError(f"the author's {name} is not known")
    return author_call.args[number] if number < len(author_call.args) else keywords.get(name)


def _is_fixed(author_call: ast.Call | None, number: int, name: str) -> bool:
    """Return whether the author gives an argument as ``torch.float32``, or does not give it."""
    match _author_argument(author_call, number, name):
        case None | ast.Attribute(value=ast.Name(id="torch")):
            return True
    return False


def _in_every_mode(value: object, argument: ast.expr | None, name: str) -> object:
    """A number for a call in which the modes compute something else; ``self.training`` for the mode.

    Args:
        value: the number in training mode.
        argument: as the author gives it.

    Raises:
        UnwritableError: it may be another one in evaluation mode.
    """
    match argument:
        case ast.Attribute(ast.Name("self"), "training"):
            return TRAINING
        case ast.UnaryOp(ast.Not(), ast.Attribute(ast.Name("self"), "training")):
            return Name(f"not {TRAINING.text}")
        case None | ast.Constant():
            return value
    mentions_mode = any(isinstance(node, ast.Attribute) and node.attr == "training" for node in ast.walk(argument))
    if isinstance(value, bool) or mentions_mode:
        raise UnwritableError(f"{name} may follow the mode")
    return value


def _equal(value: object, default: object) -> bool:
    """Return whether a number is the default of its parameter."""
    with suppress(Exception):
        return type(value) is type(default) and bool(value == default)
    return False
