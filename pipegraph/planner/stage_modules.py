"""The modules of a stage, as a short list of names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipegraph.graph.call_tree import CallTree, call_tree
from pipegraph.graph.captured import Captured, split_point
from pipegraph.graph.partition.segments import holds_parameter, whole_calls
from pipegraph.graph.partition.split_points import SplitPoint
from pipegraph.graph.partition.stages import StageGraph


def stage_modules(captured: Captured, stage: StageGraph) -> list[str]:
    """Return the names of a stage's modules: ``embed``, ``layers.0 – layers.3``.

    A module without parameters is listed only if the stage begins with it.
    """
    cuts = captured.graph.find_nodes(op="call_function", target=split_point)
    fqn, side = cuts[stage.index - 1].args if stage.index else (None, None)
    begins = str(fqn) if side == SplitPoint.BEGINNING.value else None
    listed = list(dict.fromkeys(_whole(captured, call_tree(stage.nodes), begins)))
    return [_range(run) for run in _runs(listed)] or ["operations of the model itself"]


def _whole(captured: Captured, root: CallTree, begins: str | None) -> Iterator[str]:
    """Yield the FQNs of calls that hold parameters, and of the one with which the stage begins.

    A call that was cut is replaced with the calls inside it.
    """

    def parts(call: CallTree) -> Iterator[CallTree]:
        inner = list(call.calls())
        if not inner or len(list(call.nodes())) == captured.operations_of[call.call]:
            yield call
            return
        for child in inner:
            yield from parts(child)

    for call in whole_calls(captured, root):
        yield from (part.fqn for part in parts(call) if part.fqn == begins or holds_parameter(captured, part))


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Group neighbours whose numbers count up: layers.0, layers.1, …"""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _follows(before: str, after: str) -> bool:
    (stem, _, number), (other, _, next_number) = before.rpartition("."), after.rpartition(".")
    return stem == other and number.isdecimal() and next_number.isdecimal() and int(next_number) == int(number) + 1


def _range(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} – {run[-1]}"
