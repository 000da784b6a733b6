"""Merge classes that the model has under one name, so that each stands once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

from pipegraph.codegen.classes.constructor_arguments import equal_but_for_numbers
from pipegraph.codegen.classes.merge_pair import MergedPair, distance, merge_pair
from pipegraph.codegen.classes.unify import ordered_arguments
from pipegraph.codegen.forms import USUAL, Forms
from pipegraph.codegen.names.identifiers import class_name, unused_class
from pipegraph.codegen.syntax.expressions import FunctionCall, ModuleInvocation, Name, call
from pipegraph.codegen.syntax.statements import ClassSource

_Change = Callable[[FunctionCall], FunctionCall]
# Compared pairs by the identity of the two classes, which the values keep alive.
_KnownPairs = dict[tuple[int, int], tuple[ClassSource, ClassSource, MergedPair | None]]


def merge_classes(
    blocks: Sequence[ClassSource], stages: Sequence[ClassSource], forms: Forms = USUAL
) -> tuple[list[ClassSource], list[ClassSource]]:
    """Merge the classes of blocks.

    The result is ``Conv1D(nf=96, nx=32)`` and ``Conv1D(nf=32, nx=32)`` instead of a ``Conv1D`` and a ``Conv1D2``, and
    one attention for layers that are given a mask and for those that are not. The classes around others can be merged
    only after them, so that this goes in rounds until no class is merged.

    Args:
        blocks: the classes that stages share, each after those that it uses.
        stages: the classes of the stages.
        forms: which classes stay apart.

    Returns:
        the merged classes, and the stages with the new calls.
    """
    apart = [block for block in blocks if not forms.merges(block.model_class)]
    classes, users = [block for block in blocks if forms.merges(block.model_class)], [*apart, *stages]
    pairs: _KnownPairs = {}
    while True:
        merged = (
            _merge_numbers(classes, users) or _merge_sequences(classes, users) or _merge_variants(classes, users, pairs)
        )
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

    classes = [replace(_with_constructors(block, renamed), name=names[block.name]) for block in _in_order(classes)]
    return classes, [_with_constructors(user, renamed) for user in users]


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

    return _changed(blocks, with_arguments, of_first), _changed(users, with_arguments, of_first)


def _merge_sequences(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge subclasses of ``nn.Sequential`` that hold different modules, which become arguments of the constructor.

    Returns:
        the changed classes and users; None if nothing can be merged.
    """
    groups: dict[str, list[ClassSource]] = {}
    for block in classes:
        if block.children:
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

        return call(first[member.name], *(_change(passed(child), constructor) for child in member.children))

    blocks = [
        replace(source, children=(), init_parameters=()) if source.name in first else source
        for source in classes
        if first.get(source.name, source.name) == source.name
    ]
    return _changed(blocks, constructor, lambda node: node), _changed(users, constructor, lambda node: node)


def _merge_variants(
    classes: Sequence[ClassSource], users: Sequence[ClassSource], pairs: _KnownPairs
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge the classes of one name. Return None if nothing can be merged.

    A class comes before the classes that use it, so that these differ only in their own code.

    Args:
        pairs: the pairs that were compared before. The pairs compared here are added.
    """
    signatures = {source.name: source.parameters for source in classes}
    invocations = list(_invocations([*classes, *users]))
    by_model_class: dict[object, list[ClassSource]] = {}
    for block in _in_order(classes):
        if block.forward and not block.children and not block.part:
            by_model_class.setdefault((block.model_class, block.base), []).append(block)
    for siblings in by_model_class.values():
        merged = None
        by_name = {sibling.name: sibling for sibling in siblings}
        for names in merge_order(siblings, partial(distance, signatures=signatures)):
            first, second = (by_name[name] for name in names)
            key = id(first), id(second)
            if key not in pairs:
                pairs[key] = first, second, merge_pair(first, second, signatures)
            _, _, pair = pairs[key]
            if pair is not None and _keeps_calls(pair, invocations):
                merged = _replace_pair(*(merged or (classes, users)), pair)
                by_name[pair.source.name] = pair.source
        if merged is not None:
            return merged
    return None


def _replace_pair(
    classes: Sequence[ClassSource], users: Sequence[ClassSource], pair: MergedPair
) -> tuple[list[ClassSource], list[ClassSource]]:
    names = [member.name for member in pair.members]
    blocks = [pair.source if block.name == names[0] else block for block in classes if block.name != names[1]]

    def constructor(constructor_call: FunctionCall) -> FunctionCall:
        name = constructor_call.function.text
        return pair.constructor(names.index(name), constructor_call) if name in names else constructor_call

    def invocation(module_invocation: ModuleInvocation) -> ModuleInvocation:
        if not set(names) & set(module_invocation.classes):
            return module_invocation
        merged = dict.fromkeys(names[0] if name in names else name for name in module_invocation.classes)
        arguments = module_invocation.arguments
        if len(merged) == 1:
            arguments = ordered_arguments({arg.name: arg.value for arg in arguments}, pair.source.parameters)
        return replace(module_invocation, arguments=arguments, classes=tuple(merged))

    return _changed(blocks, constructor, invocation), _changed(users, constructor, invocation)


def _keeps_calls(pair: MergedPair, invocations: Sequence[ModuleInvocation]) -> bool:
    """Return whether calls in a loop over modules of several classes can stay, because they pass values by position."""
    members = {member.name: member.parameters for member in pair.members}
    for invocation in invocations:
        called = [members[name] for name in invocation.classes if name in members]
        count = len(invocation.arguments)
        if called and len(invocation.classes) > len(called):
            if any(parameters[:count] != pair.source.parameters[:count] for parameters in called):
                return False
        elif any(parameters != called[0] for parameters in called):
            return False
    return True


def _invocations(sources: Sequence[ClassSource]) -> Iterator[ModuleInvocation]:
    for source in sources:
        for statement in source.forward:
            yield from (
                node for node in statement.walk() if isinstance(node, ModuleInvocation) and len(node.classes) > 1
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


def _changed(
    sources: Sequence[ClassSource], constructor: _Change, invocation: Callable[[ModuleInvocation], ModuleInvocation]
) -> list[ClassSource]:
    """Classes with the calls of constructors and of modules changed."""

    def walk(node: Any) -> Any:
        node = node.rebuilt(walk)
        return invocation(node) if isinstance(node, ModuleInvocation) else node

    changed: list[ClassSource] = []
    for original in sources:
        source, forward = _with_constructors(original, constructor), tuple(map(walk, original.forward))
        is_unchanged = all(new is old for new, old in zip(forward, original.forward, strict=True))
        changed.append(source if is_unchanged else replace(source, forward=forward))
    return changed


def _with_constructors(source: ClassSource, change: _Change) -> ClassSource:
    """A class with the calls in its ``__init__`` changed."""

    children, init = (tuple(_change(node, change) for node in nodes) for nodes in (source.children, source.init))
    is_unchanged = all(new is old for new, old in zip((*children, *init), source.constructors, strict=True))
    return source if is_unchanged else replace(source, children=children, init=init)


def _change(node: Any, change: _Change) -> Any:
    """A node with the calls in it changed, from the innermost ones."""
    node = node.rebuilt(lambda inside: _change(inside, change))
    return change(node) if isinstance(node, FunctionCall) else node


Distance = Callable[[ClassSource, ClassSource], float]
_Split = tuple[tuple[ClassSource, ...], tuple[ClassSource, ...]]


def merge_order(members: Sequence[ClassSource], distance: Distance) -> list[tuple[str, str]]:
    """Return the names of the classes to merge, one pair after the other.

    A parameter of ``forward`` or an attribute of the model splits the classes in two groups, and so on for each group.
    Merged from the smallest groups upwards, the two sides of each merge differ in that parameter or attribute. The
    split is the one whose groups are most alike inside and least alike between them.

    Args:
        members: classes that the model has under one name.
        distance: how much two of them differ.

    Returns:
        (first, second) for each merge, whose result has the name of the first.
    """
    if len(members) < 2:
        return []
    splits = list(_splits(members)) or [_alone(members, member) for member in members]
    first, second = max(splits, key=lambda split: _contrast(split, distance))
    return [*merge_order(first, distance), *merge_order(second, distance), (first[0].name, second[0].name)]


def _splits(members: Sequence[ClassSource]) -> Iterator[_Split]:
    """The ways to split classes in two groups by a parameter, or by an attribute with two values."""
    parameters = dict.fromkeys(name for member in members for name in member.parameters)
    for name in parameters:
        yield from _split(members, [name in member.parameters for member in members])
    for name in members[0].attributes:
        yield from _split(members, [member.attributes.get(name) for member in members])


def _split(members: Sequence[ClassSource], values: Sequence[object]) -> Iterator[_Split]:
    if None not in values and len(set(values)) == 2:
        matches = [value == values[0] for value in values]
        first, second = (
            tuple(member for member, is_same in zip(members, matches, strict=True) if is_same == side)
            for side in (True, False)
        )
        yield first, second


def _contrast(split: _Split, distance: Distance) -> float:
    between = fmean(distance(one, two) for one in split[0] for two in split[1])
    inside = [distance(one, two) for group in split for one, two in combinations(group, 2)]
    return between - fmean(inside or [0])


def _alone(members: Sequence[ClassSource], member: ClassSource) -> _Split:
    """One class, and the others; the first of all is in the first group, which the merged class is named after."""
    other_members = tuple(candidate for candidate in members if candidate is not member)
    return ((member,), other_members) if member is members[0] else (other_members, (member,))
