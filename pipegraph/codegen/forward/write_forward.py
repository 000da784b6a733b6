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
    hints: Mapping[fx.Node, str] | None = None,
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
        hints: names for values that have none in the source.
        numbers: writes numbers as the model's source does. It keeps the attributes that it wrote.

    Raises:
        UnknownSizeError: no value of the class has a size that an operation names.
    """
    sizes: list[sympy.Expr] = []
    size_names: dict[tuple[int, int], str] = {}
    while True:
        try:
            written = ForwardWriter(
                contents, tree, parameters, source, hints or {}, numbers, (), sizes, size_names
            ).write()
        except ReplacedInputError as error:
            size_names[error.place] = error.name
        except UnknownSizeError as error:
            # Of `(rows - 1) // 2 + 1` no value may have `rows`, and an input the whole.
            requested_size = next((size for size in (error.size, error.whole) if size not in (None, *sizes)), None)
            if requested_size is None:
                raise
            sizes.append(requested_size)
        except UnrolledLoopError as error:
            contents = replace(contents, items=tuple(expanded(contents.items, error.loop)))
        else:
            break
    if not written.clashes:
        return written
    try:
        alternative = ForwardWriter(
            contents, tree, parameters, source, hints or {}, numbers, written.clashes, sizes, size_names
        ).write()
    except (UnknownSizeError, ReplacedInputError):
        return written
    return alternative if len(alternative.clashes) < len(written.clashes) else written
