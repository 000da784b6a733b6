"""Random classes of one name, merged: every call computes what it computed before."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import nn

from pipegraph.codegen.classes.merge_classes import merge_classes
from pipegraph.codegen.render import render_blocks, render_stage
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    ModuleInvocation,
    Name,
    call,
    literal,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Return, Statement

PARAMETERS = ("x", "mask", "memory", "bias")
LOCALS = ("h", "y", "mask", "bias")  # a local variable of one class may have the name of a parameter of another


def program(rng: random.Random, parameters: tuple[str, ...], length: int) -> list[Statement]:
    """Statements that read parameters and what was assigned before."""
    names = list(parameters)
    statements: list[Statement] = []
    for _ in range(length):
        left_operand, right = Name(rng.choice(names)), rng.choice([Name(rng.choice(names)), literal(rng.randint(2, 5))])
        target = rng.choice(LOCALS)
        statements.append(Assign((Name(target),), Binary(rng.choice("+*-"), left_operand, right)))
        names.append(target)
    return statements


def variant(rng: random.Random, base: list[Statement], parameters: tuple[str, ...]) -> list[Statement]:
    """A program that is like another one, for other parameters."""
    changed: list[Statement] = []
    names = set(parameters)
    for statement in base:
        if rng.random() < 0.15:
            changed += program(rng, tuple(sorted(names)), 1)
        if rng.random() < 0.15:
            continue

        def renamed(node: Any) -> Any:
            if isinstance(node, Name) and node.name not in names:  # noqa: B023 (called at once)
                return Name(rng.choice(sorted(names)))  # noqa: B023
            return node.rebuilt(renamed)

        assert isinstance(statement, Assign)
        value = renamed(statement.value)
        if rng.random() < 0.1:
            value = Binary("+", value, literal(rng.randint(2, 5)))
        changed.append(Assign(statement.targets, value))
        names |= {target.text for target in statement.targets}
        for assignment in changed:
            assert isinstance(assignment, Assign)
            names |= {target.text for target in assignment.targets}
    return changed


def classes(rng: random.Random) -> list[ClassSource]:
    base = program(rng, PARAMETERS, 6)
    size = Attribute(SELF, "size")
    inner = ClassSource(
        name="Inner",
        docstring="A module.",
        init_parameters=("size",),
        init=(Assign((size,), Name("size")),),
        parameters=("value",),
        forward=(Return((Binary("*", Name("value"), size),)),),
        model_class="Inner",
    )
    sources = [inner]
    for index in range(rng.randint(2, 5)):
        parameters = ("x", *(name for name in PARAMETERS[1:] if rng.random() < 0.5))
        body = variant(rng, base, parameters)
        names = sorted({*parameters, *(target.text for statement in body for target in statement.targets)})  # type: ignore[attr-defined]
        result = Return(tuple(Name(name) for name in rng.sample(names, rng.randint(1, min(2, len(names))))))
        attributes = {
            "is_decoder": literal(rng.random() < 0.5),
            "kind": literal(f"kind {index}"),
            "size": literal(index + 7),
        }
        init: list[Statement] = []
        if rng.random() < 0.5:
            init.append(Assign((Attribute(SELF, "eps"),), literal(rng.randint(2, 4))))
        if rng.random() < 0.5:  # a module that not all have
            init.append(Assign((Attribute(SELF, "inner"),), call("Inner", size=literal(rng.randint(2, 4)))))
            called = ModuleInvocation(Attribute(SELF, "inner"), (Argument(Name("x"), "value"),), ("Inner",))
            body.insert(rng.randint(0, len(body)), Assign((Name("h"),), called))
        sources.append(
            ClassSource(
                name=f"Block{index or ''}",
                docstring="A block.",
                init=tuple(init),
                parameters=parameters,
                forward=(*body, result),
                model_class="Block",
                attributes=attributes,
            )
        )
    return sources


def stage(blocks: list[ClassSource]) -> ClassSource:
    """Calls an object of each class."""
    init = [
        Assign((Attribute(SELF, f"b{index}"),), call(block.name))
        for index, block in enumerate(blocks)
        if block.name != "Inner"
    ]
    calls = [
        ModuleInvocation(
            Attribute(SELF, f"b{index}"), tuple(Argument(Name(name), name) for name in block.parameters), (block.name,)
        )
        for index, block in enumerate(blocks)
        if block.name != "Inner"
    ]
    return ClassSource("Stage0", "A stage.", init=tuple(init), parameters=PARAMETERS, forward=(Return(tuple(calls)),))


def run(blocks: list[ClassSource], user: ClassSource) -> Any:
    text = render_stage(user, [], blocks, "A stage.", {}).split("class Stage0", 1)[1]
    names: dict[str, Any] = {"nn": nn}
    exec(render_blocks([], blocks, "Blocks.", {}) + "\n\nclass Stage0" + text, names)
    return names["Stage0"]()(3, 5, 7, 11)


FOUND_ERRORS = (2143, 3475, 3575, 3867)
SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 100)]


@pytest.mark.parametrize("seed", [*range(30), *FOUND_ERRORS, *SLOW_SEEDS])
def test_merged_classes_compute_the_same(seed: int) -> None:
    blocks = classes(random.Random(seed))
    user = stage(blocks)
    expected = run(blocks, user)
    merged, (merged_user,) = merge_classes(blocks, [user])
    assert run(merged, merged_user) == expected
    assert len(merged) < len(blocks)
