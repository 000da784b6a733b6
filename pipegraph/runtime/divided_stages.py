"""The stages of a process after the dimensions of its mesh: their parameters divided between the ranks that share them.

Nothing here is sent but what the ranks refuse, so that all of them refuse it with the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from pipegraph.errors import ArgumentError
from pipegraph.package import Manifest
from pipegraph.runtime import tensor_parallel
from pipegraph.runtime.processes.rank_grid import DIMENSIONS, TENSOR
from pipegraph.runtime.processes.world import World


def divide_tensors(
    stages: Mapping[int, nn.Module],
    manifest: Manifest,
    world: World | None,
    plan: tensor_parallel.Plan | None,
    others_divide: bool,
) -> None:
    """Divide parameters between the ranks along `tp`, in place. Collective.

    Args:
        plan: as for `Pipeline`.
        others_divide: whether `parallelize_fn` may do it without a plan.

    Raises:
        ArgumentError: the plan does not fit the model, or the number of ranks; on every rank.
    """
    if plan is not None:
        tensor_parallel.check_plan(plan)
    size = 1 if world is None else world.grid.length(TENSOR)
    if world is None or size == 1:
        return
    if plan is None and others_divide:
        return
    mesh = world.mesh(TENSOR)
    names = "\n".join(tensor_parallel.module_names(stages))
    known = {name for text in world.gather_text(names, *DIMENSIONS) for name in text.split("\n")}

    def divide() -> None:
        if plan is None:
            raise ArgumentError(
                f"the mesh has {size} ranks along tp, and nothing says how they divide the model.\n"
                f'Try: tp_plan={{"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}}.'
            )
        tensor_parallel.check_patterns(plan, known)
        tensor_parallel.parallelize(stages, plan, manifest, mesh)
        tensor_parallel.check_stages(stages, manifest, size)

    _together(world, divide)


def _together(world: World, work: Callable[[], None]) -> None:
    """Do what may be refused on one rank. Every rank then raises the same ArgumentError."""
    problem = None
    try:
        work()
    except ArgumentError as error:
        problem = str(error)
    world.check_everywhere(problem)
