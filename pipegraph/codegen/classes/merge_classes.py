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
    known: _KnownPairs = {}
    while True:
        merged = (
            _merge_numbers(classes, users) or _merge_sequences(classes, users) or _merge_variants(classes, users, known)
        )
        if merged is None:
            break
        classes, users = merged
    classes, users = [*classes, *users[: len(apart)]], users[len(apart) :]
    names: dict[str, str] = {}
    for each in classes:
        names[each.name] = unused_class(class_name(each.model_class) + each.part, set(names.values()))

    def renamed(made: FunctionCall) -> FunctionCall:
        name = names.get(made.function.text)
        return made if name is None else replace(made, function=Name(name))

    classes = [replace(_with_constructors(each, renamed), name=names[each.name]) for each in _in_order(classes)]
    return classes, [_with_constructors(each, renamed) for each in users]


def _merge_numbers(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge all classes that differ in numbers only; None if there are none."""
    groups = equal_but_for_numbers(classes)
    if not groups:
        return None
    calls = {member.name: group.call(index) for group in groups for index, member in enumerate(group.members)}
    merged = {group.members[0].name: group.merged() for group in groups}
    first = {member.name: group.members[0] for group in groups for member in group.members}
    kept = [merged.get(each.name, each) for each in classes if first.get(each.name, each).name == each.name]

    def with_arguments(made: FunctionCall) -> FunctionCall:
        return made if made.arguments else calls.get(made.function.text, made)

    def of_first(made: ModuleInvocation) -> ModuleInvocation:
        names = (first[name].name if name in first else name for name in made.classes)
        return replace(made, classes=tuple(dict.fromkeys(names)))

    return _changed(kept, with_arguments, of_first), _changed(users, with_arguments, of_first)


def _merge_sequences(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge subclasses of ``nn.Sequential`` that hold different modules: the constructor is given them.

    Returns:
        None if there are none.
    """
    groups: dict[str, list[ClassSource]] = {}
    for each in classes:
        if each.children:
            groups.setdefault(each.model_class, []).append(each)
    members = {each.name: each for group in groups.values() if len(group) > 1 for each in group}
    if not members:
        return None
    first = {name: groups[each.model_class][0].name for name, each in members.items()}

    def constructor(made: FunctionCall) -> FunctionCall:
        member = members.get(made.function.text)
        if member is None:
            return made
        given = {argument.name: argument.value for argument in made.arguments}

        def passed(node: Any) -> Any:
            return given.get(node.text, node) if isinstance(node, Name) else node.rebuilt(passed)

        return call(first[member.name], *(_change(passed(child), constructor) for child in member.children))

    kept = [
        replace(each, children=(), init_parameters=()) if each.name in first else each
        for each in classes
        if first.get(each.name, each.name) == each.name
    ]
    return _changed(kept, constructor, lambda made: made), _changed(users, constructor, lambda made: made)


def _merge_variants(
    classes: Sequence[ClassSource], users: Sequence[ClassSource], known: _KnownPairs
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge the classes of one name; None if there are none that can be merged.

    Classes that others use come first, so that those others differ only in what they say themselves.

    Args:
        known: the pairs that were compared before, which this adds to.
    """
    signatures = {each.name: each.parameters for each in classes}
    invocations = list(_invocations([*classes, *users]))
    by_model_class: dict[object, list[ClassSource]] = {}
    for each in _in_order(classes):
        if each.forward and not each.children and not each.part:
            by_model_class.setdefault((each.model_class, each.base), []).append(each)
    for siblings in by_model_class.values():
        merged = None
        by_name = {each.name: each for each in siblings}
        for names in merge_order(siblings, partial(distance, signatures=signatures)):
            first, second = (by_name[name] for name in names)
            key = id(first), id(second)
            if key not in known:
                known[key] = first, second, merge_pair(first, second, signatures)
            _, _, pair = known[key]
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
    kept = [pair.source if each.name == names[0] else each for each in classes if each.name != names[1]]

    def constructor(made: FunctionCall) -> FunctionCall:
        name = made.function.text
        return pair.constructor(names.index(name), made) if name in names else made

    def invocation(made: ModuleInvocation) -> ModuleInvocation:
        if not set(names) & set(made.classes):
            return made
        merged = dict.fromkeys(names[0] if name in names else name for name in made.classes)
        arguments = made.arguments
        if len(merged) == 1:
            arguments = ordered_arguments({each.name: each.value for each in arguments}, pair.source.parameters)
        return replace(made, arguments=arguments, classes=tuple(merged))

    return _changed(kept, constructor, invocation), _changed(users, constructor, invocation)


def _keeps_calls(pair: MergedPair, invocations: Sequence[ModuleInvocation]) -> bool:
    """Return whether calls in a loop over modules of several classes can stay, because they pass values by position."""
    members = {member.name: member.parameters for member in pair.members}
    for made in invocations:
        called = [members[name] for name in made.classes if name in members]
        count = len(made.arguments)
        if called and len(made.classes) > len(called):
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
    by_name = {each.name: each for each in classes}
    ordered: dict[str, ClassSource] = {}

    def add(source: ClassSource) -> None:
        if source.name not in ordered:
            for name in sorted(source.uses() & by_name.keys(), key=list(by_name).index):
                add(by_name[name])
            ordered[source.name] = source

    for each in classes:
        add(each)
    return list(ordered.values())


def _changed(
    sources: Sequence[ClassSource], constructor: _Change, invocation: Callable[[ModuleInvocation], ModuleInvocation]
) -> list[ClassSource]:
    """Classes with the calls of constructors and of modules changed."""

    def walk(node: Any) -> Any:
        node = node.rebuilt(walk)
        return invocation(node) if isinstance(node, ModuleInvocation) else node

    changed: list[ClassSource] = []
    for each in sources:
        source, forward = _with_constructors(each, constructor), tuple(map(walk, each.forward))
        same = all(new is old for new, old in zip(forward, each.forward, strict=True))
        changed.append(source if same else replace(source, forward=forward))
    return changed


def _with_constructors(source: ClassSource, change: _Change) -> ClassSource:
    """A class with the calls in its ``__init__`` changed."""

    children, init = (tuple(_change(node, change) for node in nodes) for nodes in (source.children, source.init))
    same = all(new is old for new, old in zip((*children, *init), source.constructors, strict=True))
    return source if same else replace(source, children=children, init=init)


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
    splits = list(_splits(members)) or [_alone(members, each) for each in members]
    first, second = max(splits, key=lambda split: _contrast(split, distance))
    return [*merge_order(first, distance), *merge_order(second, distance), (first[0].name, second[0].name)]


def _splits(members: Sequence[ClassSource]) -> Iterator[_Split]:
    """The ways to split classes in two groups by a parameter, or by an attribute with two values."""
    parameters = dict.fromkeys(name for each in members for name in each.parameters)
    for name in parameters:
        yield from _split(members, [name in each.parameters for each in members])
    for name in members[0].attributes:
        yield from _split(members, [each.attributes.get(name) for each in members])


def _split(members: Sequence[ClassSource], values: Sequence[object]) -> Iterator[_Split]:
    if None not in values and len(set(values)) == 2:
        same = [value == values[0] for value in values]
        first, second = (
            tuple(each for each, is_same in zip(members, same, strict=True) if is_same == wanted)
            for wanted in (True, False)
        )
        yield first, second


def _contrast(split: _Split, distance: Distance) -> float:
    between = fmean(distance(one, two) for one in split[0] for two in split[1])
    inside = [distance(one, two) for group in split for one, two in combinations(group, 2)]
    return between - fmean(inside or [0])


def _alone(members: Sequence[ClassSource], member: ClassSource) -> _Split:
    """One class, and the others; the first of all is in the first group, which the merged class is named after."""
    others = tuple(each for each in members if each is not member)
    return ((member,), others) if member is members[0] else (others, (member,))
