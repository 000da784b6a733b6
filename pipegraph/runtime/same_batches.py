"""Ranks along tp divide the layers of a stage and compute each microbatch together, so that all take the same batch."""

from __future__ import annotations

from pipegraph.errors import RuntimeFault
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.processes.rank_grid import TENSOR
from pipegraph.runtime.processes.world import World, fingerprint
from pipegraph.runtime.step_data import StepInputs


class SameBatches:
    """Compares the calls of the ranks along tp. Making it is collective for them.

    Without it a collective within the stage would meet another one, or one of another size, for which gloo ends the
    process without a word.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        world.along(TENSOR, on_cpu=True)

    def agree(self, given: StepInputs, evaluates: bool) -> None:
        """Raise RuntimeFault, on all of these ranks, unless they are in one kind of call, with batches of one size.

        Collective for them. What is sent is one number.
        """
        call = _call(given, evaluates)
        numbers = self._world.gather([fingerprint(call.encode())], TENSOR)
        if any(each != numbers[0] for each in numbers):
            ranks: dict[str, list[str]] = {}
            along = self._world.grid.line(self._world.rank, TENSOR)
            for rank, theirs in zip(along, self._world.gather_text(call, TENSOR), strict=True):
                ranks.setdefault(theirs, []).append(self._world.grid.text(rank))
            calls = "; ".join(f"{theirs} on {', '.join(named)}" for theirs, named in ranks.items())
            raise RuntimeFault(
                f"ranks along tp compute the same microbatches together, and are in different calls: {calls}.\n"
                "Try: the same calls with the same batch on all of them. A sampler or a seed that depends on the rank "
                'should depend on the place along dp_replicate and dp_shard alone: mesh.get_local_rank("dp_shard").'
            )


def _call(given: StepInputs, evaluates: bool) -> str:
    """A call and its sizes, equal on two ranks if all tensors of their stages have equal shapes."""
    step = given.batch.sizes
    rows = [each.sizes[BATCH] for each in step.microbatches if BATCH in each.sizes]
    cut = f"{len(step.microbatches)} microbatches{f' of {rows} rows' if rows else ''}"
    others = "".join(f", {name} {size}" for name, size in step.sizes.items() if name != BATCH)
    return f"{'an evaluation' if evaluates else 'a step'} of {cut}{others}"
