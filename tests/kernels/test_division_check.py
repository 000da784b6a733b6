"""Each rule of a division is checked, and every form can be written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipegraph.debug import InvalidGraphError
from pipegraph.kernels import make
from pipegraph.kernels.blocks.divided_function import DividedFunction, check_division
from pipegraph.kernels.graphs.block_operation import KernelGraph
from tests.kernels.stages import Function, Layers, linear, x


def divided() -> DividedFunction:
    kernels: Any = make("eager", Function(lambda s, x: s.b(torch.tanh(s.a(x))), **linear("a", "b")), (True,), (True,))
    kernels.forward((x,))
    (variant,) = kernels.variants
    function: DividedFunction = variant.divided
    return function


def reading(graph: KernelGraph, name: str) -> KernelGraph:
    return replace(graph, inputs=(*graph.inputs, name))


def without_copy(graph: KernelGraph) -> KernelGraph:
    """Its last output is a view of an input."""
    (end,) = graph.module.graph.find_nodes(op="output")
    end.args = ((*end.args[0][:-1], graph.module.graph.find_nodes(op="placeholder")[0]),)
    return graph


BREAKS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "I reads what is not there when it runs: later": lambda f, b: (f, replace(b, input=reading(b.input, "later"))),
    "W reads what is not there when it runs: later": lambda f, b: (f, replace(b, weight=reading(b.weight, "later"))),
    "I and W: gradients that are not returned exactly once": lambda f, b: (f, replace(b, weight=None)),
    "B: gradients that are not returned exactly once": lambda f, b: (f, replace(b, full=b.input)),
    "F saves what nothing reads: more": lambda f, b: (replace(f, outputs=(*f.outputs, "more")), b),
    "W returns gradients of parameters that share memory": lambda f, b: (f, replace(b, weight=without_copy(b.weight))),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_named(rule: str) -> None:
    function = divided()
    mask, is_input = function.full_mask, [False] * 4 + [True]
    check_division(function.joint, function.forward, function.backward(mask), is_input, mask)
    forward, backward = BREAKS[rule](function.forward, function.backward(mask))
    with pytest.raises(InvalidGraphError, match=rule):
        check_division(function.joint, forward, backward, is_input, mask)


def test_graphs_of_the_stage_and_of_its_blocks_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEGRAPH_DUMP", str(tmp_path))
    make("eager", Layers(), (True,), (True,)).forward((x,))
    names = [file.name for file in sorted(tmp_path.iterdir())]
    kinds = [name.rsplit("_", 1)[1] for name in names]
    assert kinds == [f"{kind}.txt" for kind in ("joint", "I", "W", "B", "F")] * 2
    assert ["Layers" in name for name in names] == [False] * 5 + [True] * 5
    assert "f32[4, 8]" in (tmp_path / names[0]).read_text()
