"""Names of values and arguments, chosen from the model's source, and the docstrings of classes."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import torch
from torch import fx

from pipegraph.codegen.names.identifiers import unused, variable
from pipegraph.codegen.names.source_statements import SourceStatements, named_by_caller
from pipegraph.graph.calls import CallTree, argument_place, functions_of
from pipegraph.graph.captured import Captured
from pipegraph.graph.custom_functions import applied_function
from pipegraph.graph.graph_text import value_text
from pipegraph.graph.model_structure import class_text, is_layer_of_torch
from pipegraph.graph.nodes import parameter_values, path_of
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.operators import OpOverload, operator_name


class ModelNames:
    """Chooses names from the model's source.

    Args:
        opened: the calls that stages replace by their contents.

    Attributes:
        returned_together: the values of calls that return several values. The statement with the call does not name
            each of them.
    """

    def __init__(self, captured: Captured, source: SourceStatements, opened: AbstractSet[str]) -> None:
        self._captured = captured
        self._source = source
        self._opened = opened
        self.returned_together: set[fx.Node] = set()
        self._parameter_values = parameter_values(captured.nodes)

    def parameters(self, call: CallTree, reads: Sequence[fx.Node]) -> list[str]:
        """Names for the parameters of ``forward``: the module's own names, or else the names of the values."""
        names: list[str] = []
        for node in reads:
            place = argument_place(node, call.call)
            name = place.name if place is not None else None
            if place is not None and place.part_of is not None:
                name = self._source.unpacked_parameter(call.fqn, *place.part_of)
            name = name or self.value_name(node)
            names.append(unused(variable(name or "x", "x"), names))
        return names

    def value_name(self, node: fx.Node, default: str | None = None) -> str:
        """The name of a value in the model's source; if it has none, ``default`` or the name of the operation."""
        if node.op != "call_function":
            return str(node.target).rpartition(".")[2]
        for _, fqn in node.meta["path"]:
            name = self._source.unpacked_name(fqn, node)
            if name is not None:
                return name
        # The statement around the outermost call that ends with the value has the name that says most to the caller.
        for call, fqn in node.meta["path"] if node not in self.returned_together else ():
            ends = all(call not in dict(user.meta.get("path", ())) for user in node.users)
            is_outermost = call not in self._opened or fqn.rpartition(".")[2].isdigit()
            chain = self._source.of_call(fqn, node) if ends and is_outermost else ()
            if chain and len(chain[-1].targets) == 1:
                return named_by_caller(chain) or chain[-1].targets[0]
        chain = tuple(statement for statement in self._source.of_operation(node) if not statement.is_of_torch)
        if chain and len(chain[-1].targets) == 1:
            return chain[-1].targets[0]
        for run in functions_of(node):
            if (name := self._source.name_of_result(run, node)) is not None:
                return name
        if operator_of(node).cast and isinstance(node.args[0], fx.Node):
            return self.value_name(node.args[0], default)  # a cast keeps the name
        if default or applied_function(node.target) is not None:
            return default or "result"
        if (name := self._source.recorded_name(node)) is not None:
            return name
        return operator_name(node.target)[0].strip("_") if isinstance(node.target, OpOverload) else "x"

    def is_whole(self, call: CallTree) -> bool:
        """Whether a stage holds all operations of a call."""
        return len(list(call.nodes())) == self._captured.operations_of[call.call]

    def part(self, call: CallTree) -> str:
        """ "Start", "Middle" or "End" for a part of a call, "" for a whole call."""
        if self.is_whole(call):
            return ""
        operations = [node for node in self._captured.nodes if call.call in dict(path_of(node))]
        nodes = set(call.nodes())
        if operations[-1] in nodes:
            return "End"
        # Several stages may make a mask, with which a module begins.
        first = next((node for node in operations if node in self._parameter_values), operations[0])
        return "Start" if first in nodes else "Middle"

    def docstring(self, call: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> str:
        """The docstring of a class: what its author says of it, its origin, a place in the model, and the shapes of
        inputs and outputs there."""
        module = self._captured.modules[call.fqn]
        source = f" ({prose(module.source)})" if module.source else ""
        summary = summary_of(type(module.module))
        origin = f"{summary}  {prose(module.class_name)}" if summary else prose(module.class_name)
        if not call.items:
            return f"{origin}{source}, as in {prose(call.fqn)}."
        where = "as in" if self.is_whole(call) else "a part of it, as in"
        shapes = signature(self.parameters(call, reads), reads, makes)
        return f"{origin}{source}, {where} {prose(call.fqn)}.  {shapes}."


_LONGEST_SIZE: Final = 48  # characters
_LONGEST_SUMMARY: Final = 300  # characters


def summary_of(module_class: type) -> str:
    """The first paragraph of the docstring of a class in its file; empty without one, or if it is a page."""
    text = None if is_layer_of_torch(module_class) else class_text(module_class)
    if text is None:
        return ""
    try:
        statement = ast.parse(textwrap.dedent(text.text)).body[0]
    except (SyntaxError, IndexError):
        return ""
    docstring = ast.get_docstring(statement) if isinstance(statement, ast.ClassDef) else None
    summary = prose(" ".join((docstring or "").split("\n\n")[0].split()).replace("—", "–"))
    if not summary or len(summary) > _LONGEST_SUMMARY or "\\" in summary:
        return ""
    return summary if summary.endswith((".", ":", "!", "?")) else f"{summary}."


def prose(text: str) -> str:
    """Text for a docstring or a comment: ASCII, … – and → stay, and all else is escaped."""
    return "".join(_prose_character(character) for character in text)


def _prose_character(character: str) -> str:
    if character in '\\"':
        return "\\\\" if character == "\\" else "'"
    if character in "…→–" or (character.isascii() and character.isprintable()):
        return character
    return character.encode("unicode_escape").decode("ascii").replace("\\", "\\\\")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def signature(parameters: Sequence[str], reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> str:
    """``h f32[8, 128, 512] → logits f32[8, 128, 10000]`` (results of a block have no name)."""
    inputs = ", ".join(f"{name} {shape_text(node)}" for name, node in zip(parameters, reads, strict=True))
    return f"{inputs or 'nothing'} → {', '.join(map(shape_text, makes))}"


def shape_text(node: fx.Node) -> str:
    """``f32[batch, 128, 512]``, with ``…`` for a size that takes long to say."""
    return value_text(node, _LONGEST_SIZE) if isinstance(node.meta.get("val"), torch.Tensor) else "tuple"
