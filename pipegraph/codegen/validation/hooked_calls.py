"""Compare the calls of modules with hooks for their backward, which get gradients of arguments and results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from pipegraph.codegen.validation.captured_stage import CapturedStage, StageState
from pipegraph.codegen.validation.recorder import TermRecorder
from pipegraph.codegen.validation.settings import Setting
from pipegraph.codegen.validation.terms import Terms
from pipegraph.codegen.validation.written_stage import run_written
from pipegraph.graph.captured import Captured
from pipegraph.graph.internals import call_name, pytree
from pipegraph.graph.partition.stages import StageGraph, calls_of

Call = tuple[tuple[int, ...], tuple[int, ...]]
"""The terms of the tensors that a call takes by position, and of those that it returns."""


def hooked_call_difference(
    captured: Captured, stage: StageGraph, module: nn.Module, state: StageState, setting: Setting
) -> tuple[str, str] | None:
    """Compare the calls of the modules of a stage that have hooks for their backward.

    Returns:
        What the written module and the captured graph call, in words; None if the calls are equal.
    """
    names = {hook.owner for hook in captured.hooks if hook.is_of_module and calls_of(stage.nodes, hook.owner)}
    if not names:
        return None
    terms = Terms()
    expected: dict[str, list[Call]] = {}
    with TermRecorder(terms) as recorder:
        run = CapturedStage(captured, stage, state, setting, recorder, None)
        run.run()
        for name in names:
            calls = calls_of([node for node in stage.nodes if node in run.values], name)
            expected[name] = sorted(_captured_call(recorder, run.values, call) for call in calls)
    actual: dict[str, list[Call]] = {name: [] for name in names}

    def note(name: str, args: tuple[Any, ...], result: Any) -> None:
        takes, returns = (tuple(map(recorder.term_of, _tensors(values))) for values in (args, result))
        actual[name].append((takes, returns))

    with TermRecorder(terms) as recorder:
        handles = [
            module.get_submodule(name).register_forward_hook(
                lambda _, args, result, name=name: note(name, args, result)
            )
            for name in names
        ]
        try:
            run_written(stage, module, state, setting, recorder, None)
        finally:
            for handle in handles:
                handle.remove()
    different = next((name for name in sorted(names) if sorted(actual[name]) != expected[name]), None)
    if different is None:
        return None
    counts = len(actual[different]), len(expected[different])
    written, model = (f"{count} calls of {different}" for count in counts)
    return written, f"{model}, with other arguments or results" if counts[0] == counts[1] else model


def _captured_call(recorder: TermRecorder, values: Mapping[fx.Node, Any], call: str) -> Call:
    takes: list[tuple[int, int]] = []
    returns: list[tuple[int, int]] = []
    for node, value in values.items():
        argument, result = (node.meta.get(key, {}).get(call_name(call)) for key in ("argument_of", "result_of"))
        if argument is not None and isinstance(value, Tensor):
            takes += [(order, recorder.term_of(value)) for order in argument.orders]
        if result is not None and isinstance(value, Tensor):
            returns.append((result.order, recorder.term_of(value)))
    return tuple(term for _, term in sorted(takes)), tuple(term for _, term in sorted(returns))


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
