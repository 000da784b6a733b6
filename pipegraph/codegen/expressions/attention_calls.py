"""``nn.MultiheadAttention`` as itself, if a call of it does what the operations of a graph do."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipegraph.codegen.syntax.expressions import Expression, FunctionCall, Subscript, call, literal
from pipegraph.errors import CaptureError
from pipegraph.graph.call_arguments import argument_place
from pipegraph.graph.call_tree import CallTree
from pipegraph.graph.capture import capture
from pipegraph.graph.captured import Captured

_MASKS = ("attn_mask", "key_padding_mask")
# Operations in order, and which of them give results.
_Operations = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of a call of ``nn.MultiheadAttention``.

    Attributes:
        values: for each argument that is a value, its keyword ("" for a positional one) and its position among the
            values that the call reads.
        flags: the arguments behind them.
        takes_first: whether only the first result is used.
        results: for each result, its position among the values that the call makes.
    """

    values: tuple[tuple[str, int], ...]
    flags: tuple[tuple[str, bool], ...]
    takes_first: bool
    results: tuple[int, ...] = (0,)

    def call(self, function: Expression, values: Sequence[Expression]) -> Expression:
        """``self.attention(x, x, x, need_weights=False)[0]``.

        Args:
            values: the expressions of ``self.values``.
        """
        given = [(name, value) for (name, _), value in zip(self.values, values, strict=True)]
        named = {name: value for name, value in given if name}
        flags = {name: literal(value) for name, value in self.flags}
        made = call(function, *(value for name, value in given if not name), **named, **flags)
        return Subscript(made, (literal(0),)) if self.takes_first else made


def attention_constructor(module: nn.MultiheadAttention) -> FunctionCall:
    """``nn.MultiheadAttention(512, 8, batch_first=True)``."""
    options = {
        "dropout": (module.dropout, 0.0),
        "bias": (module.in_proj_bias is not None, True),
        "add_bias_kv": (module.bias_k is not None, False),
        "add_zero_attn": (module.add_zero_attn, False),
        "kdim": (module.kdim, module.embed_dim),
        "vdim": (module.vdim, module.embed_dim),
        "batch_first": (module.batch_first, False),
        "dtype": (module.out_proj.weight.dtype, torch.float32),
    }
    named = {name: literal(value) for name, (value, default) in options.items() if value != default}
    return call("nn.MultiheadAttention", literal(module.embed_dim), literal(module.num_heads), **named)


class AttentionCalls:
    """Finds the arguments of calls. Each configuration of module, arguments and shapes is checked once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._checked: dict[object, AttentionArguments | None] = {}

    def arguments(
        self, called: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]
    ) -> AttentionArguments | None:
        """The arguments with which the module does what the call did.

        None if it is no ``nn.MultiheadAttention``, or if such a call does something else: this one may be cut in two,
        or simplified.
        """
        module = self._captured.modules[called.fqn].module
        if type(module) is not nn.MultiheadAttention or any(node.op == "get_attr" for node in reads):
            return None
        arguments = _recorded(called, reads, makes)
        if arguments is None:
            return None
        done = _operations(self._captured, called.fqn, tuple(called.nodes()), reads, makes)
        key = (attention_constructor(module), arguments, done, tuple(str(node.meta["val"]) for node in reads))
        if key not in self._checked:
            self._checked[key] = _check(module, arguments, reads, done)
        return self._checked[key]


def _recorded(called: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> AttentionArguments | None:
    """The arguments as capture recorded them; flags follow from the operations and the results."""
    places = [argument_place(node, called.call) for node in reads]
    names = [place.name if place is not None else None for place in places]
    states = [position for position, name in enumerate(names) if name not in _MASKS]
    given = {1: [0, 0, 0], 2: [0, 1, 1], 3: [0, 1, 2]}.get(len(states))
    if given is None or any(reads[position].meta["val"].dim() != 3 for position in states):
        return None
    masks = [(name, position) for position, name in enumerate(names) if name in _MASKS]
    values = (*(("", states[position]) for position in given), *((str(name), position) for name, position in masks))
    if len(makes) > 1:
        per_head = any(node.meta["val"].dim() == 4 for node in makes)
        return AttentionArguments(values, (("average_attn_weights", False),) * per_head, takes_first=False)
    fused = any(node.target is torch.ops.aten.scaled_dot_product_attention.default for node in called.nodes())
    return AttentionArguments(values, (("need_weights", False),) * fused, takes_first=True)


class _AttentionOnly(nn.Module):
    """The attention alone, called with certain arguments."""

    def __init__(self, attention: nn.MultiheadAttention, arguments: AttentionArguments) -> None:
        super().__init__()
        self.attention = attention
        self.arguments = arguments

    def forward(self, *values: Tensor) -> Any:
        positional = [values[position] for name, position in self.arguments.values if not name]
        named = {name: values[position] for name, position in self.arguments.values if name}
        result = self.attention(*positional, **named, **dict(self.arguments.flags))
        return result[0] if self.arguments.takes_first else result


def _check(
    module: nn.MultiheadAttention, arguments: AttentionArguments, reads: Sequence[fx.Node], done: _Operations
) -> AttentionArguments | None:
    """The arguments and their results, if the module called with them runs the operations ``done``."""
    values = tuple(torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta") for node in reads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = capture(_AttentionOnly(module, arguments), values)
    except CaptureError:
        return None
    operations, results = _operations(alone, "attention", alone.nodes, alone.inputs, alone.returned)
    if operations != done[0] or sorted(results) != sorted(done[1]):
        return None
    return replace(arguments, results=tuple(done[1].index(result) for result in results))


def _operations(
    captured: Captured, fqn: str, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> _Operations:
    """Operations with numbers for values and names relative to ``fqn`` for state: equal for equal code."""
    numbers: dict[fx.Node, object] = {node: ("read", position) for position, node in enumerate(reads)}

    def numbered(node: fx.Node) -> Any:
        if node.op != "get_attr":
            return f"value {numbers.get(node)}"
        names = captured.names_of[str(node.target)]
        return next((f"state {name.removeprefix(fqn)}" for name in names if name.startswith(f"{fqn}.")), "state")

    operations: list[str] = []
    for node in nodes:
        arguments = fx.map_arg((node.args, node.kwargs), numbered)
        operations.append(f"{node.target} {arguments} {node.meta['regions']} {node.meta['in_every_mode']}")
        numbers[node] = len(operations)
    return tuple(operations), tuple(str(numbers.get(node)) for node in makes)
