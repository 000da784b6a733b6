"""The critical path of a measured step: what each action waited for, from the last one back."""

from __future__ import annotations

from collections.abc import Mapping

from pipegraph.schedule import Kind, Schedule, Timeline, peak_activations
from pipegraph.schedule.simulate import Place
from pipegraph.schedule.stages import Edge
from pipegraph.tracing.analysis.measured_steps import MeasuredStep


def measured_timeline(step: MeasuredStep, schedule: Schedule, hops: Mapping[Edge, float]) -> Timeline:
    """Return a complete step as `simulate` would return it.

    An action waited for the value that came last, if that came after the end of the rank's previous action. A value
    comes its edge's ``hops`` after the end of the action that makes it.
    """
    places: dict[tuple[Kind, int, int], Place] = {}
    for rank, row in enumerate(step.events):
        for position, event in enumerate(row):
            places[_value(event.action.kind), event.action.stage, event.action.microbatch] = (rank, position)
    waited: list[dict[int, Place]] = [{} for _ in step.events]
    needs = schedule.dependencies
    for rank, row in enumerate(step.events):
        for position, event in enumerate(row):
            kind = _value(event.action.kind)
            if kind is Kind.W:
                continue
            stage, microbatch = event.action.stage, event.action.microbatch
            sources = (needs.producers if kind is Kind.F else needs.gradient_consumers).get(stage, ())
            last = row[position - 1].end if position else 0.0
            for source in sources:
                place = places[kind, source, microbatch]
                edge = (min(stage, source), max(stage, source))
                arrival = step.events[place[0]][place[1]].end + hops.get(edge, 0.0)
                if place[0] != rank and arrival > last:
                    last = arrival
                    waited[rank][position] = place
    return Timeline(step.events, peak_activations(schedule), tuple(waited))


def _value(kind: Kind) -> Kind:
    """Return the kind that makes the same: B makes a gradient, as I does."""
    return Kind.I if kind is Kind.B else kind
