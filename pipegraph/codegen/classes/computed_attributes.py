"""Write the numbers that the author's constructor computes as it computes them: ``self.scale = 64**-0.5``."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from functools import partial

from torch import nn

from pipegraph.codegen.classes.constructor_arguments import author_numbers
from pipegraph.codegen.forward.source_numbers import Evaluation, Number, attribute_numbers, evaluated
from pipegraph.codegen.names.author_arguments import attributes_assigned, author_arguments_of, default_numbers
from pipegraph.codegen.syntax.expressions import Expression, Literal, call, literal
from pipegraph.codegen.syntax.statements import Statement


def with_computed_numbers(
    attributes: Mapping[str, Expression], module: nn.Module, init: Iterable[Statement]
) -> dict[str, Expression]:
    """The values of attributes, with fractions as the constructor of the module computes them.

    Args:
        attributes: name → value.
        module: the module.
        init: the statements that make its children: the constructor has names for their numbers.
    """
    fractions = {name for name, value in attributes.items() if _is_fraction(value)}
    if not fractions:
        return dict(attributes)
    numbers: dict[str, Number] = {
        **default_numbers(type(module)),  # the result says whether the constructor had other ones
        **author_numbers(init, author_arguments_of(type(module))),
        **attribute_numbers(vars(module)),
    }
    computed = dict(attributes)
    for name, expression in attributes_assigned(type(module)):
        if name not in fractions:
            continue
        evaluation = evaluated(expression, {}, partial(_variable, numbers))
        if evaluation is not None and literal(evaluation[0]) == attributes[name]:
            computed[name] = evaluation[1]
    return computed


def _is_fraction(value: Expression) -> bool:
    return isinstance(value, Literal) and value.is_number and isinstance(ast.literal_eval(value.text), float)


def _variable(numbers: Mapping[str, Number], node: ast.expr) -> Evaluation | None:
    """The number in a variable of the constructor, or in an attribute; a square root of one."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) if name in numbers:
            return numbers[name], literal(numbers[name])
        case ast.Call(ast.Attribute(ast.Name("math"), "sqrt"), [argument], []):
            evaluation = evaluated(argument, {}, partial(_variable, numbers))
            if evaluation is not None and evaluation[0] >= 0:
                return math.sqrt(evaluation[0]), call("math.sqrt", evaluation[1])
    return None
