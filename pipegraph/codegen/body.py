"""The statements of a ``forward``."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from pipegraph.codegen.attributes import Tree, access
from pipegraph.codegen.expression import ATOM, Expression, Writer
from pipegraph.codegen.expressions import express
from pipegraph.codegen.items import Item, Loop, ModuleCall, Operation, Scope
from pipegraph.codegen.literals import literal
from pipegraph.codegen.names import unused, variable
from pipegraph.codegen.origins import Origins
from pipegraph.codegen.regions import headers
from pipegraph.codegen.value_names import ValueNames

# An expression that was put together from several is no longer than this; one that goes into another, than that.
_LONGEST, _FOLDED_LENGTH = 96, 88
_NAME = re.compile(r"[A-Za-z_]\w*")
_WRITES = (torch.ops.aten.fill_, torch.ops.aten.copy_)


@dataclass(frozen=True)
class _Pending:
    """A value that is not written yet: it may stand inside the expression of its only reader."""

    expression: Expression
    names: frozenset[str]
    regions: tuple[str, ...]
    item: Item


@dataclass(frozen=True)
class Written:
    """The statements of a ``forward``, each with the ``with`` headers that it stands under; the names of what it
    returns; and the names that values wanted in vain, because another had them."""

    lines: tuple[tuple[tuple[str, ...], str], ...]
    results: tuple[str, ...]
    clashes: tuple[str, ...]


def write_body(
    scope: Scope,
    tree: Tree,
    parameters: Sequence[str],
    origins: Origins | None,
    wanted: Mapping[fx.Node, str] | None = None,
) -> Written:
    """Write one ``forward``.

    Where two values of one name are needed at once, one has the name under which the modules that read it take it, if
    that helps, or else a number.

    Args:
        parameters: names of the arguments.
        origins: gives names and line breaks of the model's own source. Without it every value has a line and a neutral
            name: two scopes of equal structure then give equal text.
        wanted: names for values that the source leaves unnamed.
    """
    written = _Body(scope, tree, parameters, origins, wanted or {}, ()).write()
    if not written.clashes:
        return written
    other = _Body(scope, tree, parameters, origins, wanted or {}, written.clashes).write()
    return other if len(other.clashes) < len(written.clashes) else written


class _Body:
    """The state of writing one ``forward``."""

    def __init__(
        self,
        scope: Scope,
        tree: Tree,
        parameters: Sequence[str],
        origins: Origins | None,
        wanted: Mapping[fx.Node, str],
        clashes: Container[str],
    ) -> None:
        self._scope = scope
        self._tree = tree
        self._folds = origins is not None
        self._names = ValueNames(scope, origins, wanted, dict(zip(scope.inputs, parameters, strict=True)), clashes)
        self._clashes: list[str] = []
        self._left = Counter(node for item in scope.items for node in _operands(item))
        self._left.update(scope.outputs)
        self._variables: dict[str, fx.Node] = {}
        self._written: dict[fx.Node, Expression] = {}
        self._pending: dict[fx.Node, _Pending] = {}
        self._lines: list[tuple[tuple[str, ...], str]] = []
        self._made = {node for item in scope.items for node in item.makes}
        for node, name in scope.names.items():
            self._written[node] = Expression(access(tree, name.split(".")))
        for node, name in zip(scope.inputs, parameters, strict=True):
            self._variables[name] = node
            self._written[node] = Expression(name)
        self._device = self._device_expression(parameters)

    def write(self) -> Written:
        for item in self._scope.items:
            if isinstance(item, Loop):
                self._loop(item)
            elif isinstance(item, ModuleCall):
                self._call(item)
            else:
                self._operation(item)
        results = self._return()
        return Written(tuple(self._lines), results, tuple(self._clashes))

    def _return(self) -> tuple[str, ...]:
        """``return`` of the results; one that was assigned a line before is returned by its expression. Their names:
        those of the variables, or those that the expressions would have been given."""
        for node in self._scope.outputs:
            if node in self._pending and self._pending[node].regions:
                self._settle(node)
        texts = [self._value(node).text for node in self._scope.outputs]
        names: list[str] = []
        for node, text in zip(self._scope.outputs, texts, strict=True):
            free = unused(variable(self._names.of_result(node), "x"), {*names, *texts})
            names.append(text if text.isidentifier() else free)
        regions, last = self._lines[-1] if self._lines else ((), "")
        if not regions and len(texts) == 1 and self._folds and last.startswith(f"{texts[0]} = "):
            texts = [self._lines.pop()[1].removeprefix(f"{texts[0]} = ")]
        result = ", ".join(texts)
        self._lines.append(
            ((), f"return ({result})" if len(texts) > 1 and len(result) > _LONGEST else f"return {result}")
        )
        return tuple(names)

    # ---- items -----------------------------------------------------------------------------------------------------

    def _operation(self, item: Operation) -> None:
        node = item.node
        if node in self._written:  # a part of a tuple that was unpacked
            return
        if "writes" in node.meta:
            self._write(item)
            return
        expression = self._build(item, lambda: express(node, Writer(self._value, self._device)))
        parts = [user for user in node.users if user.target is operator.getitem and user in self._made]
        if isinstance(node.meta.get("val"), (tuple, list)) and len(parts) > 1:
            self._unpack(item, expression, parts)
        else:
            self._place(item, node, expression)

    def _unpack(self, item: Operation, expression: Expression, parts: Sequence[fx.Node]) -> None:
        """``a, b = x.split(…)``."""
        by_position = {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]
        names = [
            self._bind(by_position[position], self._names.of(item, by_position[position]))
            if position in by_position
            else "_"
            for position in range(len(item.node.meta["val"]))
        ]
        self._emit(item, f"{', '.join(names)} = {expression.text}")

    def _write(self, item: Operation) -> None:
        """An operation in place is a statement; its result is the tensor that it wrote into."""
        node, regions = item.node, self._headers(item)
        kept = [each for each in _operands(item) if each in self._pending and self._pending[each].regions == regions]
        self._flush(except_for=kept)
        target = node.kwargs.get("out", node.args[0])
        assert isinstance(target, fx.Node) and isinstance(node.target, torch._ops.OpOverload)
        owner = self._value(target)
        self._written[target] = owner
        self._left[target] += 1
        if node.target.overloadpacket in _WRITES and owner.text.endswith("]"):
            source = node.args[1]
            text = f"{owner.text} = {self._value(source).text if isinstance(source, fx.Node) else literal(source)}"
            self._left[target] -= 1
        else:
            text = express(node, Writer(self._value, self._device)).text
        self._written[node] = owner
        if owner.text in self._variables:
            self._variables[owner.text] = node
        self._emit(item, text)

    def _call(self, item: ModuleCall) -> None:
        owner = access(self._tree, self._relative(item.fqn))
        expression = self._build(item, lambda: self._invoke(owner, item))
        if len(item.makes) == 1:
            self._place(item, item.makes[0], expression)
            return
        names = [self._bind(node, self._names.of(item, node)) for node in item.makes]
        self._emit(item, f"{', '.join(names)} = {expression.text}")

    def _loop(self, item: Loop) -> None:
        """``for layer in self.layers.values(): h = layer(h, cos, sin)``."""
        container = self._relative(item.calls[0].fqn)[:-1]
        carried = dict(item.carried)
        begin = {made: item.reads[position] for position, made in item.carried}
        for position, node in enumerate(item.reads):
            if position not in carried:
                self._settle(node)
        # All names are chosen while what the loop reads in every turn still counts as needed.
        names = {made: self._carry(item, made, node) for made, node in sorted(begin.items())}
        taken = self._taken() | set(names.values())
        module = unused(variable(container[-1].removesuffix("s") if container else "module", "module"), taken)
        number = unused("i", taken)
        for made, node in enumerate(item.makes):
            if made in names:
                self._variables[names[made]] = node
                self._written[node] = Expression(names[made])
            else:
                names[made] = self._bind(node, self._names.of(item, node))
        arguments = [
            names[carried[position]] if position in carried else self._value(node).text
            for position, node in enumerate(item.reads)
        ]
        header, callee = self._turns(item, module, number)
        targets = ", ".join(names[made] for made in range(len(item.makes)))
        self._emit(item, header)
        self._emit(item, f"    {targets} = {callee}({', '.join(arguments)})")

    def _turns(self, item: Loop, module: str, number: str) -> tuple[str, str]:
        """The header of a loop, and what it calls in every turn."""
        container = self._relative(item.calls[0].fqn)[:-1]
        holder, owner = self._tree.at(container), access(self._tree, container)
        assert isinstance(holder, Tree)
        numbers = [call.fqn.rpartition(".")[2] for call in item.calls]
        everything = list(holder.children) == numbers
        if holder.is_indexed:
            first = "" if numbers[0] == "0" else numbers[0]
            last = "" if numbers[-1] == list(holder.children)[-1] else str(int(numbers[-1]) + 1)
            return f"for {module} in {owner}{'' if everything else f'[{first}:{last}]'}:", module
        is_dict = holder.container is nn.ModuleDict
        if everything:
            return f"for {module} in {owner}.{'values' if is_dict else 'children'}():", module
        first = f"{numbers[0]}, " if numbers[0] != "0" else ""
        callee = f"{owner}[str({number})]" if is_dict else f"getattr({owner}, str({number}))"
        return f"for {number} in range({first}{int(numbers[-1]) + 1}):", callee

    def _carry(self, item: Loop, made: int, begin: fx.Node) -> str:
        """The variable that goes round a loop, holding ``begin`` before the first turn."""
        uses = sum(item.reads[position] is begin for position, _ in item.carried)
        wanted = variable(self._names.of(item, item.makes[made]), "x")
        pending = self._pending.get(begin)
        if pending is not None:
            self._left[begin] -= uses
            del self._pending[begin]
            name = unused(wanted, self._taken())
            self._lines.append((pending.regions, f"{name} = {pending.expression.text}"))
            self._variables[name] = begin
            return name
        self._left[begin] -= uses
        held = self._written[begin].text
        if (
            self._left[begin] == 0
            and held in self._variables
            and (held.startswith(wanted) or begin in self._scope.inputs)
        ):
            return held
        name = unused(wanted, self._taken() | {held})
        self._emit(item, f"{name} = {held}")
        self._variables[name] = begin
        return name

    # ---- values ----------------------------------------------------------------------------------------------------

    def _invoke(self, owner: str, item: ModuleCall) -> Expression:
        values = [self._value(node).text for node in item.handed]
        return Expression(owner + (item.arguments.text(values) if item.arguments else f"({', '.join(values)})"), ATOM)

    def _value(self, node: fx.Node) -> Expression:
        """The expression of a value, used once more."""
        self._left[node] -= 1
        if node in self._pending:
            return self._pending.pop(node).expression
        return self._written[node]

    def _build(self, item: Item, build: Callable[[], Expression]) -> Expression:
        """Build the expression of an item. What it draws in is written on lines of its own if it would grow too
        long, or if the item's effects must come after."""
        operands = dict.fromkeys(_operands(item))
        if _has_effects(item):
            self._flush(except_for=operands)
        drawn = [node for node in self._pending if node in operands]
        regions = self._headers(item)
        if all(self._pending[node].regions == regions for node in drawn):
            left, pending = {node: self._left[node] for node in operands}, dict(self._pending)
            self._drawn = frozenset(name for node in operands for name in self._held_names(node))
            expression = build()
            if not drawn or len(expression.text) <= _LONGEST:
                return expression
            self._left.update({node: count - self._left[node] for node, count in left.items()})
            self._pending = pending
        for node in drawn:
            self._settle(node)
        self._drawn = frozenset(name for node in operands for name in self._held_names(node))
        return build()

    def _held_names(self, node: fx.Node) -> frozenset[str]:
        """The variables that the expression of a value mentions."""
        if node in self._pending:
            return self._pending[node].names
        text = self._written[node].text if node in self._written else ""
        return frozenset(_NAME.findall(text)) & self._variables.keys()

    def _place(self, item: Item, node: fx.Node, expression: Expression) -> None:
        """Keep an expression for its only reader, or write it on a line."""
        if self._may_fold(item, node, expression):
            self._pending[node] = _Pending(expression, self._drawn, self._headers(item), item)
        elif self._left[node] == 0:
            self._emit(item, expression.text)
        else:
            self._emit(item, f"{self._bind(node, self._names.of(item, node))} = {expression.text}")

    def _may_fold(self, item: Item, node: fx.Node, expression: Expression) -> bool:
        """A value with one reader stands inside its expression, unless the model's source gives it a name that is
        free: with a number behind it, it says no more than the expression."""
        if not self._folds or self._left[node] != 1 or len(expression.text) > _FOLDED_LENGTH:
            return False
        if self._names.is_nameless(item, node):
            return True
        returned = len(self._scope.outputs) > 1 and node in self._scope.outputs
        return not returned and variable(self._names.of(item, node), "x") in self._taken()

    def _settle(self, node: fx.Node) -> None:
        """Write a pending value on a line of its own."""
        pending = self._pending.pop(node, None)
        if pending is None:
            return
        name = self._bind(node, self._names.of(pending.item, node))
        self._lines.append((pending.regions, f"{name} = {pending.expression.text}"))

    def _flush(self, except_for: Iterable[fx.Node]) -> None:
        kept = set(except_for)
        for node in [node for node in self._pending if node not in kept]:
            self._settle(node)

    # ---- names -----------------------------------------------------------------------------------------------------

    def _bind(self, node: fx.Node, wanted: str) -> str:
        """A variable for a value: the wanted name, or that with a number while the name is still needed."""
        name = unused(variable(wanted, "x"), self._taken())
        if name != variable(wanted, "x"):
            self._clashes.append(wanted)
        self._variables[name] = node
        self._written[node] = Expression(name)
        return name

    def _taken(self) -> set[str]:
        """Variables that something still reads, directly or inside a pending expression."""
        live = {name for name, node in self._variables.items() if self._left[node] > 0 and self._reads_name(name, node)}
        return live | {name for pending in self._pending.values() for name in pending.names}

    def _reads_name(self, name: str, node: fx.Node) -> bool:
        return node not in self._written or self._written[node].text == name

    def _relative(self, fqn: str) -> list[str]:
        prefix = self._scope.prefix
        return (fqn.removeprefix(f"{prefix}.") if prefix else fqn).split(".")

    # ---- surroundings ----------------------------------------------------------------------------------------------

    def _headers(self, item: Item) -> tuple[str, ...]:
        return headers(item.nodes, self._scope.regions, self._device)

    def _emit(self, item: Item, text: str) -> None:
        self._lines.append((self._headers(item), text))

    def _device_expression(self, parameters: Sequence[str]) -> str:
        """Where this class runs: the device of its first tensor."""
        if parameters:
            return f"{parameters[0]}.device"
        if self._scope.names:
            return f"{access(self._tree, next(iter(self._scope.names.values())).split('.'))}.device"
        return "torch.get_default_device()"


def _operands(item: Item) -> list[fx.Node]:
    """Values that an item mentions, as often as it does."""
    if isinstance(item, Operation):
        found: list[fx.Node] = []
        fx.map_arg((item.node.args, item.node.kwargs), found.append)
        return found
    return list(item.reads if isinstance(item, Loop) else item.handed)


def _has_effects(item: Item) -> bool:
    """Whether the place of an item in the order matters: it draws random numbers or changes state."""
    return any(
        "writes" in node.meta or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in item.nodes
    )
