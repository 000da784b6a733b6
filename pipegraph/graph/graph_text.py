"""A captured graph as text that reads like Python, with the dtype and shape of every value; the modules of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from pipegraph.graph.calls import CallTree, call_tree
from pipegraph.graph.captured import Captured, split_point
from pipegraph.graph.nodes import path_of, shape_of
from pipegraph.graph.partition.split_points import SplitPoint, holds_parameter, opened_calls
from pipegraph.graph.partition.stages import Boundary, StageGraph
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.operators import OpOverload

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_FLAGS = ("requires_grad", "cut_off", "in_every_mode", "follows_buffer")


def graph_text(nodes: Iterable[fx.Node], title: str) -> str:
    """One line a node, under a title.

    linear = aten.linear.default(x, weight)    # f32[8, 512]  layers.0.proj  requires_grad
    """
    return "\n".join([f"# {title}", *map(_line, nodes)])


def segments_text(captured: Captured) -> str:
    """The chain of segments, each under its name."""
    parts = [(segment.fqn, captured.nodes[segment.start : segment.stop]) for segment in captured.segments]
    return "\n\n".join(graph_text(nodes, f"segment {index}: {fqn}") for index, (fqn, nodes) in enumerate(parts))


def stages_text(stages: Sequence[StageGraph], boundaries: Sequence[Boundary]) -> str:
    """The values that cross the cuts, then each stage with its inputs, outputs and state."""
    lines = ["# boundaries"]
    for boundary in boundaries:
        grad = "  requires_grad" if boundary.requires_grad else ""
        crossing = f"stage {boundary.producer} -> stages {list(boundary.consumers)}{grad}"
        lines.append(f"{boundary.node.name}: {value_text(boundary.node)}  {crossing}")
    for stage in stages:
        lines += ["", graph_text(stage.nodes, f"stage {stage.index}{stage.inputs} -> {stage.outputs}")]
        lines += ["# state", *stage.state]
    return "\n".join(lines)


def value_text(node: fx.Node, longest: int | None = None) -> str:
    """``f32[batch, 128, 512]``: the dtype and shape of a value, or of each value of a tuple; empty for others.

    Args:
        longest: the characters of a size, for which ``…`` stands if it has more; None for any number.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return type_text(node.meta["val"], shape_of(node), longest)
    return _nested_text(node.meta.get("val"))


def type_text(tensor: torch.Tensor, shape: Sequence[int] | None = None, longest: int | None = None) -> str:
    """``f32[8, 128, 512]``: the dtype and shape of a tensor."""
    texts = (size.text if isinstance(size, SymbolicSize) else str(size) for size in shape or tensor.shape)
    sizes = ("…" if longest is not None and len(text) > longest else text for text in texts)
    name = str(tensor.dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    short = _SHORT[stem] + name[len(stem) :] if stem in _SHORT else name
    return f"{short}[{', '.join(sizes)}]"


def _line(node: fx.Node) -> str:
    path = path_of(node)
    regions = [f"{kind}{settings}" for kind, settings in node.meta.get("regions", ())]
    writes = [f"writes {node.meta['writes']}"] if "writes" in node.meta else []
    flags = [flag for flag in _FLAGS if node.meta.get(flag)]
    notes = [value_text(node), call_name(path[-1][0]) if path else "", *regions, *writes, *flags]
    return f"{_statement(node)}    # {'  '.join(note for note in notes if note)}".rstrip("# ")


def _statement(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name} = input({str(node.target)!r})"
    if node.op == "get_attr":
        return f"{node.name} = state({str(node.target)!r})"
    arguments = [*map(repr, node.args), *(f"{name}={value!r}" for name, value in node.kwargs.items())]
    if node.op == "output":
        return f"return {arguments[0]}"
    target = str(node.target) if isinstance(node.target, OpOverload) else node.target.__name__  # type: ignore[union-attr]
    return f"{node.name} = {target}({', '.join(arguments)})"


def _nested_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_nested_text, value))})"
    return type_text(value) if isinstance(value, torch.Tensor) else ""


def stage_modules(captured: Captured, stage: StageGraph) -> list[str]:
    """Return the names of a stage's modules: ``embed``, ``layers.0 – layers.3``.

    A module without parameters is listed only if the stage begins with it.
    """
    cuts = captured.graph.find_nodes(op="call_function", target=split_point)
    fqn, side = cuts[stage.index - 1].args if stage.index else (None, None)
    begins = str(fqn) if side == SplitPoint.BEGINNING.value else None
    listed = list(dict.fromkeys(_module_fqns(captured, call_tree(stage.nodes), begins)))
    named = [run[0] if len(run) == 1 else f"{run[0]} – {run[-1]}" for run in _runs(listed)]
    return named or ["operations of the model itself"]


def _module_fqns(captured: Captured, root: CallTree, begins: str | None) -> Iterator[str]:
    """Yield the FQNs of calls that hold parameters, and of the one with which the stage begins.

    A call that was cut is replaced with the calls inside it; one without any is a part.
    """

    opened = opened_calls(captured)

    def parts(call: CallTree) -> Iterator[tuple[CallTree, bool]]:
        inner, is_whole = list(call.calls()), len(list(call.nodes())) == captured.operations_of[call.call]
        is_listed = call.call not in opened or call.fqn.rpartition(".")[2].isdigit()  # of a list of lists
        if (is_whole and is_listed) or not inner:
            yield call, is_whole
            return
        for child in inner:
            yield from parts(child)

    for call in root.calls():
        for part, is_whole in parts(call):
            if part.fqn == begins or holds_parameter(captured, part):
                yield part.fqn if is_whole else f"part of {part.fqn}"


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Group neighbours whose numbers count up: layers.0, layers.1, …"""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _follows(name: str, next_name: str) -> bool:
    (stem, _, number), (next_stem, _, next_number) = name.rpartition("."), next_name.rpartition(".")
    return stem == next_stem and number.isdecimal() and next_number.isdecimal() and int(next_number) == int(number) + 1
