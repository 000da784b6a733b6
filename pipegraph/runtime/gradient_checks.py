"""Whether a step trains what the model trains: nothing is left out in silence."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import local
from pipegraph.package import Manifest
from pipegraph.runtime.checkpoint.random_state import random_states
from pipegraph.runtime.parameter_collectives import all_parameters
from pipegraph.runtime.parameters import Stages, TiedWeights, parameters_of
from pipegraph.runtime.processes.rank_grid import TENSOR
from pipegraph.runtime.processes.world import World, fingerprint
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.tensor_parallel import mesh_dimensions
from pipegraph.torch_private.tensors import has_hooks

# ---- parameter checks ------------------------------------------------------------------------------------------------
# Whether the parameters of a step are those that other stages and ranks have as well, and their hooks are called.
#
# A stage whose parameters no other stage or rank has computes with the parameters that its modules hold. Which
# parameters are tied, sharded or copied is determined when a pipeline is made: other stages and ranks would not know of
# a parameter that replaces one of them later.
#
# Autograd calls a hook of a parameter if the module computes with the parameter itself, and not with a copy of it.


class ParameterChecks:
    """Looks before each step for parameters that were replaced since the pipeline was made, and for hooks on them."""

    def __init__(self, context: RankContext, ties: TiedWeights) -> None:
        prepared, stages = context.prepared, context.stages
        self._context, self._stages, self._ties = context, stages, ties
        precision = prepared.precision
        self._uncast_names = precision.uncast_names if precision is not None and precision.precision.is_mixed else {}
        names = {id(parameter): name for index in prepared.groups for name, parameter in parameters_of(stages[index])}
        self._sharded = [
            (index, names[id(sharded_parameter.sharded)], sharded_parameter)
            for index, groups in prepared.groups.items()
            for sharded_parameter in all_parameters(groups)
        ]
        self._copied: dict[int, nn.Parameter] | None = None  # by identity, which no other object gets meanwhile
        if context.data_ranks > 1:
            parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
            parameters += context.trained_by_loss
            self._copied = {id(parameter): parameter for parameter in parameters}

    def before_step(self, trains: bool) -> None:
        """Raise PipegraphError for a parameter that a step would not use, or not train as the others do."""
        for index, name, sharded_parameter in self._sharded:
            if not sharded_parameter.is_held:
                raise _replaced(f"{name} of stage {index}", "the ranks along dp_shard would continue with the old one")
        if trains:
            self._check_ties()
            self._check_copies()
            self._check_hooks()

    def _check_ties(self) -> None:
        if (place := self._ties.replaced()) is not None:
            index, name = place
            raise _replaced(
                f"{name} of stage {index}", "it is tied to that of another stage, and their gradients are added up"
            )

    def _check_copies(self) -> None:
        if (copies := self._copied) is None:
            return
        why = "its gradients would not be added up over the data-parallel ranks"
        for index, stage in self._stages.items():
            if any(
                id(parameter) not in copies for parameter in stage.parameters()
            ):  # names take longer than the rest of it
                name = next(name for name, parameter in parameters_of(stage) if id(parameter) not in copies)
                raise _replaced(f"{name} of stage {index}", why)
        for weight in self._context.trained_by_loss:
            if id(weight) not in copies:
                raise PipegraphError(
                    f"loss_fn trains a parameter of shape {list(weight.shape)}, which it did not when the Pipeline was "
                    f"made: {why}.",
                    "make a new Pipeline.",
                )

    def _check_hooks(self) -> None:
        for index, name, sharded_parameter in self._sharded:
            if has_hooks(sharded_parameter.sharded):
                raise _not_called(f"{name} of stage {index}", "along dp_shard modules compute with the whole parameter")
        for index, uncast_names in self._uncast_names.items():
            stage = self._stages[index]
            if any(map(has_hooks, stage.parameters())):  # names take longer than the rest of it
                hooked = [
                    name
                    for name, parameter in stage.named_parameters()
                    if has_hooks(parameter) and name not in uncast_names
                ]
                if hooked:
                    raise _not_called(f"{hooked[0]} of stage {index}", "precision= computes with a copy in 16 bits")


def _replaced(name: str, why: str) -> PipegraphError:
    return PipegraphError(
        f"{name} is not the parameter that was there when the Pipeline was made: {why}.",
        "change the values of that one, with copy_() or load_state_dict() without assign=True; replace parameters "
        "and add adapters in parallelize_fn; or make a new Pipeline.",
    )


def _not_called(name: str, why: str) -> PipegraphError:
    return PipegraphError(
        f"{name} has a hook, which would not be called: {why}.",
        "without the hook; what it does with gradients can be done with .grad after step().",
    )


# ---- replicated gradients --------------------------------------------------------------------------------------------
# Whether ranks along `tp` compute the same gradients of the parameters that each rank has whole.
#
# step 1   norms of all of them ────────▶ all ranks: equal, or refused; or 0, which says nothing
# step 2   norms of those that had 0 ───▶ …
# step 3   none is left: nothing is sent until something else is trained
#
# A gradient may be 0 at first: if a later layer is initialised with zeros, or if an expert got no token.


_ROUNDING: Final = 1e-3
"""Norms of equal gradients differ by less than this part: kernels need not add up in the same order."""


class ReplicatedGradientCheck:
    """Compares the gradient of each whole parameter in the first step in which it is a number other than 0.

    Args:
        context: the process.
        world: its world, with ranks along `tp`.
    """

    def __init__(self, context: RankContext, world: World) -> None:
        self._context, self._stages, self._world = context, context.stages, world
        self._seeded = context.numbers.seed is not None  # then ranks along `tp` draw the same numbers
        self._compared: set[tuple[int, str]] = set()
        self._finished: tuple[bool, ...] | None = None  # what was trained when all of it had been compared
        self._random_state: Tensor | None = None

    def before_step(self) -> None:
        """Record the random state of this rank."""
        is_pending = self._finished != self._context.trained_flags
        self._random_state = self._current_random_state() if is_pending and not self._seeded else None

    def check(self) -> None:
        """Compare gradients that were not compared before. Collective over the ranks along `tp`.

        Raises:
            PipegraphError: the gradients differ: each rank computed only a part of the gradient.
        """
        trained = self._context.trained_flags
        if self._finished == trained:
            return
        pending = {
            (index, name): parameter
            for index, stage in self._stages.items()
            for name, parameter in parameters_of(stage)
            if parameter.requires_grad and (index, name) not in self._compared and _is_whole(parameter)
        }
        rows = self._world.gather(_norms([parameter.grad for parameter in pending.values()]), TENSOR) if pending else []
        for key, norms in zip(pending, zip(*rows, strict=True), strict=True):
            if not all(map(math.isfinite, norms)) or max(norms) == 0:
                continue
            if max(norms) - min(norms) > _ROUNDING * max(norms):
                self._refuse(key[1])
            self._compared.add(key)
        if self._compared.issuperset(pending):
            self._finished = trained

    def _refuse(self, name: str) -> None:
        raise PipegraphError(
            f"the ranks along tp come to different gradients of {name}, which each of them has whole: {self._reason()}"
            f'"replicated_with_grad_allreduce" for {name.rpartition(".")[0] or name} in tp_plan if it gets some of the '
            "heads, or another style that divides or gathers what it returns."
        )

    def _reason(self) -> str:
        """Return why the gradients differ, if that is known, and the first advice. Collective over these ranks."""
        previous_state = self._random_state
        if previous_state is not None:
            drew = not torch.equal(previous_state, self._current_random_state())
            rank_states = self._world.gather([fingerprint(bytes(previous_state.tolist())), drew], TENSOR)
            if any(figure for _, figure in rank_states) and any(
                figure != rank_states[0][0] for figure, _ in rank_states
            ):
                return (
                    "they draw different random numbers, for dropout say, because they were seeded differently.\n"
                    "Try: Pipeline(seed=0), by which ranks along tp draw the same. If they still differ: "
                )
        return "each rank computed only a part of the gradient.\nTry: "

    def _current_random_state(self) -> Tensor:
        return torch.cat([*random_states(self._world.rank, self._world.device).values()])


def _is_whole(parameter: Any) -> bool:
    return TENSOR not in mesh_dimensions(parameter) and bool(local(parameter).numel())


def _norms(gradients: list[Tensor | None]) -> list[float]:
    """The norm of each gradient, 0 for one that is not there. A GPU is waited for once."""
    local_gradients = [local(gradient) for gradient in gradients if gradient is not None]
    norms = iter(torch.stack(list(map(_norm, local_gradients))).tolist() if local_gradients else ())
    return [0.0 if gradient is None else next(norms) for gradient in gradients]


def _norm(gradient: Tensor) -> Tensor:
    gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=dtype)  # without a copy in this dtype


# ---- gradient checks -------------------------------------------------------------------------------------------------


class GradientChecks:
    """Looks before and after each step of training whether it trains what the model trains.

    Collective: every rank of a pipeline must make one, and call all methods in each step.
    """

    def __init__(self, context: RankContext) -> None:
        self._stages, world = context.stages, context.world
        self._missing = MissingGradients(context.manifest)
        self._replicated_check: ReplicatedGradientCheck | None = None
        if world is not None and context.tensor_ranks > 1:
            self._replicated_check = ReplicatedGradientCheck(context, world)

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
                f"{name} of stage {index} got no gradient in this step{suffix}, and the model gives it one.",
                f"look in stage_{index}.py for a detach() or no_grad that the model does not have; or freeze the "
                "parameter with requires_grad_(False); or split the model again if the package is older.",
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
