"""Call a method directly where the author calls another one that only passes its arguments on.

q, k, v = self.projections(x)                       q, k, v = self.separate_projections(x)

def projections(self, x, mask=None):                (nothing)
    return self.separate_projections(x, mask)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from pipegraph.codegen.author_text.cut import without_docstring
from pipegraph.codegen.syntax.statements import ClassSource, SourceText


def with_direct_calls(classes: Sequence[ClassSource]) -> list[ClassSource]:
    """Leave out the methods that only call another method of their class with the same parameters.

    A method that another class calls stays.
    """
    texts = [cls.author_text for cls in classes if cls.author_text is not None]
    outside = {name for text in texts for function in text.functions for name in _attributes_of_others(function)}

    def changed(cls: ClassSource) -> ClassSource:
        text = cls.author_text
        while text is not None and (pair := next(_intermediate_methods(text, outside), None)) is not None:
            text = _without_method(text, *pair)
        return cls if text is None or text is cls.author_text else replace(cls, forward=(text, *cls.forward[1:]))

    return list(map(changed, classes))


def _attributes_of_others(function: str) -> Iterator[str]:
    """Yield the attributes that a function reads of anything but ``self``."""
    for node in ast.walk(ast.parse(function)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.attr


def _intermediate_methods(text: SourceText, outside: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    """Yield the position of each such method, and the name of the method that it calls.

    Args:
        outside: the names that stay.
    """
    trees = [ast.parse(function).body[0] for function in text.functions]
    methods = {tree.name: tree for tree in trees if isinstance(tree, ast.FunctionDef)}
    for position, tree in enumerate(trees):
        if position == 0 or not isinstance(tree, ast.FunctionDef) or tree.decorator_list or tree.name in outside:
            continue
        match without_docstring(tree.body):
            case [ast.Return(ast.Call(ast.Attribute(ast.Name("self"), name), arguments, []))] if name in methods:
                target = methods[name]
                passed = ["self", *(argument.id for argument in arguments if isinstance(argument, ast.Name))]
                is_alike = _parameters(target) == _parameters(tree) and _defaults(target) == _defaults(tree)
                passes_all = passed == _parameters(tree) and len(passed) == len(arguments) + 1
                if name != tree.name and not target.decorator_list and is_alike and passes_all:
                    yield position, name


def _parameters(tree: ast.FunctionDef) -> list[str]:
    """The names of all parameters."""
    return [node.arg for node in ast.walk(tree.args) if isinstance(node, ast.arg)]


def _defaults(tree: ast.FunctionDef) -> list[str]:
    return [ast.dump(default) for default in tree.args.defaults]


def _without_method(text: SourceText, position: int, target: str) -> SourceText:
    counts = [function.count("\n") + 1 for function in text.functions]
    first = sum(counts[:position])
    removed = ast.parse(text.functions[position]).body[0]
    assert isinstance(removed, ast.FunctionDef)
    calls = re.compile(rf"\bself\.{removed.name}\b")
    functions = [calls.sub(f"self.{target}", function) for function in text.functions]
    del functions[position]
    places = (*text.places[:first], *text.places[first + counts[position] :])
    return replace(text, functions=tuple(functions), places=places)
