"""The items of a generated ``forward``, in order: operations, calls of modules and of functions, loops, branches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import fx

from pipegraph.codegen.expressions.torch_modules import CallArguments
from pipegraph.codegen.names.identifiers import outer_names
from pipegraph.codegen.names.source_loops import SourceLoop
from pipegraph.codegen.syntax.expressions import Argument, Expression, FunctionCall, ModuleInvocation, Name, call
from pipegraph.codegen.syntax.loop_index import IndexTest
from pipegraph.graph.calls import FunctionRun
from pipegraph.graph.captured import StateEntry

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Operation:
    """One ATen operation."""

    node: fx.Node

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that it takes."""
        return tuple(self.node.all_input_nodes)

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that it returns."""
        return (self.node,)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return (self.node,)


class Modules(NamedTuple):
    """FQNs of modules: of all that are made, of those among them that are called, and of those that a constructor of
    ``torch.nn`` makes with all that they hold."""

    fqns: frozenset[str] = frozenset()
    called: frozenset[str] = frozenset()
    of_torch: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of a module: ``makes = self.fqn(reads…)``.

    Attributes:
        fqn: of the module.
        constructor: makes the module.
        model_class: the name of the model's own class.
        reads: the values that it takes, in the order of the arguments.
        makes: the values that it returns, in the order of the results.
        nodes: the operations in it.
        modules: the modules that ``constructor`` makes, its own included.
        arguments: the arguments of the call, if they are more than the values one after the other.
        parameters: the parameters of ``forward``, if the class is generated.
    """

    fqn: str
    constructor: FunctionCall
    model_class: str
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    modules: Modules
    arguments: CallArguments | None = None
    parameters: tuple[str, ...] = ()

    def invocation(self, module: Expression, values: Sequence[Expression], classes: Iterable[str] = ()) -> Expression:
        """The call of a module that is like this one, with other values.

        Args:
            classes: further classes of the module, in a loop.
        """
        if self.arguments is not None:
            return self.arguments.call(module, values)
        if not self.parameters:
            return call(module, *values)
        arguments = tuple(Argument(value, name) for value, name in zip(values, self.parameters, strict=True))
        return ModuleInvocation(module, arguments, tuple(dict.fromkeys((self.constructor.function.text, *classes))))

    @property
    def argument_values(self) -> tuple[fx.Node, ...]:
        """The values in the order of the arguments; a value may be two arguments."""
        return tuple(self.in_order(self.reads))

    def in_order(self, values: Sequence[T]) -> Sequence[T]:
        """What stands for the values that the call reads, in the order of the arguments."""
        return values if self.arguments is None else [values[position] for position in self.arguments.positions]


@dataclass(frozen=True, eq=False)
class FunctionStep:
    """A call of a function of the model's source, or of a method: ``makes = function(reads…)``.

    Attributes:
        function: as the text calls it: ``rotate``, ``self.split_heads``.
        run: the call in the model.
        reads: the values that it takes.
        makes: the values that it returns and that are read afterwards, in the order of the results.
        nodes: the operations in it.
        arguments: the arguments of the call.
    """

    function: str
    run: FunctionRun
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    arguments: CallArguments

    def invocation(self, values: Sequence[Expression], expression_of: Callable[[object], Expression]) -> Expression:
        """The call with these values.

        Args:
            expression_of: returns the expression of a number, a size, a dtype or a device.
        """
        return self.arguments.written(expression_of).call(Name(self.function), values)

    @property
    def argument_values(self) -> tuple[fx.Node, ...]:
        """The values in the order of the arguments; a value may be two arguments."""
        return tuple(self.reads[position] for position in self.arguments.positions)


Step = Operation | ModuleCall | FunctionStep
"""What a ``forward`` does once."""


@dataclass(frozen=True)
class AlternateCall:
    """The call of a loop in the iterations that are not like the first one.

    Attributes:
        test: separates the two kinds of iterations by the module's number.
        holds_first: whether the test holds for the iterations that are like the first one.
        reads, carried: as in the loop, but for these iterations.
    """

    test: IndexTest
    holds_first: bool
    reads: tuple[fx.Node, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ModuleLoop:
    """Consecutive calls of modules of one class, each of which reads results of the call before.

    Attributes:
        calls: one per iteration.
        carried: (position in ``reads``, position in ``makes`` of the call before) for each argument that is a result of
            the call before. Every other argument is the same in all iterations that are like the first one.
        alternate: the call of the other iterations, if there are any.
    """

    calls: tuple[ModuleCall, ...]
    carried: tuple[tuple[int, int], ...]
    alternate: AlternateCall | None = None

    @property
    def patterns(self) -> list[list[tuple[fx.Node, int | None]]]:
        """The arguments of the first call, then those of the alternate call if there is one.

        Each argument is a value, and the position in ``makes`` of the result that replaces it after the first
        iteration; None if it stays.
        """
        calls = [(self.calls[0].reads, dict(self.carried))]
        if self.alternate is not None:
            calls.append((self.alternate.reads, dict(self.alternate.carried)))
        return [[(node, carried.get(position)) for position, node in enumerate(reads)] for reads, carried in calls]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that come from outside: those of the first call, then those that only alternate calls take."""
        first, *tail = self.patterns
        return (*(node for node, _ in first), *(node for pattern in tail for node, index in pattern if index is None))

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that the last call returns."""
        return self.calls[-1].makes

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return tuple(node for call in self.calls for node in call.nodes)


@dataclass(frozen=True, eq=False)
class ModeBranch:
    """What one mode runs and the other does not: ``if self.training: … else: …``.

    Attributes:
        number: of the branch.
        training, evaluation: the items of each mode.
        phis: an operation for each value that is read afterwards. Its arguments are the values of the two modes.
    """

    number: int
    training: tuple[Step, ...]
    evaluation: tuple[Step, ...]
    phis: tuple[Operation, ...]

    @property
    def inner(self) -> tuple[Step, ...]:
        """The items of both modes, and the phis."""
        return (*self.training, *self.evaluation, *self.phis)

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that come from outside."""
        inner_nodes = {node for item in self.inner for node in item.makes}
        return tuple(dict.fromkeys(node for item in self.inner for node in item.reads if node not in inner_nodes))

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that are read afterwards."""
        return tuple(phi.node for phi in self.phis)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return tuple(node for item in self.inner for node in item.nodes)


@dataclass(frozen=True, eq=False)
class StatementLoop:
    """Iterations of a loop of the model's source, which run the same steps on different values.

    The source is that of its second iteration, the first one that takes values from another.

    Attributes:
        iterations: the steps of each. None stands for a step that the last one lacks: nothing reads its results.
        carried: (the value before the loop, that of the first iteration, of the second, of the last) for each value
            that an iteration takes from the one before.
        varying: the values from outside that differ between iterations, one for each iteration.
        collected: the values of all iterations, for each that is read after the loop from all of them.
        final: (the value of the second iteration, of the last) for each that is read after the loop from the last.
        source: the loop of the source.
    """

    iterations: tuple[tuple[Step | None, ...], ...]
    carried: tuple[tuple[fx.Node, fx.Node, fx.Node, fx.Node | None], ...]
    varying: tuple[tuple[fx.Node, ...], ...]
    collected: tuple[tuple[fx.Node, ...], ...]
    final: tuple[tuple[fx.Node, fx.Node], ...]
    source: SourceLoop

    @property
    def inner(self) -> tuple[Step, ...]:
        """The steps of the second iteration."""
        return tuple(filter(None, self.iterations[1]))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all iterations."""
        return tuple(step for steps in self.iterations for step in steps if step is not None)

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The values that come from outside."""
        inner_nodes = {node for step in self.steps for node in step.makes}
        return tuple(dict.fromkeys(node for step in self.steps for node in step.reads if node not in inner_nodes))

    @property
    def makes(self) -> tuple[fx.Node, ...]:
        """The values that are read afterwards."""
        return tuple(
            dict.fromkeys((*(node for values in self.collected for node in values), *(last for _, last in self.final)))
        )

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Operations in it."""
        return tuple(node for step in self.steps for node in step.nodes)

    @property
    def values_at_end(self) -> tuple[fx.Node, ...]:
        """The values of the second iteration that are needed at its end."""
        return (
            *(values[2] for values in self.carried),
            *(values[1] for values in self.collected),
            *(value for value, _ in self.final),
        )


Item = Step | ModuleLoop | StatementLoop | ModeBranch


def with_inner(items: Iterable[Item]) -> Iterator[Item]:
    """Items, with those inside a branch, or in the written iteration of a loop, in its place."""
    for item in items:
        if isinstance(item, (ModeBranch, StatementLoop)):
            yield from item.inner
        else:
            yield item


def fqn_of(item: Item) -> str | None:
    """The module that an item calls, or the first one of a loop; None for any other item."""
    if isinstance(item, (Operation, FunctionStep, ModeBranch, StatementLoop)):
        return None
    return item.calls[0].fqn if isinstance(item, ModuleLoop) else item.fqn


def operands(item: Item) -> list[fx.Node]:
    """The values that the source of an item mentions, each as often as it does."""
    if isinstance(item, Operation):
        nodes: list[fx.Node] = []
        fx.map_arg((item.node.args, item.node.kwargs), nodes.append)
        return nodes
    if isinstance(item, ModeBranch):
        return [node for step in item.inner for node in operands(step)]
    if isinstance(item, StatementLoop):  # what it reads is needed until its end
        return [*item.reads, *(node for step in item.inner for node in operands(step)), *item.values_at_end]
    return list(item.argument_values if isinstance(item, (ModuleCall, FunctionStep)) else item.reads)


def has_effects(item: Item) -> bool:
    """Return whether the order of an item matters, because it draws random numbers or writes into a tensor."""
    return any(
        "writes" in node.meta or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in item.nodes
    )


@dataclass(frozen=True)
class ClassContents:
    """The contents of a class.

    Attributes:
        prefix: the FQN of the module whose class it is, "" for a stage.
        items: the items of ``forward``.
        inputs, outputs: the values that ``forward`` takes and returns.
        state: parameters and buffers by their name relative to ``prefix``.
        state_names: the parameters and buffers that ``forward`` reads itself → their relative names.
        outer_regions: the number of ``no_grad`` and ``autocast`` blocks around the whole call.
        fixed_sizes: operation → numbers in it that are sizes in the source → (position in ``inputs``, dimension).
    """

    prefix: str
    items: tuple[Item, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: dict[str, StateEntry]
    state_names: dict[fx.Node, str]
    outer_regions: int = 0
    fixed_sizes: Mapping[fx.Node, Mapping[int, tuple[int, int]]] = field(default_factory=dict)


# ---- item modules ----------------------------------------------------------------------------------------------------
# The modules that the items of a ``forward`` call.


def calls_in(item: Item) -> Iterator[ModuleCall]:
    """The calls of modules in an item."""
    if isinstance(item, ModuleCall):
        yield item
    elif isinstance(item, ModuleLoop):
        yield from item.calls
    elif isinstance(item, (ModeBranch, StatementLoop)):
        for step in item.inner if isinstance(item, ModeBranch) else item.steps:
            yield from calls_in(step)


def modules_in(items: Iterable[Item]) -> Modules:
    """The modules that items need, directly or inside others."""
    every = [call.modules for item in items for call in calls_in(item)]
    return Modules(*(frozenset[str]().union(*column) for column in zip(*every, strict=True))) if every else Modules()


def conflicts(items: Iterable[Item]) -> frozenset[str]:
    """The modules whose calls cannot stay calls: two of them need different classes, or a module inside is called from
    outside as well."""
    constructors: dict[str, FunctionCall] = {}
    modules = set()
    for item in items:
        if isinstance(item, ModuleCall) and constructors.setdefault(item.fqn, item.constructor) != item.constructor:
            modules.add(item.fqn)
    modules.update(outer for inner in constructors for outer in outer_names(inner) if outer in constructors)
    return frozenset(modules)
