"""Whether a step trains what the model trains: nothing is left out in silence."""

from __future__ import annotations

import warnings

from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.runtime.parameters import Stages, parameters_of
from pipegraph.runtime.processes.rank_grid import TENSOR
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.replicated_gradients import ReplicatedGradientCheck


class GradientChecks:
    """Looks before and after each step of training whether it trains what the model trains.

    Collective: every rank of a pipeline must make one, and call all methods in each step.

    Args:
        manifest: of the package.
        stages: of this process.
        world: the processes of the pipeline.
        seeded: whether random numbers follow from a seed, so that ranks along `tp` draw the same.
    """

    def __init__(self, manifest: Manifest, stages: Stages, world: World | None, seeded: bool) -> None:
        self._stages = stages
        self._missing = MissingGradients(manifest)
        is_divided = world is not None and world.grid.length(TENSOR) > 1
        self._replicated_check = (
            ReplicatedGradientCheck(stages, world, seeded) if world is not None and is_divided else None
        )

    def before_step(self) -> None:
        """Record the state of this rank's random numbers, if gradients are compared after the step."""
        if self._replicated_check is not None:
            self._replicated_check.before_step()

    def after_step(self) -> None:
        """Raise PipegraphError if a gradient is missing, or ranks along `tp` differ in one of a whole parameter."""
        self._missing.check(self._stages)
        if self._replicated_check is not None:
            self._replicated_check.check()


class MissingGradients:
    """Looks after each step for trainable parameters of these stages that got no gradient."""

    def __init__(self, manifest: Manifest) -> None:
        self._untrained = {name for stage in manifest.stages for name in stage.untrained or ()}
        self._tied = {name for group in manifest.tied for name in group}
        self._has_warned = False

    def check(self, stages: Stages) -> None:
        """Raise PipegraphError if the model gives one of them a gradient. Warn once of those that it gives none."""
        missing = [
            (name, index)
            for index, stage in stages.items()
            if any(map(_lacks_gradient, stage.parameters()))  # names take longer than the rest of it
            for name, parameter in parameters_of(stage)
            if _lacks_gradient(parameter) and name not in self._tied
        ]
        lost = [place for place in missing if place[0] not in self._untrained]
        if lost:
            name, index = lost[0]
            suffix = f", nor did {len(lost) - 1} more parameters" if len(lost) > 1 else ""
            raise PipegraphError(
                f"{name} of stage {index} got no gradient in this step{suffix}, and the model gives it one.\n"
                f"Try: look in stage_{index}.py for a detach() or no_grad that the model does not have; or freeze the "
                "parameter with requires_grad_(False); or split the model again if the package is older."
            )
        if missing and not self._has_warned:
            self._has_warned = True
            named = ", ".join(f"{name} (stage {index})" for name, index in missing[:3])
            suffix = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            warnings.warn(
                f"{named}{suffix} got no gradient in a step, as in the model: it or the loss does not use them.",
                stacklevel=2,
            )


def _lacks_gradient(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.grad is None
