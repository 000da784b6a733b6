"""Compare the written stages of a package with the captured graph, and say where they differ."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn

from pipegraph.codegen.validation.captured_stage import CapturedStage, StageState
from pipegraph.codegen.validation.recorder import TermRecorder
from pipegraph.codegen.validation.repeated_calls import RepeatedCalls
from pipegraph.codegen.validation.settings import Setting
from pipegraph.codegen.validation.terms import Terms
from pipegraph.codegen.validation.written_stage import WrongStateError, check_state, run_written, set_state
from pipegraph.errors import CaptureError, one_line
from pipegraph.graph.captured import Captured
from pipegraph.graph.export.isolation import refusals_not_logged
from pipegraph.graph.nodes import path_of, source_line, source_lines
from pipegraph.graph.partition.stages import StageGraph, calls_of
from pipegraph.package.source_import import PACKAGE_NAME
from pipegraph.planner.plan import Plan
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.fake_tensors import new_fake_mode
from pipegraph.torch_private.pytrees import pytree

# ---- hooked calls ----------------------------------------------------------------------------------------------------
# Compare the calls of modules with hooks for their backward, which get gradients of arguments and results.


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
    modules = dict(module.named_modules(remove_duplicate=False))
    if missing := names - modules.keys():
        return "no module", f"the module {min(missing)}, which has a hook"
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
            modules[name].register_forward_hook(lambda _, args, result, name=name: note(name, args, result))
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


# ---- validate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphDifference:
    """Where a written stage is not the captured graph.

    Attributes:
        stage: its index.
        setting: in which they differ.
        names: the written classes and functions that ran there, innermost first; the stage's class is last.
        written: what the written source computes, with its line: ``blocks.py:12: aten.mul``; "" if nothing does.
        captured: what the captured graph has, with its line; "" if nothing has.
        lines: (class or function, line of ``blocks.py`` or of a stage) of the written source that ran there.
        captured_lines: the lines of the model's source that led to what the captured graph has.
    """

    stage: int
    setting: Setting
    names: tuple[str, ...]
    written: str
    captured: str
    lines: tuple[tuple[str, int], ...] = ()
    captured_lines: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.names[0]} of stage {self.stage} computes {self.written or 'less'} where the model has "
            f"{self.captured or 'no such operation'}, in {self.setting}"
        )


@dataclass
class _Table:
    """What the runs of all stages in one setting share."""

    setting: Setting
    terms: Terms = field(default_factory=Terms)
    captured_calls: RepeatedCalls = field(default_factory=RepeatedCalls)
    written_calls: RepeatedCalls = field(default_factory=RepeatedCalls)


def differences(
    plan: Plan, load_stage: Callable[..., nn.Module], settings: Iterable[Sequence[Setting]]
) -> list[GraphDifference]:
    """Compare the stages of a package with a plan.

    Args:
        plan: the captured stages.
        load_stage: builds a stage of the package.
        settings: in which to compare them. Of several in a list, the first one counts that the graph takes.

    Returns:
        The first difference of each stage; none if the package computes what the graph computes.
    """
    with new_fake_mode(), refusals_not_logged():
        tables = [[_Table(setting) for setting in alternatives] for alternatives in settings]
        compared = (_difference(plan.captured, stage, tables, load_stage) for stage in plan.stages)
        return [difference for difference in compared if difference is not None]


def _difference(
    captured: Captured, stage: StageGraph, tables: Sequence[Sequence[_Table]], load_stage: Callable[..., nn.Module]
) -> GraphDifference | None:
    name, first = f"Stage{stage.index}", tables[0][0].setting
    try:
        module = load_stage(stage.index, device="meta", weights=False)
        check_state(captured, stage, module)
    except WrongStateError as error:
        return GraphDifference(stage.index, first, (name,), str(error), "")
    except Exception as error:  # whatever the written source raises
        return _of_error(stage.index, name, first, error)
    states: dict[bool, StageState] = {}
    for alternatives in tables:
        for table in alternatives:
            setting = table.setting
            if setting.is_converted not in states:
                states[setting.is_converted] = StageState.create(captured, stage, setting)
            state = states[setting.is_converted]
            with TermRecorder(table.terms) as recorder:
                run = CapturedStage(captured, stage, state, setting, recorder, table.captured_calls)
                try:
                    expected = run.run()
                except Exception as error:  # whatever an operation raises
                    if not setting.sizes:
                        raise CaptureError(_not_run(run.node, error)) from error
                    continue  # the model does not take these sizes
            set_state(captured, stage, module, state)
            try:
                with TermRecorder(table.terms) as recorder:
                    actual = run_written(stage, module, state, setting, recorder, table.written_calls)
            except Exception as error:  # whatever the written source raises
                located = _located(captured, stage, module, state, setting)
                return located or _of_error(stage.index, name, setting, error)
            if actual != expected:
                difference = _located(captured, stage, module, state, setting)
            else:
                texts = hooked_call_difference(captured, stage, module, state, setting)
                difference = GraphDifference(stage.index, setting, (name,), *texts) if texts else None
            if difference is not None:
                return difference
            break
    return None


def _not_run(node: fx.Node | None, error: Exception) -> str:
    line = source_line(node) if node is not None else ""
    at = f"\n  at {line}" if line else ""
    return (
        f"The captured graph cannot be run without memory, and is compared with nothing: {one_line(str(error))}.{at}\n"
        "Try: torch.library.register_fake, if you defined that operation."
    )


# ---- where they differ -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a term comes from: the operation with its line, and the written names that ran there, innermost first.

    Attributes:
        lines: of a written operation (name, line), of one of the graph (file, line).
    """

    text: str
    names: tuple[str, ...]
    lines: tuple[tuple[str, int], ...] = ()


def _located(
    captured: Captured, stage: StageGraph, module: nn.Module, state: StageState, setting: Setting
) -> GraphDifference | None:
    """Run a stage again, every call of it, and find the first operation that only one side has.

    If the written source raises an error, it is the first operation before it that the graph does not have.
    """
    terms = Terms()
    expected: dict[int, _Place] = {}
    actual: dict[int, _Place] = {}
    package, stage_class = type(module).__module__.partition(".")[0], type(module).__name__

    def on_captured(term: int) -> None:
        if term not in expected:
            expected[term] = _place_of_node(captured, terms, term, run.node)

    def on_written(term: int) -> None:
        if term not in actual:
            actual[term] = _place_of_frame(terms, term, package)

    with TermRecorder(terms, on_captured) as recorder:
        run = CapturedStage(captured, stage, state, setting, recorder, None)
        expected_result = run.run()
    terms_of_graph, terms_of_source = set(range(len(terms.keys))), set[int]()
    try:
        with TermRecorder(terms, on_written) as recorder:
            actual_result = run_written(stage, module, state, setting, recorder, None)
    except Exception:  # whatever the written source raises
        terms_of_source = set(actual)
        if terms_of_source <= terms_of_graph:
            return None
    else:
        if actual_result == expected_result:
            return None
        terms_of_graph, terms_of_source = (
            terms.reachable(result.terms()) for result in (expected_result, actual_result)
        )
    written = next((place for term, place in actual.items() if term in terms_of_source - terms_of_graph), None)
    missing = next((place for term, place in expected.items() if term in terms_of_graph - terms_of_source), None)
    lacking = (place.names for term, place in expected.items() if term in terms_of_graph - terms_of_source)
    names = (*(written.names if written is not None else ()), *next(filter(None, lacking), ()))
    text = written.text if written is not None else "" if missing is not None else "its results in another order"
    expected_text = missing.text if missing is not None else ""
    lines, captured_lines = (place.lines if place is not None else () for place in (written, missing))
    names = tuple(dict.fromkeys([*names, stage_class]))
    return GraphDifference(stage.index, setting, names, text, expected_text, lines, captured_lines)


def _place_of_node(captured: Captured, terms: Terms, term: int, node: fx.Node | None) -> _Place:
    operator = terms.keys[term].operator
    if node is None:
        return _Place(operator, ())
    line = source_line(node)
    names = tuple(captured.modules[fqn].class_name for _, fqn in reversed(path_of(node)))
    return _Place(f"{operator} (at {line})" if line else operator, names, source_lines(node))


def _place_of_frame(terms: Terms, term: int, package: str) -> _Place:
    operator, lines, line = terms.keys[term].operator, list[tuple[str, int]](), ""
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            line = line or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            lines.append((_name_of(frame), frame.f_lineno))
        frame = frame.f_back
    return _Place(f"{operator} (at {line})" if line else operator, tuple(name for name, _ in lines), tuple(lines))


def _of_error(stage: int, name: str, setting: Setting, error: Exception) -> GraphDifference:
    """The difference of a stage whose written source raises an error."""
    lines, line = list[tuple[str, int]](), ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(PACKAGE_NAME):
            line = f" (at {Path(frame.f_code.co_filename).name}:{number})"
            lines.insert(0, (_name_of(frame), number))
    written = f"{one_line(f'{type(error).__name__}: {error}')}{line}"
    names = tuple(dict.fromkeys([*(inner for inner, _ in lines), name]))
    return GraphDifference(stage, setting, names, written, "", tuple(lines))


def _name_of(frame: FrameType) -> str:
    """The written class or function that runs in a frame."""
    is_method = frame.f_code.co_name == "forward" and "self" in frame.f_locals
    return type(frame.f_locals["self"]).__name__ if is_method else frame.f_code.co_name
