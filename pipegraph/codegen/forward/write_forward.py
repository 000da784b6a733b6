"""The ``forward`` of a class, written until its names and sizes are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
from torch import fx

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.forward.items import ClassContents
from pipegraph.codegen.forward.source_numbers import HelperNumbers, ModuleNumbers
from pipegraph.codegen.forward.statement_loop_writer import UnrolledLoopError, expanded
from pipegraph.codegen.forward.tensor_attributes import ReplacedInputError
from pipegraph.codegen.forward.writer import ForwardWriter, WrittenForward
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.graph.symbolic_size import UnknownSizeError


def write_forward(
    contents: ClassContents,
    tree: ModuleTree,
    parameters: Sequence[str],
    source: SourceStatements | None,
    wanted: Mapping[fx.Node, str] | None = None,
    numbers: ModuleNumbers | HelperNumbers | None = None,
) -> WrittenForward:
    """Write one ``forward``.

    If two values of one name are needed at once, one of them gets another name: the name of the parameter under which a
    module takes it, if that helps, or else one with a number.

    Args:
        contents: the items of the class.
        tree: the modules of the class.
        parameters: the names of the parameters.
        source: finds names and line breaks in the model's source. Without it, every value has a line of its own and a
            neutral name, so that two classes of equal structure have equal statements.
        wanted: names for values that have none in the source.
        numbers: writes numbers as the model's source does. It keeps the attributes that it wrote.

    Raises:
        UnknownSizeError: no value of the class has a size that an operation names.
    """
    sizes: list[sympy.Expr] = []
    kept: dict[tuple[int, int], str] = {}
    while True:
        try:
            written = ForwardWriter(contents, tree, parameters, source, wanted or {}, numbers, (), sizes, kept).write()
        except ReplacedInputError as error:
            kept[error.place] = error.name
        except UnknownSizeError as error:
            # Of `(rows - 1) // 2 + 1` no value may have `rows`, and an input the whole.
            asked = next((each for each in (error.size, error.whole) if each not in (None, *sizes)), None)
            if asked is None:
                raise
            sizes.append(asked)
        except UnrolledLoopError as error:
            contents = replace(contents, items=tuple(expanded(contents.items, error.loop)))
        else:
            break
    if not written.clashes:
        return written
    try:
        other = ForwardWriter(
            contents, tree, parameters, source, wanted or {}, numbers, written.clashes, sizes, kept
        ).write()
    except (UnknownSizeError, ReplacedInputError):
        return written
    return other if len(other.clashes) < len(written.clashes) else written
