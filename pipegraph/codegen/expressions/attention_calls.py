"""``nn.MultiheadAttention`` as itself, where a call of it does what the operations of a graph do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pipegraph.codegen.syntax.literals import literal
from pipegraph.errors import CaptureError
from pipegraph.graph.call_tree import CallTree
from pipegraph.graph.capture import capture
from pipegraph.graph.captured import Captured

# Operations in order, and which of them give results.
_Form = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Arguments:
    """How values stand in a call: ``handed`` are (keyword or nothing, position among the values read), ``flags`` what
    follows; ``first`` takes the first of the results. ``results`` are the positions of the results among the values
    that the call makes."""

    handed: tuple[tuple[str, int], ...]
    flags: tuple[tuple[str, bool], ...]
    first: bool
    results: tuple[int, ...] = (0,)

    def text(self, values: Sequence[str]) -> str:
        """``(x, x, x, need_weights=False)[0]``; ``values`` are those handed, in order."""
        named = [f"{name}={value}" if name else value for (name, _), value in zip(self.handed, values, strict=True)]
        flags = [f"{name}={value}" for name, value in self.flags]
        return f"({', '.join([*named, *flags])}){'[0]' if self.first else ''}"


def constructor(module: nn.MultiheadAttention) -> str:
    """``nn.MultiheadAttention(512, 8, batch_first=True)``."""
    dtype = module.out_proj.weight.dtype
    named = {
        "dropout": (module.dropout, 0.0),
        "bias": (module.in_proj_bias is not None, True),
        "add_bias_kv": (module.bias_k is not None, False),
        "add_zero_attn": (module.add_zero_attn, False),
        "kdim": (module.kdim, module.embed_dim),
        "vdim": (module.vdim, module.embed_dim),
        "batch_first": (module.batch_first, False),
        "dtype": (dtype, torch.float32),
    }
    given = [f"{name}={literal(value)}" for name, (value, default) in named.items() if value != default]
    return f"nn.MultiheadAttention({', '.join([str(module.embed_dim), str(module.num_heads), *given])})"


class Attentions:
    """Finds the arguments of calls; equal calls are looked at once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._found: dict[object, Arguments | None] = {}

    def arguments(self, call: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> Arguments | None:
        """The arguments with which the module of ``call`` does what the call did; None where it is no attention of
        torch's, or none are found (the call is cut in two, or was simplified)."""
        module = self._captured.modules[call.fqn].module
        if type(module) is not nn.MultiheadAttention or any(node.op == "get_attr" for node in reads):
            return None
        done = _form(self._captured, call.fqn, tuple(call.nodes()), reads, makes)
        key = (constructor(module), done, tuple(str(node.meta["val"]) for node in reads))
        if key not in self._found:
            tried = (_tried(module, each, reads, done) for each in _candidates(reads, len(makes)))
            self._found[key] = next((each for each in tried if each is not None), None)
        return self._found[key]


def _candidates(reads: Sequence[fx.Node], results: int) -> Iterator[Arguments]:
    """The ways to hand over the values read: query, key and value in that order, then masks."""
    values = [node.meta["val"] for node in reads]
    states = [position for position, value in enumerate(values) if value.dim() == 3 and value.dtype != torch.bool]
    masks = [position for position in range(len(values)) if position not in states]
    handed = {1: [0, 0, 0], 2: [0, 1, 1], 3: [0, 1, 2]}.get(len(states))
    if handed is None or len(masks) > 2:
        return
    first = tuple(("", states[position]) for position in handed)
    for chosen in permutations(("attn_mask", "key_padding_mask"), len(masks)):
        masked = (*first, *zip(chosen, masks, strict=True))
        if results == 1:
            yield Arguments(masked, (("need_weights", False),), first=True)
            yield Arguments(masked, (), first=True)
        else:
            yield Arguments(masked, (), first=False)
            yield Arguments(masked, (("average_attn_weights", False),), first=False)


class _Trial(nn.Module):
    """The attention alone, called with certain arguments."""

    def __init__(self, attention: nn.MultiheadAttention, arguments: Arguments) -> None:
        super().__init__()
        self.attention = attention
        self.arguments = arguments

    def forward(self, *values: Tensor) -> Any:
        positional = [values[position] for name, position in self.arguments.handed if not name]
        named = {name: values[position] for name, position in self.arguments.handed if name}
        result = self.attention(*positional, **named, **dict(self.arguments.flags))
        return result[0] if self.arguments.first else result


def _tried(
    module: nn.MultiheadAttention, arguments: Arguments, reads: Sequence[fx.Node], done: _Form
) -> Arguments | None:
    """The arguments, if the module called with them runs the operations ``done`` and gives what they give."""
    values = tuple(torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta") for node in reads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = capture(_Trial(module, arguments), values)
    except CaptureError:
        return None
    rows, made = _form(trial, "attention", trial.nodes, trial.inputs, trial.returned)
    if rows != done[0] or sorted(made) != sorted(done[1]):
        return None
    return replace(arguments, results=tuple(done[1].index(each) for each in made))


def _form(
    captured: Captured, fqn: str, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> _Form:
    """Operations with numbers for values and names relative to ``fqn`` for state: equal for equal code."""
    numbers: dict[fx.Node, object] = {node: ("read", position) for position, node in enumerate(reads)}

    def number(node: fx.Node) -> object:
        if node.op != "get_attr":
            return numbers.get(node)
        names = captured.names_of[str(node.target)]
        return next((name.removeprefix(fqn) for name in names if name.startswith(f"{fqn}.")), None)

    def shown(leaf: Any) -> Any:
        return _Shown(number(leaf)) if isinstance(leaf, fx.Node) else leaf

    rows: list[str] = []
    for node in nodes:
        arguments = pytree.tree_map(shown, (node.args, node.kwargs))
        rows.append(f"{node.target} {arguments} {node.meta['regions']} {node.meta['in_every_mode']}")
        numbers[node] = len(rows)
    return tuple(rows), tuple(str(numbers.get(node)) for node in makes)


@dataclass(frozen=True)
class _Shown:
    """Stands for a value in the text of an operation."""

    number: object
