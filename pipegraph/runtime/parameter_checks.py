"""Whether the parameters of a step are those that other stages and ranks have as well, and their hooks are called.

A stage whose parameters nobody else has computes with whatever its modules hold. Which parameters are tied, sharded or
copied is found when a pipeline is made; the other stages and ranks would not know of one that takes their place later.

Autograd calls a hook of a parameter if the module computes with the parameter itself, and not with what stands for it.
"""

from __future__ import annotations

from torch import nn

from pipegraph.errors import PipegraphError
from pipegraph.runtime.gradient_reduction import trained_by
from pipegraph.runtime.parameters import Stages, TiedWeights, parameters_of
from pipegraph.runtime.prepared_stages import PreparedStages
from pipegraph.runtime.shard_transfers import all_parameters
from pipegraph.torch_private.tensors import has_hooks


class ParameterChecks:
    """Looks before each step for parameters that were replaced since the pipeline was made, and for hooks on them.

    Args:
        prepared: the stages of this process.
        stages: the same stages, as they run.
        ties: their tied weights.
        loss_fn: the loss function, which may have parameters; None if another process has the last stage.
        are_copied: whether other ranks have the same stages.
    """

    def __init__(
        self, prepared: PreparedStages, stages: Stages, ties: TiedWeights, loss_fn: object, are_copied: bool
    ) -> None:
        self._stages, self._ties, self._loss_fn = stages, ties, loss_fn
        precision = prepared.precision
        self._uncast_names = precision.uncast_names if precision is not None and precision.precision.is_mixed else {}
        names = {id(parameter): name for index in prepared.groups for name, parameter in parameters_of(stages[index])}
        self._sharded = [
            (index, names[id(sharded_parameter.sharded)], sharded_parameter)
            for index, groups in prepared.groups.items()
            for sharded_parameter in all_parameters(groups)
        ]
        self._copied: dict[int, nn.Parameter] | None = None  # by identity, which no other object gets meanwhile
        if are_copied:
            parameters = [parameter for stage in stages.values() for parameter in stage.parameters()] + trained_by(
                loss_fn
            )
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
        for weight in trained_by(self._loss_fn):
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
