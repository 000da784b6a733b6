"""The stages of a package as they were priced when it was written."""

from __future__ import annotations

from pipegraph.cost import SegmentCost
from pipegraph.package import Manifest


def stage_costs(manifest: Manifest) -> tuple[SegmentCost, ...] | None:
    """Costs of all stages; times are 0 where only bytes were priced (`has_times`). None where nothing was."""
    cuts = [int(cut["boundary_bytes"]) for cut in manifest.plan.get("cuts", [])]
    if any("saved_bytes" not in stage.cost for stage in manifest.stages) or len(cuts) + 1 != len(manifest.stages):
        return None
    return tuple(
        SegmentCost(
            forward=float(stage.cost.get("forward", 0.0)),
            input_grad=float(stage.cost.get("input_grad", 0.0)),
            weight_grad=float(stage.cost.get("weight_grad", 0.0)),
            boundary_bytes=crossing,
            saved_bytes=int(stage.cost["saved_bytes"]),
            parameter_bytes=int(stage.cost["parameter_bytes"]),
            weight_saved_bytes=_whole(stage.cost.get("weight_saved_bytes")),
            trained_bytes=_whole(stage.cost.get("trained_bytes")),
            buffer_bytes=int(stage.cost.get("buffer_bytes", 0)),
        )
        for stage, crossing in zip(manifest.stages, [*cuts, 0], strict=True)
    )


def has_times(manifest: Manifest) -> bool:
    """Whether the stages were priced in seconds."""
    return all("forward" in stage.cost for stage in manifest.stages)


def _whole(figure: float | None) -> int | None:
    return None if figure is None else int(figure)
