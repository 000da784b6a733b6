"""Find the functions of a package that a call in its source may run.

self.attn = Attention()      in ``__init__``: the calls of ``self.attn`` may run ``Attention.forward``
for block in self.blocks:    calls of ``block`` may run the ``forward`` of any class in ``self.blocks``
rotate_half(x)               a function of the package
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Final

FORWARD: Final = "forward"
_SELF: Final = "self"
_ITERATION: Final = frozenset({"enumerate", "zip", "reversed", "range", "len", "list", "tuple", "isinstance", "iter"})
"""Functions that call none of the modules that they take."""
_VIEWS: Final = frozenset({"children", "items", "values"})
"""Methods that return the modules of a container."""

Key = tuple[str, str]
"""The class of a method and its name; "" and the name of a function."""


@dataclass(frozen=True)
class Body:
    """The statements of a function.

    Attributes:
        key: of the function.
        tree: the function, its parameters included.
    """

    key: Key
    tree: ast.FunctionDef

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of its statements."""
        return tuple(node for statement in self.tree.body for node in ast.walk(statement))

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """Its calls, each before those inside it."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def parents(self) -> Mapping[int, ast.AST]:
        """The node around each node, by its ``id``."""
        return {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def sources(self) -> Mapping[str, list[ast.expr]]:
        """What each variable is assigned from: its values, or what a loop iterates over."""
        sources: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            match node:
                case ast.For(target, value) | ast.comprehension(target, value) | ast.Assign([target], value):
                    for name, assigned in _assigned(target, value):
                        sources.setdefault(name, []).extend(assigned)
        return sources

    @cached_property
    def parameters(self) -> frozenset[str]:
        return frozenset(node.arg for node in ast.walk(self.tree.args) if isinstance(node, ast.arg))


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, list[ast.expr]]]:
    """Yield the variables of an assignment or a loop, each with the expressions that its values may be from."""
    match target, value:
        case ast.Tuple([_, _] as targets), ast.Call(ast.Name("enumerate"), [iterable, *_]):
            pairs: Iterable[tuple[ast.expr, list[ast.expr]]] = zip(targets, ([], [iterable]), strict=True)
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), iterables) if len(targets) == len(iterables):
            pairs = zip(targets, ([iterable] for iterable in iterables), strict=True)
        case _:
            pairs = [(target, [value])]
    for part, values in pairs:
        for name in ast.walk(part):
            if isinstance(name, ast.Name):
                yield name.id, values


class CallTargets:
    """The functions that the calls of a package may run.

    Args:
        bodies: its functions and methods.
        constructors: the statements of ``__init__`` of each class, by its name.
    """

    def __init__(self, bodies: Iterable[Body], constructors: Mapping[str, str]) -> None:
        self._bodies = {body.key: body for body in bodies}
        self._functions = {name for owner, name in self._bodies if not owner}
        self._forwards = frozenset(key for key in self._bodies if key[0] and key[1] == FORWARD)
        # Class ("" for any) and attribute → the functions that calls of a module in it may run.
        self._forwards_of: dict[tuple[str, str], set[Key]] = {}
        trees = {owner: ast.parse(text) for owner, text in constructors.items()}
        attributes = {owner: _attributes(tree) for owner, tree in trees.items()}
        for owner, tree in trees.items():
            for statement in tree.body:
                self._add(owner, _attributes(statement), _names(statement) & trees.keys())
            # ``Block(layer=[Attention()])``: an attribute of Block has the module, or one of a class that it makes.
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id in trees:
                    classes = {name for part in (*call.args, *call.keywords) for name in _names(part)} & trees.keys()
                    for maker in _made_by(call.func.id, trees) if classes else ():
                        self._add(maker, attributes[maker], classes)

    def _add(self, owner: str, attributes: Iterable[str], classes: Iterable[str]) -> None:
        for attribute in attributes:
            for place in ("", owner):
                self._forwards_of.setdefault((place, attribute), set()).update((name, FORWARD) for name in classes)

    def targets(self, body: Body, call: ast.Call) -> frozenset[Key]:
        """The functions that a call in a body may run and that take its arguments."""
        targets = (key for key in self._candidates(body, call.func) if key in self._bodies)
        return frozenset(key for key in targets if may_take(self._bodies[key].tree.args, call, bool(key[0])))

    def passed(self, body: Body) -> Iterator[Key]:
        """Yield the functions that a body passes on: their callers and arguments are not known."""
        for node in body.nodes:
            if not isinstance(node, (ast.Name, ast.Attribute)) or not isinstance(node.ctx, ast.Load):
                continue
            is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == _SELF
            if isinstance(node, ast.Attribute) and not is_own:  # ``self.attention.project(x)``: a method of a child
                yield from (key for key in self._bodies if key[0] and key[1] == node.attr != FORWARD)
            parent = body.parents.get(id(node))
            match parent:
                case ast.Call(func) if func is node:
                    continue
                case ast.Call(ast.Name(name)) if name in _ITERATION:
                    continue
                case ast.Attribute() | ast.Subscript() | ast.For() | ast.comprehension() | ast.Assign([ast.Name()]):
                    continue
                case ast.Compare() | ast.If() | ast.IfExp():
                    continue
            if isinstance(node, ast.Attribute):
                yield from self._modules_at(body, node)
                yield from ((body.key[0], node.attr),) if isinstance(node.value, ast.Name) else ()
            elif node.id in self._functions:
                yield "", node.id
            elif node.id in body.sources:
                yield from self._modules_in(body, body.sources[node.id])

    def _candidates(self, body: Body, function: ast.expr) -> frozenset[Key]:
        match function:
            case ast.Name(name) if name in body.sources:
                return frozenset(self._modules_in(body, body.sources[name])) or self._forwards
            case ast.Name(name) if name in body.parameters:
                return self._forwards
            case ast.Name(name):
                return frozenset({("", name)})
            case ast.Attribute(ast.Name(name), method) if name == _SELF and (body.key[0], method) in self._bodies:
                return frozenset({(body.key[0], method)})
            case ast.Attribute() | ast.Subscript():
                if modules := frozenset(self._modules_in(body, [function])):
                    return modules
                is_variable = isinstance(function.value, ast.Name) and function.value.id in {
                    *body.sources,
                    *body.parameters,
                }
                # ``modules[0](x)``, but not ``x.view(2)``
                return self._forwards if isinstance(function, ast.Subscript) and is_variable else frozenset()
        return self._forwards

    def _modules_in(self, body: Body, values: Iterable[ast.AST]) -> Iterator[Key]:
        """Yield the functions that calls of the modules in expressions may run. Most calls return no modules."""
        for node in values:
            match node:
                case ast.Call(ast.Name(name), arguments) if name in _ITERATION:
                    yield from self._modules_in(body, arguments)
                case ast.Call(ast.Attribute(container, method)) if method in _VIEWS:
                    yield from self._modules_in(body, [container])
                case ast.Call():
                    continue
                case ast.Attribute(owner):
                    yield from self._modules_at(body, node)
                    yield from self._modules_in(body, [owner])
                case _:
                    yield from self._modules_in(body, ast.iter_child_nodes(node))

    def _modules_at(self, body: Body, attribute: ast.Attribute) -> AbstractSet[Key]:
        """The functions that calls of the modules in an attribute may run."""
        is_own = isinstance(attribute.value, ast.Name) and attribute.value.id == _SELF
        return self._forwards_of.get((body.key[0] if is_own else "", attribute.attr), frozenset())


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _made_by(name: str, trees: Mapping[str, ast.Module]) -> set[str]:
    """A class, the classes that its constructor makes, and those that they make."""
    classes, waiting = set[str](), [name]
    while waiting:
        owner = waiting.pop()
        if owner not in classes:
            classes.add(owner)
            waiting += _names(trees[owner]) & trees.keys()
    return classes


def positional(arguments: ast.arguments, is_method: bool) -> list[str]:
    """The names of the parameters that take arguments without a name, without ``self``."""
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][is_method:]


def may_take(arguments: ast.arguments, call: ast.Call, is_method: bool) -> bool:
    """Return whether a function may be called with these arguments."""
    names = positional(arguments, is_method)
    named = {*names, *(argument.arg for argument in arguments.kwonlyargs)}
    has_star = any(isinstance(value, ast.Starred) for value in call.args)
    keywords = {keyword.arg for keyword in call.keywords}
    required = set(names[: len(names) - len(arguments.defaults)])
    required |= {
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    }
    passed = {*names[: len(call.args)], *keywords}
    return (
        (has_star or arguments.vararg is not None or len(call.args) <= len(names))
        and (arguments.kwarg is not None or keywords - {None} <= named)
        and (has_star or None in keywords or required <= passed)
    )
