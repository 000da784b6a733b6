"""Questions about the statements of an author's text."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from types import FunctionType
from typing import Final

from torch import nn

from pipegraph.codegen.author_text.cut import TextLine, UnwritableError
from pipegraph.graph.captured import LineStep

SELF: Final = "self"


def parsed(lines: Sequence[TextLine]) -> ast.FunctionDef:
    try:
        tree = ast.parse("\n".join(line.text for line in lines)).body[0]
    except (SyntaxError, IndexError) as error:
        raise UnwritableError("its text cannot be parsed after it was cut") from error
    assert isinstance(tree, ast.FunctionDef)
    return tree


def header_end(lines: Sequence[TextLine], tree: ast.FunctionDef) -> int:
    """The number of lines before the first statement of a function, and before the comments that precede it."""
    first = tree.body[0].lineno
    return next(line for line in range(first - 1, 0, -1) if lines[line - 1].text.split("#")[0].rstrip().endswith(":"))


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


_PLAIN_CALLS: Final = frozenset({"size", "dim", "numel", "stride", "len", "int", "min", "max"})


def assigns_sizes(statement: ast.stmt) -> bool:
    """Return whether a statement on one line does nothing but assign sizes, attributes and the like to variables."""
    if not isinstance(statement, ast.Assign) or statement.lineno != statement.end_lineno:
        return False
    targets = statement.targets[0].elts if isinstance(statement.targets[0], ast.Tuple) else statement.targets
    calls = (node.func for node in ast.walk(statement.value) if isinstance(node, ast.Call))
    names = (call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls)
    are_names = len(statement.targets) == 1 and all(isinstance(target, ast.Name) for target in targets)
    return are_names and all(name in _PLAIN_CALLS for name in names)


def returns(statement: ast.stmt) -> bool:
    is_function = isinstance(statement, ast.FunctionDef)
    return not is_function and any(isinstance(node, ast.Return) for node in ast.walk(statement))


def sets_attributes(statement: ast.stmt) -> bool:
    """Return whether a statement sets an attribute of the module, such as ``self.hidden = hidden``."""
    attributes = (node for node in ast.walk(statement) if isinstance(node, ast.Attribute))
    return any(is_self(node.value) and not isinstance(node.ctx, ast.Load) for node in attributes)


def attributes_set_by(module_class: type, steps: Iterable[LineStep]) -> frozenset[str]:
    """The attributes that the methods of a class of modules set on the lines that ran.

    A method such as ``set_input_embeddings``, which ``forward`` does not call, sets none.
    """
    lines = {(step.file, line) for step in steps for line in (step.start, step.end)}
    files = {file for file, _ in lines}
    functions = (inspect.unwrap(value) for base in module_class.__mro__ for value in vars(base).values())
    codes = (function.__code__ for function in functions if isinstance(function, FunctionType))
    return frozenset(
        instruction.argval
        for code in codes
        if code.co_filename in files
        for instruction in dis.get_instructions(code)
        if instruction.opname == "STORE_ATTR"
        and instruction.positions is not None
        and (code.co_filename, instruction.positions.lineno) in lines
    )


_SEVERAL_TIMES: Final = (ast.comprehension, ast.Lambda)


def called_once(statement: ast.stmt, function: ast.AST) -> list[str]:
    """The attributes that a simple statement calls once, and that no other statement of the function reads: ``attend``
    of ``x = x + self.attend(x)``."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)):
        return []
    if any(isinstance(node, _SEVERAL_TIMES) for node in ast.walk(statement)):
        return []
    functions = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    called = {call.attr for call in functions if isinstance(call, ast.Attribute) and is_self(call.value)}
    reads = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute) and is_self(node.value)]
    return [name for name in called if reads.count(name) == 1]


def first_line_of(statement: ast.stmt) -> int:
    return min([statement.lineno, *(decorator.lineno for decorator in getattr(statement, "decorator_list", ()))])


def variables(tree: ast.AST, context: type[ast.expr_context]) -> frozenset[str]:
    """The variables that a statement reads or stores. ``x += 1`` does both, ``x[0] = 1`` reads ``x``, and
    ``x.append(1)`` stores it."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and context is ast.Store}
    if context is ast.Load:
        targets = (node.target for node in ast.walk(tree) if isinstance(node, ast.AugAssign))
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    else:
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        owners = (call.value for call in calls if isinstance(call, ast.Attribute) and call.attr in _CHANGES)
        names |= {owner.id for owner in owners if isinstance(owner, ast.Name)}
    return frozenset(names)


_CHANGES: Final = frozenset(
    {"append", "clear", "extend", "insert", "pop", "register_hook", "remove", "reverse", "setdefault", "update"}
)
"""Methods that change a list, a dict or a set: a variable that has one is another value afterwards. So is a tensor with
a hook."""


_RESHAPES: Final = frozenset({"view", "reshape", "unflatten", "expand", "repeat"})
"""Methods that take sizes."""
_OPENED: Final = frozenset({"view", "reshape", "unflatten"})
"""Those in which one size may be -1."""


def may_divide_features(module: nn.Module, function: ast.AST) -> bool:
    """Return whether a module has linear layers whose features ranks along `tp` may divide.

    They cannot if the function splits features at numbers, as ``x.split([self.width, self.heads], dim=-1)`` does.
    """
    return any(isinstance(child, nn.Linear) for child in module.children()) and not _splits_at_numbers(function)


@lru_cache(maxsize=256)  # asked for by every statement of the function
def _splits_at_numbers(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "split"
        and any(isinstance(argument, (ast.List, ast.Tuple)) for argument in node.args)
        for node in ast.walk(function)
    )


@lru_cache(maxsize=256)
def _shapes_assigned(function: ast.AST) -> Mapping[str, list[ast.expr]]:
    """The variables that a function assigns a tuple → its parts."""
    return {
        node.targets[0].id: list(node.value.elts)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)
    }


def divides_features(
    module: nn.Module, tree: ast.AST, function: ast.AST, replicated: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether a statement has numbers of features in its code, such as ``x.view(b, t, self.heads, -1)``.

    Ranks along `tp` have some of the features of a linear layer, and of the heads. Statements that are written from the
    graph name the sizes that no rank divides.

    Args:
        module: the module that has the statement.
        tree: the statement.
        function: the function that it is in, which may assign a shape: ``shape = (b, t, self.heads, self.width)``.
        replicated: variables of the statement that have all features on every rank.
    """
    if not may_divide_features(module, function):
        return False
    shapes = _shapes_assigned(function)
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr not in _RESHAPES
            or (isinstance(node.func.value, ast.Name) and node.func.value.id in replicated)
        ):
            continue
        match node.args:
            case [ast.Name(id=name) | ast.Starred(value=ast.Name(id=name))]:
                sizes = shapes.get(name, node.args)
            case [ast.Tuple(elts=sizes)]:
                pass
            case [_, ast.Tuple(elts=[ast.UnaryOp(), _])] if node.func.attr == "unflatten":
                continue  # x.unflatten(-1, (-1, self.head_dim)): ranks divide the number of heads
            case [_, ast.Tuple(elts=sizes)] if node.func.attr == "unflatten":
                pass
            case _:
                sizes = node.args
        if _names_features(sizes, may_be_open=node.func.attr in _OPENED):
            return True
    return False


def unchanged_arguments(function: ast.FunctionDef, line: int) -> frozenset[str]:
    """The arguments of a function to which no line before this one assigns something else."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name) and is_stored(node))
    changed = {node.id for node in nodes if node.lineno < line}
    return frozenset(argument.arg for argument in function.args.args) - changed


def opened_sizes(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yield the sizes of reshapes that may stay open, so that these name no numbers of features.

    Of ``x.view(b, t, self.heads, self.head_dim)`` it is the number of heads, of ``x.reshape(b, t, self.width)`` the
    width: ranks along `tp` divide these.
    """
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}  # which may be -1
    for node in ast.walk(function):
        match node:
            case ast.Call(ast.Attribute(attr="view" | "reshape"), [ast.Tuple(elts=sizes)], []):
                pass
            case ast.Call(ast.Attribute(attr="view" | "reshape"), [_, _, *_] as sizes, []):
                pass
            case ast.Call(ast.Attribute(attr="unflatten"), [_, ast.Tuple(elts=sizes)], []):
                pass
            case _:
                continue
        names = {size.id for size in sizes if isinstance(size, ast.Name)}
        if names & parameters or any(isinstance(size, ast.UnaryOp) for size in sizes):
            continue
        last = len(sizes) - 1
        match [at for at, size in enumerate(sizes) if _is_number_of_features(size)]:
            case [at] if at >= last - 1:
                yield sizes[at]
            case [at, second] if (at, second) == (last - 1, last):
                yield sizes[at]
            case [] if last == 2 and all(isinstance(size, ast.Name) for size in sizes):
                yield sizes[last]


def _names_features(sizes: Sequence[ast.expr], may_be_open: bool) -> bool:
    """Return whether sizes leave no dimension open that may be, or name a number other than a size of a tensor.

    Of ``x.view(*rows, -1, self.head_dim)`` ranks divide the dimension that is open, which is the number of heads.
    ``x.view(*rows, self.heads, -1)`` leaves the other one open, as what is written from the graph would.
    """
    is_open = [isinstance(size, ast.UnaryOp) for size in sizes]
    if may_be_open and is_open[-1:] == [True]:
        return False
    if len(sizes) > 2 and is_open.index(True) == len(sizes) - 2 if True in is_open else False:
        sizes = sizes[:-1]
    leaves_none = may_be_open and len(sizes) > 1 and True not in is_open
    return leaves_none or any(map(_is_number_of_features, sizes))


def _is_number_of_features(argument: ast.expr) -> bool:
    """Return whether an argument is more than 1, and not a size of a tensor: ``self.heads``, ``3 * width``."""
    match argument:
        case ast.Constant(value=int(value)):
            return value > 1
        case ast.UnaryOp():
            return False
        case ast.Name() | ast.Subscript() | ast.Starred() | ast.Call(ast.Attribute(attr="size")):
            return False  # rows, x.shape[1], *x.shape[:-1], x.size(1)
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return any(not isinstance(part, ast.Constant) and _is_number_of_features(part) for part in (left, right))
        case ast.BinOp(left, _, right):
            return _is_number_of_features(left) or _is_number_of_features(right)
    return True


def is_stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == SELF


def is_super(node: ast.expr) -> bool:
    """Return whether an expression is ``super()``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args


def tests_attribute(node: ast.Call) -> bool:
    """Return whether a call is ``hasattr(self, "name")``."""
    match node:
        case ast.Call(ast.Name("hasattr"), [ast.Name() as owner, ast.Constant(str())]):
            return is_self(owner)
    return False
