"""The headers of functions: without annotations that a package does not have, and of parts of a ``forward``."""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from pipegraph.codegen.author_text.cut import TextLine, UnwritableError
from pipegraph.codegen.author_text.edits import Edit, Place, edited, end_of, on_one_line, present, start_of
from pipegraph.codegen.author_text.names import StagePart, import_of
from pipegraph.codegen.author_text.statements import SELF, header_end, parsed
from pipegraph.codegen.syntax.expressions import literal
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH

_CLASS_INDENT: Final = 4
_LISTED_RESULTS: Final = 6


def part_header(part: StagePart) -> list[str]:
    """``def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:``."""
    parameters = [SELF, *(f"{name}: Tensor" for name in part.parameters.values())]
    results = ", ".join(["Tensor"] * part.results) if part.results <= _LISTED_RESULTS else "Tensor, ..."
    returns = "Tensor" if part.results == 1 else f"tuple[{results}]"
    return wrapped_header("forward", parameters, f" -> {returns}")


def with_known_annotations(
    lines: Sequence[TextLine], tree: ast.FunctionDef, namespace: Mapping[str, Any]
) -> tuple[list[TextLine], ast.FunctionDef]:
    """A function without the annotations whose names a package does not have."""
    unknown = [holder for holder, annotation in _annotations(tree) if not _is_known(annotation, namespace)]
    if not unknown:
        return list(lines), tree
    for holder in unknown:
        if isinstance(holder, ast.FunctionDef):
            holder.returns = None
        else:
            holder.annotation = None
    changed = [*(TextLine(text, 0) for text in _header(tree)), *lines[header_end(lines, tree) :]]
    return changed, parsed(changed)


def as_method(
    lines: Sequence[TextLine], name: str, parameter: str, owner: object = None, header: ast.FunctionDef | None = None
) -> list[TextLine]:
    """A function as a method of the module that it takes.

    Args:
        name: of the method.
        parameter: the parameter that has the module.
        owner: the object whose method the function is; None for a function. Its plain attributes become values.
        header: the function whose parameters the method has, after which those come that only the other one has; None
            for its own parameters.

    Raises:
        UnwritableError: it reads something else of its owner, or it assigns the parameter.
    """
    tree = parsed(lines)
    outer = {} if owner is None else {tree.args.args[0].arg: owner}
    position = len(outer)
    if len(tree.args.args) <= position or tree.args.posonlyargs or tree.args.args[position].arg != parameter:
        raise UnwritableError("it takes its module after other arguments")
    edits = list[Edit]()
    attributes = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if not isinstance(node, ast.Name) or node.id not in {parameter, *outer}:
            continue
        if not isinstance(node.ctx, ast.Load):
            raise UnwritableError(f"it assigns {node.id}")
        if node.id == parameter:
            edits.append(Edit(start_of(node), end_of(node), SELF))
            continue
        attribute = attributes.get(id(node))
        value = getattr(owner, attribute.attr, owner) if attribute is not None else owner
        if attribute is None or not (value is None or isinstance(value, (bool, int, float, str))):
            raise UnwritableError(f"it reads {node.id}, an object")
        edits.append(Edit(start_of(attribute), end_of(attribute), literal(value).text))
    body = present(edited(lines, edits))[header_end(lines, tree) :]
    arguments, returns = tree.args, tree.returns
    del arguments.args[:position]
    if header is not None:
        arguments, returns = _with_more_parameters(header.args, arguments), header.returns
    arguments.args[0] = ast.arg(SELF)
    method = ast.FunctionDef(name, arguments, [ast.Pass()], [], returns)
    return [*(TextLine(text, 0) for text in _header(method)), *body]


def _with_more_parameters(arguments: ast.arguments, of_other: ast.arguments) -> ast.arguments:
    """The parameters of one function, and then those that only another one has."""
    combined = copy.deepcopy(arguments)
    names = {argument.arg for argument, _ in _parts(arguments)}
    for argument, default in _parts(of_other)[1:]:
        if argument.arg in names or argument in (of_other.vararg, of_other.kwarg):
            continue
        if default is None:
            raise UnwritableError(f"nothing is passed for {argument.arg}")
        combined.kwonlyargs.append(argument)
        combined.kw_defaults.append(default)
    return combined


def without_parameters(lines: Sequence[TextLine], names: AbstractSet[str]) -> list[TextLine]:
    """A function without some of its parameters."""
    remaining = list(lines)
    for name in sorted(names):
        arguments = parsed(remaining).args
        parts = _parts(arguments)
        at = next(at for at, (argument, _) in enumerate(parts) if argument.arg == name)
        start, end = _place_of(*parts[at])
        if at:
            start = _place_of(*parts[at - 1])[1]
        elif len(parts) > 1:
            end = _place_of(*parts[1])[0]
        remaining = _undocumented(present(edited(remaining, [Edit(start, end, "")])), name)
    tree = parsed(remaining)
    header = [line.text for line in remaining[: header_end(remaining, tree)]]
    text = on_one_line(header) if len(header) > 1 else None
    return remaining if text is None else [TextLine(text, remaining[0].number), *remaining[len(header) :]]


def _undocumented(lines: Sequence[TextLine], name: str) -> list[TextLine]:
    """A function without the entry of a parameter in its docstring: ``name (bool): …`` and the lines under it."""
    first = parsed(lines).body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return list(lines)
    entry = re.compile(rf"(\s+)`*{name}`*(\s*\(.*)?:")
    matches = ((at, entry.match(lines[at].text)) for at in range(first.lineno, (first.end_lineno or first.lineno) - 1))
    at, indent = next(((at, len(match[1])) for at, match in matches if match), (0, 0))
    if not at:
        return list(lines)
    end = at + 1
    while end < (first.end_lineno or 0) - 1 and len(lines[end].text) - len(lines[end].text.lstrip()) > indent:
        end += 1
    return [*lines[:at], *lines[end:]]


def _parts(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    """The parameters in order, each with its default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    parts: list[tuple[ast.arg, ast.expr | None]] = list(zip(positional, defaults, strict=True))
    parts += [(arguments.vararg, None)] if arguments.vararg is not None else []
    parts += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [*parts, *([(arguments.kwarg, None)] if arguments.kwarg is not None else [])]


def _place_of(argument: ast.arg, default: ast.expr | None) -> tuple[Place, Place]:
    """The places of the beginning and the end of a parameter."""
    last = argument if default is None else default
    return (argument.lineno, argument.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)


def _header(tree: ast.FunctionDef) -> list[str]:
    """The header of a function on one line, or with the parameters on lines of their own."""
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    return wrapped_header(tree.name, _parameters(tree.args), returns)


def wrapped_header(name: str, parameters: Sequence[str], returns: str) -> list[str]:
    joined = ", ".join(parameters)
    for inside in ([joined], [f"{parameter}," for parameter in parameters]):
        if inside == [joined] and len(line := f"def {name}({joined}){returns}:") <= LINE_LENGTH - _CLASS_INDENT:
            return [line]
        lines = [f"def {name}(", *(f"    {line}" for line in inside), f"){returns}:"]
        if all(len(line) <= LINE_LENGTH - _CLASS_INDENT for line in lines):
            break
    return lines


def _parameters(arguments: ast.arguments) -> list[str]:
    """The parameters of a function: ``x: Tensor``, ``scale: float = 1.0``, ``*args``."""

    def parameter(argument: ast.arg, default: ast.expr | None) -> str:
        annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
        equals = " = " if annotation else "="
        return f"{argument.arg}{annotation}" + (f"{equals}{ast.unparse(default)}" if default is not None else "")

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    parameters = [parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parameters.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parameters.append(f"*{parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += [parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        parameters.append(f"**{parameter(arguments.kwarg, None)}")
    return parameters


def _annotations(tree: ast.FunctionDef) -> Iterator[tuple[Any, ast.expr]]:
    if tree.returns is not None:
        yield tree, tree.returns
    for node in ast.walk(tree.args):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node, node.annotation


def _is_known(annotation: ast.expr, namespace: Mapping[str, Any]) -> bool:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return False
        if isinstance(node, ast.Name):
            if node.id in namespace:
                if import_of(node.id, namespace[node.id]) is None:
                    return False
            elif not hasattr(builtins, node.id):
                return False
    return True
