"""Functions of the model that no package can have as text, written from their operations: masks, above all.

causal_mask = create_causal_mask(attention_mask)      in a stage, instead of the nine operations of this function
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from torch import fx

from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.author_text.function_steps import FunctionSteps, with_function_steps
from pipegraph.codegen.author_text.headers import wrapped_header
from pipegraph.codegen.author_text.names import STANDARD, ReadNames
from pipegraph.codegen.expressions.torch_modules import CallArguments
from pipegraph.codegen.forward.items import FunctionStep, Step
from pipegraph.codegen.names.identifiers import unused
from pipegraph.codegen.syntax.statements import Statement, lines
from pipegraph.graph.calls import FunctionRun
from pipegraph.graph.nodes import dtypes_of

WriteFunction = Callable[[Sequence[Step], Mapping[fx.Node, str], fx.Node], Sequence[Statement]]
"""(steps, the values that they take → their names, the value that they return) → the statements of a function."""

_FEWEST: Final = 4
"""Fewer operations read as well in the place of the call."""
_SIZE_SOURCES: Final = 8
"""How many values are tried for their sizes and dtypes."""


class WrittenFunctions:
    """Finds the operations of a function among steps, and writes it.

    Args:
        functions: the calls of functions of the model.
        parameter_values: the values that depend on parameters. No function takes one: ranks along `tp` divide these.
        name_of: returns a name for a value.
        write: writes the statements of a function; raises UnwritableError.
    """

    def __init__(
        self,
        functions: FunctionSteps,
        parameter_values: AbstractSet[fx.Node],
        name_of: Callable[[fx.Node], str],
        write: WriteFunction,
    ) -> None:
        self._functions, self._parameter_values = functions, parameter_values
        self._name_of, self._write = name_of, write

    def joined(
        self,
        steps: Sequence[Step],
        call: str,
        results: AbstractSet[fx.Node],
        names: ReadNames,
        check_names: Callable[[ReadNames], object],
    ) -> list[Step]:
        """Return steps with one step for each call of such a function, the outermost ones.

        Args:
            steps: the steps of a call of a module.
            call: that call.
            results: the values that are read after it.
            names: of its class, to which the functions are added.
            check_names: raises UnwritableError if a name means something else in another class.
        """

        def step_of(run: FunctionRun, remaining: Sequence[Step]) -> tuple[FunctionStep, list[int]]:
            with names.undone_on_error():
                step, members = self._step(run, remaining, results, names)
                check_names(names)
            return step, members

        return with_function_steps(steps, call, step_of)

    def _step(
        self, run: FunctionRun, steps: Sequence[Step], results: AbstractSet[fx.Node], names: ReadNames
    ) -> tuple[FunctionStep, list[int]]:
        """The step of a call, whose function ``names`` have then, and the positions of the steps that it stands for.
        Raises UnwritableError."""
        members, nodes, read_after = self._functions.members(run, steps, results)
        inner = [steps[at] for at in members]
        inside = set(nodes)
        reads = tuple(dict.fromkeys(value for step in inner for value in step.reads if value not in inside))
        if len(nodes) < _FEWEST or len(read_after) != 1 or not self._parameter_values.isdisjoint(nodes):
            raise UnwritableError("it is short, returns several values, or computes with parameters")
        if any(node.op == "get_attr" for node in reads) or self._functions.depends_on_mode(inside):
            raise UnwritableError("it reads tensors of the module, or its mode")
        (result,) = read_after
        reads, text = self._text_with_sizes(run, inner, reads, result, self._functions.available(steps, members))
        called = {step.function for step in inner if isinstance(step, FunctionStep)}
        if names.functions.get(run.name, text) != text and names.calls(run.name):
            raise UnwritableError(f"{run.name} is written in two ways")
        names.functions[run.name] = text
        used = {name: STANDARD[name] for name in STANDARD if re.search(rf"(?<![.\w]){name}\b", text)}
        names.imports |= used
        names.needs[run.name] = frozenset(called), (), frozenset(used.values()), ""
        arguments = CallArguments(tuple(("", position) for position in range(len(reads))))
        return FunctionStep(run.name, run, reads, (result,), nodes, arguments), members

    def _text_with_sizes(
        self,
        run: FunctionRun,
        steps: Sequence[Step],
        reads: tuple[fx.Node, ...],
        result: fx.Node,
        available: Sequence[fx.Node],
    ) -> tuple[tuple[fx.Node, ...], str]:
        """The values that a function takes, and its text. Raises UnwritableError.

        Args:
            reads: the values that its operations read. It takes one more if it needs a size or a dtype of that.
            available: the values before it.
        """
        size_sources = [node for node in available if node not in reads]
        size_sources.sort(key=lambda node: not self._functions.argument_name(run, node))  # its own arguments first
        has_dtype = any(_follows_model(node) for step in steps for node in step.nodes)
        error = UnwritableError("no argument has the dtype of the model")
        for inputs in (reads, *((*reads, node) for node in size_sources[:_SIZE_SOURCES])):
            if has_dtype and not any(map(_follows_model, inputs)):
                continue
            try:
                return inputs, self._text(run, steps, inputs, result)
            except UnwritableError as reason:
                error = reason
        raise error

    def _text(self, run: FunctionRun, steps: Sequence[Step], reads: Sequence[fx.Node], result: fx.Node) -> str:
        parameters: dict[fx.Node, str] = {}
        for node in reads:
            name = self._functions.argument_name(run, node) or self._name_of(node)
            parameters[node] = unused(name, set(parameters.values()))
        header = wrapped_header(run.name, [f"{name}: Tensor" for name in parameters.values()], " -> Tensor")
        body = lines(tuple(self._write(steps, parameters, result)), 4)
        description = f'"""What {run.name} of {Path(run.file).name} computes in this model."""'
        return "\n".join([*header, f"    {description}", *body])


def _follows_model(node: fx.Node) -> bool:
    """Return whether a value has the dtype of the model, whatever that is."""
    dtype, other_dtype = dtypes_of(node)
    return other_dtype not in (None, dtype)
