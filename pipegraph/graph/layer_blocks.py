"""The operations of repeated layers, and whether a whole model runs those of a few layers again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pipegraph.graph.export.operation_record import Operations, Result
from pipegraph.graph.layer_runs import KEPT_UNITS, LayerRun


class NotRepeatedError(Exception):
    """The graph of a few layers says nothing of the other layers."""


# ---- names -----------------------------------------------------------------------------------------------------------


class LayerNames:
    """The names of a model of few layers, in the whole model."""

    def __init__(self, runs: Sequence[LayerRun]) -> None:
        self._runs = runs

    def in_whole_model(self, name: str) -> str:
        """The name of a module, a tensor or a call that is not left out. Layers after a run have higher numbers."""
        for run in self._runs:
            index, suffix = _layer_in(name, run.name)
            if index is not None and index >= run.template.stop:
                return f"{run.name}.{index + len(run.left_out)}{suffix}"
        return name

    def of_layer(self, name: str, runs: Mapping[str, LayerRun], index: int) -> str:
        """The name in a unit that is ``index`` later, for one in the template of a run or in the unit before it.

        Args:
            runs: the runs that are meant, by their names.
        """
        for run in runs.values():
            number, suffix = _layer_in(name, run.name)
            if number is not None and run.template.start - run.period <= number < run.template.stop:
                return f"{run.name}.{number + index * run.period}{suffix}"
        return self.in_whole_model(name)

    def is_in_template(self, name: str, runs: Mapping[str, LayerRun]) -> bool:
        """Return whether a module, a tensor or a call is in the template of one of these runs."""
        layer = self.run_of(name)
        return layer is not None and layer[0].name in runs and layer[1] in layer[0].template

    def run_of(self, name: str) -> tuple[LayerRun, int] | None:
        """The run that a module or a tensor is in, and the index of its layer in the model of few layers."""
        for run in self._runs:
            index, _ = _layer_in(name, run.name)
            if index is not None and run.start <= index < run.template.stop:
                return run, index
        return None


def _layer_in(name: str, layers: str) -> tuple[int | None, str]:
    """The index of a layer of a list, and what follows it in a name: 12 and ``.attention.weight``. None and the name if
    it names no layer."""
    if not name.startswith(f"{layers}."):
        return None, name
    inside = name[len(layers) + 1 :]
    suffix = inside.lstrip("0123456789")
    digits = inside[: len(inside) - len(suffix)]
    return (int(digits), suffix) if digits and suffix[:1] in ("", ".", "@", " ") else (None, name)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerBlock:
    """Operations of the kept units of runs that are called in turns: those of each unit, and what follows it.

    Attributes:
        runs: the runs, by their names; zipped lists have several.
        starts: where the operations of each kept unit begin.
        length: how many operations the template has.
    """

    runs: Mapping[str, LayerRun]
    starts: tuple[int, ...]
    length: int

    @property
    def template(self) -> range:
        return range(self.starts[-1], self.starts[-1] + self.length)

    @property
    def previous(self) -> range:
        """The operations of the unit before the template."""
        return range(self.starts[-2], self.starts[-1])

    @property
    def left_out(self) -> int:
        """How many units are left out."""
        return next(iter(self.runs.values())).units - KEPT_UNITS


def blocks_of(runs: Sequence[LayerRun], starts: Mapping[tuple[str, int], list[int]]) -> list[LayerBlock]:
    """Return the blocks of runs, in the order in which they run.

    Args:
        starts: the name of a list and the index of a layer → where its operations begin, for each call.

    Raises:
        NotRepeatedError: a layer is called several times or never, or the layers have other numbers of operations.
    """
    by_run: dict[str, tuple[int, ...]] = {}
    for run in runs:
        calls = [starts.get((run.name, index), []) for index in range(run.start, run.template.stop)]
        if any(len(call_starts) != 1 for call_starts in calls):
            raise NotRepeatedError
        by_run[run.name] = tuple(call_starts[0] for call_starts in calls[:: run.period])
    blocks: list[LayerBlock] = []
    for run in sorted(runs, key=lambda run: by_run[run.name]):
        places = by_run[run.name]
        if list(places) != sorted(set(places)):
            raise NotRepeatedError
        previous = blocks[-1] if blocks else None
        length = places[-1] - places[-2]
        if previous is not None and places[0] < previous.template.stop:
            first = next(iter(previous.runs.values()))
            is_beside = all(a < b for a, b in zip(previous.starts, places, strict=True)) and length == previous.length
            if not is_beside or places[-1] >= previous.template.stop or run.units != first.units:
                raise NotRepeatedError
            blocks[-1] = replace(previous, runs={**previous.runs, run.name: run})
        else:
            blocks.append(LayerBlock({run.name: run}, places, length))
    return blocks


# ---- comparison ------------------------------------------------------------------------------------------------------


Recorded = tuple[Operations, Mapping[str, list[int]]]
"""The operations of a model, and where its layers begin, by their names."""


def are_repeated(few: Recorded, all_layers: Recorded, runs: Sequence[LayerRun]) -> bool:
    """Return whether a model runs the operations of its few layers again in the others, on the corresponding values.

    Args:
        few, all_layers: of the model with few layers, and of the whole model.
    """
    operations, starts = few
    indices = ((run, index) for run in runs for index in range(run.start, run.template.stop))
    try:
        blocks = blocks_of(runs, {(run.name, index): starts.get(run.prefix(index), []) for run, index in indices})
    except NotRepeatedError:
        return False
    if any(block.template.stop >= len(operations) or len(block.previous) != block.length for block in blocks):
        return False
    repeated = _RepeatedOperations(operations, blocks, LayerNames(runs))
    return repeated.all_expected() == all_layers[0]


class _Repetition(NamedTuple):
    """What an operation of the whole model repeats.

    Attributes:
        operation: the operation of the model with few layers.
        block: the block whose template has it; None if it is not repeated.
        distance: how many units later it is.
    """

    operation: int
    block: LayerBlock | None = None
    distance: int = 0


class _RepeatedOperations:
    """The operations that a whole model has if it repeats those of a few layers."""

    def __init__(self, operations: Operations, blocks: Sequence[LayerBlock], names: LayerNames) -> None:
        self._operations, self._names = operations, names
        self._places: list[_Repetition] = []
        at = 0
        for block in blocks:
            self._places += map(_Repetition, range(at, block.starts[-1]))
            self._places += (
                _Repetition(at, block, distance) for distance in range(block.left_out + 1) for at in block.template
            )
            at = block.template.stop
        self._places += map(_Repetition, range(at, len(operations)))
        # The first and the last operation of the whole model that repeats one of few layers.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for number, place in enumerate(self._places):
            self._first.setdefault(place.operation, number)
            self._last[place.operation] = number

    def all_expected(self) -> Operations:
        """The operations of the whole model."""
        return [
            (self._operations[place.operation][0], self._expected(self._operations[place.operation][1], place))
            for place in self._places
        ]

    def _expected(self, value: Any, place: _Repetition) -> Any:
        """What stands in the whole model for a part of the description of an operation."""
        if isinstance(value, Result):
            return value._replace(operation=self._producer(value.operation, place))
        if isinstance(value, str):
            if place.block is None:
                return self._names.in_whole_model(value)
            return self._names.of_layer(value, place.block.runs, place.distance)
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            return tuple(self._expected(part, place) for part in value)
        if isinstance(value, dict):
            return {name: self._expected(part, place) for name, part in value.items()}
        return value

    def _producer(self, operation: int, place: _Repetition) -> int:
        """The operation of the whole model whose result is read, for one of the model with few layers."""
        block, distance = place.block, place.distance
        if block is not None and operation in block.template:
            return self._first[operation] + distance * block.length
        if block is not None and operation in block.previous and distance:
            return self._first[operation + block.length] + (distance - 1) * block.length
        return self._last[operation]
