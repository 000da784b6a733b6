"""The stages of a package as they were priced when it was written."""

from __future__ import annotations

from pipegraph.cost import SegmentCost
from pipegraph.package import Manifest


def stage_costs(manifest: Manifest) -> tuple[SegmentCost, ...] | None:
    """Costs of all stages; times are 0 if only bytes were priced (`has_times`). None if nothing was."""
    if manifest.prediction is None or any(stage.cost.saved_bytes is None for stage in manifest.stages):
        return None
    crossing = [*(cut.boundary_bytes for cut in manifest.prediction.cuts), 0]
    return tuple(
        SegmentCost(
            *(stage.cost.times or (0.0, 0.0, 0.0)),
            boundary_bytes=boundary_bytes,
            saved_bytes=stage.cost.saved_bytes or 0,
            parameter_bytes=stage.cost.parameter_bytes or 0,
            weight_saved_bytes=stage.cost.weight_saved_bytes,
            trained_bytes=stage.cost.trained_bytes,
            buffer_bytes=stage.cost.buffer_bytes or 0,
        )
        for stage, boundary_bytes in zip(manifest.stages, crossing, strict=True)
    )


def has_times(manifest: Manifest) -> bool:
    """Whether the stages were priced in seconds."""
    return all(stage.cost.times is not None for stage in manifest.stages)
