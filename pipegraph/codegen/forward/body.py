"""The statements of a ``forward``."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import fx

from pipegraph.codegen.expressions.operation import express
from pipegraph.codegen.forward.contexts import headers
from pipegraph.codegen.forward.items import Item, Loop, ModuleCall, Operation, Scope, has_effects, operands
from pipegraph.codegen.forward.local_variables import Pending, Values
from pipegraph.codegen.forward.loop_statements import heading, turn_lines
from pipegraph.codegen.forward.module_tree import Tree, access
from pipegraph.codegen.forward.value_names import ValueNames
from pipegraph.codegen.names.identifiers import relative, unused, variable
from pipegraph.codegen.names.source_statements import Origins
from pipegraph.codegen.syntax.expression import ATOM, Expression, Writer
from pipegraph.codegen.syntax.line_breaks import reads_well
from pipegraph.codegen.syntax.literals import literal
from pipegraph.graph.aliasing import is_view, is_written

# An expression that was put together from several is no longer than this; one that goes into another, than that.
_LONGEST, _FOLDED_LENGTH = 96, 88
# One that was a single statement in the model's source may be longer.
_LONGEST_STATEMENT = 108
# One that the model's source writes on a line before it gives it another shape.
_RENEWED_LENGTH = 72
_INDENT = 8
_WRITES = (torch.ops.aten.fill_, torch.ops.aten.copy_)


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
        taken = dict(zip(scope.inputs, parameters, strict=True))
        self._names = ValueNames(scope, origins, wanted, taken, clashes)
        uses = Counter(node for item in scope.items for node in operands(item))
        uses.update(scope.outputs)
        self._drawn: frozenset[str] = frozenset()  # variables that the expression mentions that was built last
        attributes = {node: access(tree, name.split(".")) for node, name in scope.names.items()}
        self._values = Values(self._names, uses, attributes, taken)
        self._made = {node for item in scope.items for node in item.makes}
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
        return Written(tuple(self._values.lines), results, tuple(self._values.clashes))

    def _return(self) -> tuple[str, ...]:
        """``return`` of the results; one that was assigned a line before is returned by its expression. Their names:
        those of the variables, or those that the expressions would have been given."""
        for node in self._scope.outputs:
            if node in self._values.pending and self._values.pending[node].regions:
                self._values.settle(node)
        texts = [self._values.use(node).text for node in self._scope.outputs]
        names: list[str] = []
        for node, text in zip(self._scope.outputs, texts, strict=True):
            free = unused(variable(self._names.of_result(node), "x"), {*names, *texts})
            names.append(text if text.isidentifier() else free)
        regions, last = self._values.lines[-1] if self._values.lines else ((), "")
        if not regions and len(texts) == 1 and self._folds and last.startswith(f"{texts[0]} = "):
            texts = [self._values.lines.pop()[1].removeprefix(f"{texts[0]} = ")]
        result = ", ".join(texts)
        self._values.lines.append(
            ((), f"return ({result})" if len(texts) > 1 and len(result) > _LONGEST else f"return {result}")
        )
        return tuple(names)

    # ---- items -----------------------------------------------------------------------------------------------------

    def _operation(self, item: Operation) -> None:
        node = item.node
        if node in self._values.written:  # a part of a tuple that was unpacked
            return
        if "writes" in node.meta:
            self._write(item)
            return
        expression = self._build(item, lambda: express(node, Writer(self._values.use, self._device)))
        parts = [user for user in node.users if user.target is operator.getitem and user in self._made]
        if isinstance(node.meta.get("val"), (tuple, list)) and len(parts) > 1:
            self._unpack(item, expression, parts)
        else:
            self._place(item, node, expression)

    def _unpack(self, item: Operation, expression: Expression, parts: Sequence[fx.Node]) -> None:
        """``a, b = x.split(…)``."""
        by_position = {int(part.args[1]): part for part in parts}  # type: ignore[arg-type]
        names = [
            self._bind(item, by_position[position]) if position in by_position else "_"
            for position in range(len(item.node.meta["val"]))
        ]
        self._emit(item, f"{', '.join(names)} = {expression.text}")

    def _write(self, item: Operation) -> None:
        """An operation in place is a statement; its result is the tensor that it wrote into."""
        node, regions = item.node, self._headers(item)
        kept = [
            each
            for each in operands(item)
            if each in self._values.pending and self._values.pending[each].regions == regions
        ]
        self._values.flush(except_for=kept)
        target = node.kwargs.get("out", node.args[0])
        assert isinstance(target, fx.Node) and isinstance(node.target, torch._ops.OpOverload)
        if self._values.left[node] > 0:
            self._values.settle(target, kept=kept)
        owner = self._values.use(target)
        self._values.written[target] = owner
        self._values.left[target] += 1
        if node.target.overloadpacket in _WRITES and owner.text.endswith("]"):
            source = node.args[1]
            text = f"{owner.text} = {self._values.use(source).text if isinstance(source, fx.Node) else literal(source)}"
            self._values.left[target] -= 1
        else:
            text = express(node, Writer(self._values.use, self._device)).text
        self._values.written[node] = owner
        if owner.text in self._values.variables:
            self._values.variables[owner.text] = node
        self._emit(item, text)

    def _call(self, item: ModuleCall) -> None:
        owner = access(self._tree, self._relative(item.fqn))
        expression = self._build(item, lambda: self._invoke(owner, item))
        if len(item.makes) == 1:
            self._place(item, item.makes[0], expression)
            return
        names = [self._bind(item, node) for node in item.makes]
        self._emit(item, f"{', '.join(names)} = {expression.text}")

    def _loop(self, item: Loop) -> None:
        """``for layer in self.layers.values(): h = layer(h, cos, sin)``."""
        container = self._relative(item.calls[0].fqn)[:-1]
        carried = dict(item.carried)
        begin = {made: item.reads[position] for position, made in item.carried}
        for position, node in enumerate(item.reads):
            if position not in carried:
                self._values.settle(node)
        # All names are chosen while what the loop reads in every turn still counts as needed.
        names: dict[int, str] = {}
        for made, node in sorted(begin.items()):
            names[made] = self._carry(item, made, node, set(names.values()))
        taken = self._values.taken() | set(names.values())
        module = unused(variable(container[-1].removesuffix("s") if container else "module", "module"), taken)
        number = unused("i", taken)
        for made, node in enumerate(item.makes):
            if made in names:
                self._values.variables[names[made]] = node
                self._values.written[node] = Expression(names[made])
            else:
                names[made] = self._values.bind(node, self._names.of(item, node))
        header, callee = heading(item, self._tree, container, module, number)
        targets = ", ".join(names[made] for made in range(len(item.makes)))
        handed = [
            [names[made] if made is not None else self._values.use(node).text for node, made in pattern]
            for pattern in item.patterns
        ]
        self._emit(item, header)
        for line in turn_lines(item.alternate, number, f"{targets} = {callee}", *handed):
            self._emit(item, f"    {line}")

    def _carry(self, item: Loop, made: int, begin: fx.Node, others: AbstractSet[str]) -> str:
        """The variable that goes round a loop, holding ``begin`` before the first turn; ``others`` do so as well."""
        uses = sum(carried == made for _, carried in item.carried)
        wanted = variable(self._names.of(item, item.makes[made]), "x")
        pending = self._values.pending.get(begin)
        if pending is not None:
            self._values.left[begin] -= uses
            del self._values.pending[begin]
            name = unused(wanted, self._values.taken() | others)
            self._values.lines.append((pending.regions, f"{name} = {pending.expression.text}"))
            self._values.variables[name] = begin
            return name
        self._values.left[begin] -= uses
        held = self._values.written[begin].text
        if (
            self._values.left[begin] == 0
            and held in self._values.variables
            and (held.startswith(wanted) or begin in self._scope.inputs)
        ):
            return held
        name = unused(wanted, self._values.taken() | {held, *others})
        self._emit(item, f"{name} = {held}")
        self._values.variables[name] = begin
        return name

    # ---- values ----------------------------------------------------------------------------------------------------

    def _invoke(self, owner: str, item: ModuleCall) -> Expression:
        values = [self._values.use(node).text for node in item.handed]
        return Expression(owner + (item.arguments.text(values) if item.arguments else f"({', '.join(values)})"), ATOM)

    def _build(self, item: Item, build: Callable[[], Expression]) -> Expression:
        """Build the expression of an item. What it draws in is written on lines of its own if it would grow too
        long, or if the item's effects must come after."""
        read = dict.fromkeys(operands(item))
        if has_effects(item):
            self._values.flush(except_for=read)
        drawn = [node for node in self._values.pending if node in read]
        regions = self._headers(item)
        if any(self._values.pending[node].regions != regions for node in drawn):
            for node in drawn:
                self._values.settle(node)
        makers = {node: self._values.pending[node].item for node in drawn if node in self._values.pending}
        while True:
            drawn = [node for node in drawn if node in self._values.pending]
            left, pending = {node: self._values.left[node] for node in read}, dict(self._values.pending)
            self._drawn = frozenset(name for node in read for name in self._values.held_names(node))
            expression = build()
            if not drawn or self._fits(item, [makers[node] for node in drawn], expression.text):
                return expression
            self._values.left.update({node: count - self._values.left[node] for node, count in left.items()})
            self._values.pending = pending
            # What the source names stands better on a line of its own.
            named = [node for node in drawn if self._names.is_named(node)]
            for node in named or drawn:
                self._values.settle(node, kept=read)

    def _fits(self, item: Item, drawn: Sequence[Item], text: str) -> bool:
        """Whether an expression that others were drawn into is short enough; one statement of the source may be
        longer."""
        one = all(self._names.statement(each) == self._names.statement(item) for each in drawn)
        name = self._names.of(item, item.makes[0])
        indent = _INDENT + 4 * len(self._headers(item))
        return len(text) <= (_LONGEST_STATEMENT if one else _LONGEST) and reads_well(f"{name} = {text}", indent)

    def _place(self, item: Item, node: fx.Node, expression: Expression) -> None:
        """Keep an expression for its only reader, or write it on a line."""
        if self._may_fold(item, node, expression):
            self._values.pending[node] = Pending(expression, self._drawn, self._headers(item), item)
        elif self._values.left[node] == 0:
            self._emit(item, expression.text)
        else:
            self._emit(item, f"{self._bind(item, node)} = {expression.text}")

    def _bind(self, item: Item, node: fx.Node) -> str:
        """A variable for what was just built."""
        return self._values.bind(node, self._names.of(item, node), self._drawn)

    def _may_fold(self, item: Item, node: fx.Node, expression: Expression) -> bool:
        """A value with one reader stands inside its expression, unless the model's source gives it a name that is
        free: with a number behind it, it says no more than the expression."""
        if not self._folds or self._values.left[node] != 1 or len(expression.text) > _FOLDED_LENGTH:
            return False
        if is_written(node) and not is_view(node):  # written out again, it would be other memory
            return False
        if self._names.is_nameless(item, node):
            return True
        if self._names.is_renewed(node) and len(expression.text) <= _RENEWED_LENGTH:
            return True
        returned = len(self._scope.outputs) > 1 and node in self._scope.outputs
        return not returned and variable(self._names.of(item, node), "x") in self._values.taken()

    def _relative(self, fqn: str) -> list[str]:
        return relative(fqn, self._scope.prefix).split(".")

    # ---- surroundings ----------------------------------------------------------------------------------------------

    def _headers(self, item: Item) -> tuple[str, ...]:
        return headers(item.nodes, self._scope.regions, self._device)

    def _emit(self, item: Item, text: str) -> None:
        self._values.lines.append((self._headers(item), text))

    def _device_expression(self, parameters: Sequence[str]) -> str:
        """Where this class runs: the device of its first tensor."""
        if parameters:
            return f"{parameters[0]}.device"
        if self._scope.names:
            return f"{access(self._tree, next(iter(self._scope.names.values())).split('.'))}.device"
        return "torch.get_default_device()"
