"""Leave out what a text does in vain after it was cut to the branches that ran.

scores = apply_mask(scores, mask)     of apply_mask, ``return scores`` is left      (nothing)
cached = None                         overwritten before it is read                 (nothing)
table(x, interleaved=False)           what is left of table does not read it        table(x)
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from pipegraph.codegen.author_text.cut import FunctionCut, TextLine, UnwritableError, without_docstring
from pipegraph.codegen.author_text.edits import Edit, edited, end_of, on_one_line, present, side_edits, start_of
from pipegraph.codegen.author_text.statements import assigns_sizes, is_stored, parsed, variables
from pipegraph.graph.captured import ExecutedLines
from pipegraph.graph.export.executed_lines import is_of_model

_NO_PARAMETERS: Final = frozenset[str]()


@dataclass(frozen=True)
class Callee:
    """What is left of a function.

    Attributes:
        function: the function.
        result: the parameter that it returns and does nothing else, or "None"; empty if it does anything.
        unread: the parameters that it does not read.
    """

    function: FunctionType
    result: str
    unread: frozenset[str]


class CalledFunctions:
    """What is left of the functions of a model.

    Args:
        lines: that ran.
    """

    def __init__(self, lines: ExecutedLines) -> None:
        self._lines = lines
        self._callees: dict[FunctionType, Callee] = {}

    def callee(self, function: Any) -> Callee | None:
        """What is left of a function; None for one of torch, and for one whose text cannot be cut."""
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or not is_of_model(function.__code__.co_filename):
            return None
        if function not in self._callees:
            self._callees[function] = Callee(function, "", _NO_PARAMETERS)  # for one that calls itself
            try:
                tree = parsed(self.text_of(function))
            except UnwritableError:
                pass
            else:
                self._callees[function] = Callee(function, _result(tree), _unread_parameters(tree))
        return self._callees[function]

    def text_of(self, function: FunctionType) -> list[TextLine]:
        """A function, cut to what ran, without what it does in vain. Raises UnwritableError."""
        code = function.__code__
        steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        return self.simplified(FunctionCut(code.co_filename, code.co_firstlineno, steps).lines, function)

    def simplified(self, lines: Sequence[TextLine], function: FunctionType) -> list[TextLine]:
        """A function without what it does in vain.

        Args:
            lines: of the function, cut to what ran.
        """
        code, namespace = function.__code__, function.__globals__
        constants = self._lines.constants.get((code.co_filename, code.co_firstlineno), {})
        tree = parsed(lines)
        local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and is_stored(node)}
        local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}

        def callee_of(call: ast.Call) -> Callee | None:
            name = call.func.id if isinstance(call.func, ast.Name) and call.func.id not in local else ""
            return self.callee(namespace.get(name))

        return simplified_text(lines, constants, callee_of)


def simplified_text(
    lines: Sequence[TextLine],
    constants: Mapping[str, bool | None],
    callee_of: Callable[[ast.Call], Callee | None] = lambda call: None,
) -> list[TextLine]:
    """A function without what it does in vain.

    Args:
        constants: the parameters that always have one value, by name.
        callee_of: returns what is left of the function that a call runs; None if that is not known.
    """
    remaining = list(lines)
    while True:
        tree = parsed(remaining)
        edits = (
            _edits_of_constants(remaining, tree, constants)
            or _edits_of_calls(tree, callee_of)
            or _edits_of_unread_targets(tree)
        )
        if edits:
            remaining = with_short_statement(present(edited(remaining, edits)), edits[0].start[0])
            continue
        statement = next(_vain_statements(tree), None)
        if statement is None:
            return remaining
        remaining = without_statement(remaining, statement)


def without_statement(lines: Sequence[TextLine], statement: ast.stmt) -> list[TextLine]:
    """A function without a statement, and without the comments about it alone."""
    remaining = list(lines)
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    if not "".join(line.text for line in remaining[last : last + 1]).strip():
        while remaining[first - 1].text.lstrip().startswith("#"):
            first -= 1
        previous = remaining[first - 1].text.strip()
        last += not previous or previous.endswith(":")  # of two empty lines one is left
    del remaining[first:last]
    return remaining


# ---- functions -------------------------------------------------------------------------------------------------------


def _result(tree: ast.FunctionDef) -> str:
    """The parameter that a function returns and does nothing else; "None" for None, empty for anything else."""
    match without_docstring(tree.body):
        case [ast.Return(ast.Name(id=name))] if any(argument.arg == name for argument in _named_parameters(tree)):
            return name
        case [ast.Return(None | ast.Constant(None))] | [ast.Pass()]:
            return "None"
    return ""


def _unread_parameters(tree: ast.FunctionDef) -> frozenset[str]:
    read = {node.id for statement in tree.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    after_star = tree.args.vararg is not None or tree.args.kwonlyargs  # what follows a star stays
    return frozenset() if after_star else frozenset(argument.arg for argument in tree.args.args) - read


def _named_parameters(tree: ast.FunctionDef) -> list[ast.arg]:
    return [*tree.args.args, *tree.args.kwonlyargs]


# ---- constants -------------------------------------------------------------------------------------------------------


def _edits_of_constants(
    lines: Sequence[TextLine], tree: ast.FunctionDef, arguments: Mapping[str, bool | None]
) -> list[Edit]:
    """The edits of one expression that is decided by arguments that are constants; none if there is no such expression.

    x if mask is None else x + mask      x
    mask is not None                     False
    torch.arange(length) + cached        torch.arange(length), of ``cached = 0``
    """
    constants = _constants(tree, arguments)
    nodes = [node for statement in tree.body for node in ast.walk(statement)] if constants else []
    operands = {id(value) for node in nodes if isinstance(node, ast.BoolOp) for value in node.values}
    for node in nodes:
        if isinstance(node, ast.IfExp) and (truth := _truth(node.test, constants)) is not None:
            return side_edits(lines, node, node.body if truth else node.orelse)
        if (
            isinstance(node, (ast.Compare, ast.UnaryOp, ast.BoolOp))
            and id(node) not in operands
            and (truth := _truth(node, constants)) is not None
        ):
            return [Edit(start_of(node), end_of(node), str(truth))]
        match node:
            case ast.BinOp(left, ast.Add(), ast.Name(name) as right) if _is_zero(constants.get(name)):
                line = lines[right.lineno - 1].text.encode()
                if left.end_lineno == right.lineno and line[left.end_col_offset : right.col_offset].strip() == b"+":
                    return [Edit(end_of(left), end_of(node), "")]
    return []


def _is_zero(value: int | None) -> bool:
    return type(value) is int and value == 0  # not False


def _constants(tree: ast.FunctionDef, arguments: Mapping[str, bool | None]) -> dict[str, int | None]:
    """The arguments and variables that have one value all along."""
    nodes = [node for statement in tree.body for node in ast.walk(statement)]
    stores = Counter(node.id for node in nodes if isinstance(node, ast.Name) and is_stored(node))
    stores.update(node.arg for node in nodes if isinstance(node, ast.arg))  # of functions inside
    constants: dict[str, int | None] = {name: value for name, value in arguments.items() if name not in stores}
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Constant(None | int(0 | 1) as value)) if stores[name] == 1:
                constants[name] = value
    return constants


def _truth(test: ast.expr, constants: Mapping[str, int | None]) -> bool | None:
    """Whether a test holds; None if constants do not say."""
    match test:
        case ast.Name(name) if name in constants:
            return bool(constants[name])
        case ast.UnaryOp(ast.Not(), operand) if (truth := _truth(operand, constants)) is not None:
            return not truth
        case ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot() as comparison], [ast.Constant(None)]):
            return (constants[name] is None) is isinstance(comparison, ast.Is) if name in constants else None
        case ast.BoolOp(operator, values):
            truths = [_truth(value, constants) for value in values]
            decisive = isinstance(operator, ast.Or)  # one of these decides, or all of the others
            return decisive if decisive in truths else None if None in truths else not decisive
    return None


# ---- calls -----------------------------------------------------------------------------------------------------------


def _edits_of_calls(tree: ast.FunctionDef, callee_of: Callable[[ast.Call], Callee | None]) -> list[Edit]:
    """The edits of one call of a function of which little is left; none if there is no such call."""
    for statement in tree.body:
        for node in ast.walk(statement):
            callee = callee_of(node) if isinstance(node, ast.Call) else None
            if callee is None or not isinstance(node, ast.Call):
                continue
            arguments = _arguments_by_name(node, callee.function)
            if arguments is None:
                continue
            if callee.result == "None" and all(map(is_pure, arguments.values())):
                return [Edit(start_of(node), end_of(node), "None")]
            returned = arguments.get(callee.result)
            if returned is not None and all(is_pure(value) for value in arguments.values() if value is not returned):
                return [Edit(start_of(node), start_of(returned), ""), Edit(end_of(returned), end_of(node), "")]
            unread = [value for name, value in arguments.items() if name in callee.unread]
            if unread and all(map(is_pure, unread)):
                return _without_arguments(node, unread)
    return []


def _arguments_by_name(call: ast.Call, function: FunctionType) -> dict[str, ast.expr] | None:
    """The arguments of a call by the names of the parameters; None if they are not known."""
    if any(isinstance(value, ast.Starred) for value in call.args):
        return None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    positional = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(call.args) > len(positional):
        return None
    return {**dict(zip(positional, call.args, strict=False)), **keywords}


def _without_arguments(call: ast.Call, arguments: Sequence[ast.expr]) -> list[Edit]:
    """The edit that leaves an argument out of a call: the first of them."""
    parts: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    parts.sort(key=start_of)
    at = next(at for at, part in enumerate(parts) if getattr(part, "value", part) in arguments or part in arguments)
    if at:
        return [Edit(end_of(parts[at - 1]), end_of(parts[at]), "")]
    if len(parts) > 1:
        return [Edit(start_of(parts[0]), start_of(parts[1]), "")]
    line, column = end_of(call)
    return [Edit(start_of(parts[0]), (line, column - 1), "")]


_VIEWS: Final = frozenset(
    [
        *("contiguous", "detach", "float", "flatten", "permute", "reshape", "size", "squeeze", "to", "transpose"),
        *("unsqueeze", "view"),
    ]
)
"""Methods of tensors that change nothing and draw no random numbers."""


def is_pure(expression: ast.expr) -> bool:
    """Return whether an expression does nothing but give a value."""
    calls = (node for node in ast.walk(expression) if isinstance(node, ast.Call))
    is_walrus = any(isinstance(node, (ast.NamedExpr, ast.Yield, ast.Await)) for node in ast.walk(expression))
    return not is_walrus and all(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in _VIEWS
        and not (isinstance(call.func.value, ast.Name) and call.func.value.id == "self")
        for call in calls
    )


def with_short_statement(lines: Sequence[TextLine], number: int) -> list[TextLine]:
    """A function, with the statement around a line on one line if it fits there after an edit."""
    tree = parsed(lines)
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    statement = next((node for node in around if node.lineno <= number <= (node.end_lineno or 0)), None)
    if statement is None:
        return list(lines)
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    text = on_one_line([line.text for line in lines[first:last]])
    if last - first == 1 or text is None:
        return list(lines)
    joined = tuple(number for line in lines[first:last] for number in line.numbers)[1:]
    changed = [*lines[:first], TextLine(text, lines[first].number, joined), *lines[last:]]
    return changed if ast.dump(parsed(changed)) == ast.dump(tree) else list(lines)


# ---- statements ------------------------------------------------------------------------------------------------------


def _edits_of_unread_targets(tree: ast.FunctionDef) -> list[Edit]:
    """The edits that leave a constant that is not read out of a statement: ``size, state = None, None`` is
    ``state = None``."""
    read = variables(tree, ast.Load)
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Tuple(elts=[_, _] as targets) as target], ast.Tuple(elts=[_, _] as values) as value):
                pass
            case _:
                continue
        used = [at for at, element in enumerate(targets) if getattr(element, "id", None) in read]
        if (
            len(used) == 1
            and all(isinstance(element, ast.Name) for element in targets)
            and all(isinstance(element, ast.Constant) for element in values)
        ):
            at = used[0]
            return [
                Edit(start_of(target), end_of(target), ast.unparse(targets[at])),
                Edit(start_of(value), end_of(value), ast.unparse(values[at])),
            ]
    return []


def _vain_statements(tree: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Yield statements that may be left out, the first of which is certain to be."""
    nodes = list(ast.walk(tree))
    changed = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    names = (node for node in nodes if isinstance(node, ast.Name))
    read = {name.id for name in names if not isinstance(name.ctx, ast.Store) or id(name) in changed}
    for block in _blocks(nodes):
        for at, statement in enumerate(block):
            is_alone = len(block) == 1
            if not is_alone and (
                _is_self_assignment(statement)
                or _assigns_unread(statement, read)
                or (block is tree.body and _is_overwritten(statement, block[at + 1 :]))
            ):
                yield statement
    for block in _blocks(nodes):
        yield from (statement for statement in block if len(block) > 1 and _is_vain_if(statement, read))


def _blocks(nodes: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    for node in nodes:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _is_self_assignment(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign([ast.Name(id=target)], ast.Name(id=name)):
            return target == name
    return False


def _assigns_unread(statement: ast.stmt, read: AbstractSet[str]) -> bool:
    """Return whether a statement assigns a variable that nothing reads, and does nothing else."""
    match statement:
        case ast.Assign([ast.Name(id=name)], value) if name not in read:
            return assigns_sizes(statement) or not any(isinstance(node, ast.Call) for node in ast.walk(value))
    return False


def _is_vain_if(statement: ast.stmt, read: AbstractSet[str]) -> bool:
    """Return whether an ``if`` does nothing but assign a variable that nothing reads."""
    match statement:
        case ast.If(test, [inner], []):
            return is_pure(test) and (_assigns_unread(inner, read) or _is_self_assignment(inner))
    return False


def _is_overwritten(statement: ast.stmt, following: Sequence[ast.stmt]) -> bool:
    """Return whether a statement assigns constants to variables that are assigned again before they are read."""
    match statement:
        case ast.Assign(targets, ast.Constant()):
            return all(isinstance(target, ast.Name) and _is_dead(target.id, following) for target in targets)
    return False


def _is_dead(name: str, following: Sequence[ast.stmt]) -> bool:
    for statement in following:
        uses = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        is_changed = isinstance(statement, ast.AugAssign)
        if (is_changed and uses) or any(isinstance(use.ctx, ast.Load) for use in uses):
            return False
        if uses and isinstance(statement, ast.Assign):
            return True
        if uses:
            return False
    return True
