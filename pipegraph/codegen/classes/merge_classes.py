"""Merge classes that the model has under one name and that differ in numbers, or in the modules of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipegraph.codegen.classes.constructor_arguments import equal_but_for_numbers
from pipegraph.codegen.classes.constructor_calls import changed_classes, changed_node, with_constructors
from pipegraph.codegen.classes.merge_branches import merge_branches, without_variants
from pipegraph.codegen.forms import USUAL, Forms
from pipegraph.codegen.names.identifiers import class_name, unused_class
from pipegraph.codegen.syntax.expressions import FunctionCall, ModuleInvocation, Name, call
from pipegraph.codegen.syntax.statements import ClassSource


def merge_classes(
    blocks: Sequence[ClassSource], stages: Sequence[ClassSource], forms: Forms = USUAL
) -> tuple[list[ClassSource], list[ClassSource]]:
    """Merge the classes of blocks.

    The result is ``Conv1D(nf=96, nx=32)`` and ``Conv1D(nf=32, nx=32)`` instead of a ``Conv1D`` and a ``Conv1D2``.
    Classes that are written from the graph and differ in more than numbers stay apart: an attention with a mask and one
    without are ``Attention`` and ``Attention2``, each without branches. In their author's text they are one class, with
    the author's branches. The classes around others can be merged only after them, so that this is repeated until no
    class is merged.

    Args:
        blocks: the classes that stages share, each after those that it uses.
        stages: the classes of the stages.
        forms: which classes stay apart.

    Returns:
        the merged classes, and the stages with the new calls.
    """
    apart = [block for block in blocks if not forms.merges(block.model_class)]
    classes, users = [block for block in blocks if forms.merges(block.model_class)], [*apart, *stages]
    classes = without_variants(classes)
    while True:
        merged = _merge_numbers(classes, users) or _merge_sequences(classes, users) or merge_branches(classes, users)
        if merged is None:
            break
        classes, users = merged
    classes, users = [*classes, *users[: len(apart)]], users[len(apart) :]
    names: dict[str, str] = {}
    for source in classes:
        names[source.name] = unused_class(class_name(source.model_class) + source.part, set(names.values()))

    def renamed(constructor_call: FunctionCall) -> FunctionCall:
        name = names.get(constructor_call.function.text)
        return constructor_call if name is None else replace(constructor_call, function=Name(name))

    classes = [replace(with_constructors(block, renamed), name=names[block.name]) for block in _in_order(classes)]
    return classes, [with_constructors(user, renamed) for user in users]


def _merge_numbers(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge all classes that differ in numbers only. Return None if no classes do."""
    groups = equal_but_for_numbers(classes)
    if not groups:
        return None
    calls = {member.name: group.call(index) for group in groups for index, member in enumerate(group.members)}
    merged = {group.members[0].name: group.merged() for group in groups}
    first = {member.name: group.members[0] for group in groups for member in group.members}
    blocks = [merged.get(block.name, block) for block in classes if first.get(block.name, block).name == block.name]

    def with_arguments(constructor_call: FunctionCall) -> FunctionCall:
        return (
            constructor_call
            if constructor_call.arguments
            else calls.get(constructor_call.function.text, constructor_call)
        )

    def of_first(invocation: ModuleInvocation) -> ModuleInvocation:
        names = (first[name].name if name in first else name for name in invocation.classes)
        return replace(invocation, classes=tuple(dict.fromkeys(names)))

    return changed_classes(blocks, with_arguments, of_first), changed_classes(users, with_arguments, of_first)


def _merge_sequences(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge subclasses of ``nn.Sequential`` that hold different modules, which become arguments of the constructor.

    Returns:
        the changed classes and users; None if nothing can be merged.
    """
    groups: dict[str, list[ClassSource]] = {}
    for block in classes:
        if block.children and block.base == "nn.Sequential":
            groups.setdefault(block.model_class, []).append(block)
    members = {member.name: member for group in groups.values() if len(group) > 1 for member in group}
    if not members:
        return None
    first = {name: groups[member.model_class][0].name for name, member in members.items()}

    def constructor(constructor_call: FunctionCall) -> FunctionCall:
        member = members.get(constructor_call.function.text)
        if member is None:
            return constructor_call
        arguments = {argument.name: argument.value for argument in constructor_call.arguments}

        def passed(node: Any) -> Any:
            return arguments.get(node.text, node) if isinstance(node, Name) else node.rebuilt(passed)

        return call(first[member.name], *(changed_node(passed(child.value), constructor) for child in member.children))

    blocks = [
        replace(source, children=(), init_parameters=(), defaults={}) if source.name in first else source
        for source in classes
        if first.get(source.name, source.name) == source.name
    ]
    return changed_classes(blocks, constructor, lambda node: node), changed_classes(
        users, constructor, lambda node: node
    )


def _in_order(classes: Sequence[ClassSource]) -> list[ClassSource]:
    """Classes, each after those that it uses."""
    by_name = {member.name: member for member in classes}
    ordered: dict[str, ClassSource] = {}

    def add(source: ClassSource) -> None:
        if source.name not in ordered:
            for name in sorted(source.uses() & by_name.keys(), key=list(by_name).index):
                add(by_name[name])
            ordered[source.name] = source

    for block in classes:
        add(block)
    return list(ordered.values())
