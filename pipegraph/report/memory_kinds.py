"""What the memory of each rank is needed for, as far as a package tells."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.package import Manifest
from pipegraph.report.predicted_step import predicted
from pipegraph.schedule import Schedule

_MOMENTS = 2  # of AdamW, each as large as the parameter

KINDS = {
    "parameters": "#274c77",
    "gradients": "#6096ba",
    "optimizer state": "#a3cef1",
    "saved activations": "#2f9e77",
    "buffers": "#e0a458",
}
"""The kinds of memory, each with its colour. Buffers are the model's own and those to receive into."""


@dataclass(frozen=True)
class RankKinds:
    """Bytes of a rank by kind, in the order of `KINDS`; without saved activations where they are not known."""

    rank: int
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def memory_kinds(manifest: Manifest, schedule: Schedule) -> tuple[RankKinds, ...]:
    """Of each rank; empty where the package has not even the sizes of its parameters.

    As the planner counts: parameters that are trained have a gradient and AdamW's two moments. What is saved and
    received is that of the moment when it is the most, and is left out for a package that was not priced.
    """
    costs = [stage.cost for stage in manifest.stages]
    if any(cost.parameter_bytes is None for cost in costs):
        return ()
    memory = predicted(manifest, schedule).memory
    found = []
    for rank in range(schedule.ranks):
        own = [cost for cost, place in zip(costs, schedule.placement, strict=True) if place == rank]
        trained = sum((cost.parameter_bytes or 0) if cost.trained_bytes is None else cost.trained_bytes for cost in own)
        trained = trained if schedule.trains else 0
        kinds = {
            "parameters": sum(cost.parameter_bytes or 0 for cost in own),
            "gradients": trained,
            "optimizer state": _MOMENTS * trained,
        }
        buffers = sum(cost.buffer_bytes or 0 for cost in own)
        if memory is not None:
            kinds["saved activations"] = memory[rank].saved
            buffers += memory[rank].buffers
        found.append(RankKinds(rank, {**kinds, "buffers": buffers}))
    return tuple(found)
