"""The state of an optimizer under the model's names, whatever stages a rank holds.

optimizer.state[parameter][key]    ─▶ tensor "optimizer.key.name", or several in a container, or a plain value
optimizer.param_groups of all ranks ─▶ `SavedGroup`s: options, and the names of the parameters that have them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import CheckpointError, first_names
from pipegraph.kernels.sharded import is_sharded
from pipegraph.runtime.checkpoint import nested_state

PREFIX: Final = "optimizer."
_NOT_OPTIONS: Final = ("params", "param_names")
_ALL_PARAMETERS: Final = "all parameters of the rank"
"""Under which key the state of LBFGS names the parameters whose values its tensors hold, in order."""


@dataclass
class SavedGroup:
    """Parameters with the same options."""

    options: dict[str, Any]
    names: list[str]


@dataclass
class OptimizerShare:
    """The part of an optimizer that one rank has, without the tensors.

    Attributes:
        kind: the optimizer's class.
        groups: all groups in order, also those without parameters on this rank.
        plain: for each parameter, the values of its state that are not tensors.
    """

    kind: str
    groups: list[SavedGroup]
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plain_data(self) -> dict[str, Any]:
        """The same in dicts and lists."""
        groups = [{"options": group.options, "names": group.names} for group in self.groups]
        return {"kind": self.kind, "groups": groups, "plain": self.plain}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> OptimizerShare:
        """What `plain_data` returned."""
        return cls(data["kind"], [SavedGroup(**group) for group in data["groups"]], data["plain"])


class OptimizerState:
    """An optimizer over parameters of a pipeline.

    Args:
        names: the names of all parameters of this rank, by their `id`.

    Raises:
        CheckpointError: the optimizer has a parameter that is not one of the pipeline's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        require_type(optimizer, torch.optim.Optimizer, "optimizer is one of torch's", "optimizer=optimizer")
        self._optimizer = optimizer
        self._parameters: dict[str, tuple[nn.Parameter, dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"the optimizer has a parameter of shape {list(parameter.shape)} that is not one of the "
                        "pipeline's parameters.",
                        "an optimizer over pipe.parameters(), made after the Pipeline, "
                        'and a separate one for other parameters, saved with extra={"optimizer": …}.',
                    )
                self._parameters[names[id(parameter)]] = parameter, group

    def share(self) -> OptimizerShare:
        """Return the class, the groups and the state of this rank's parameters, without the tensors."""
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: _on_cpu(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            names = [name for name, (_, parameter_group) in self._parameters.items() if parameter_group is group]
            groups.append(SavedGroup(options, names))
        plain: dict[str, dict[str, Any]] = {}
        for name, (parameter, _) in self._parameters.items():
            for key, value in self._state(parameter).items():
                if not isinstance(value, Tensor):
                    plain.setdefault(name, {})[key] = _plain(value, f"the optimizer's {key} of {name}")
            if name in plain and isinstance(self._optimizer, torch.optim.LBFGS):
                plain[name][_ALL_PARAMETERS] = list(self._parameters)
        return OptimizerShare(type(self._optimizer).__name__, groups, plain)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state. Raises CheckpointError for those of which a rank's part is unknown."""
        tensors = {}
        for name, (parameter, _) in self._parameters.items():
            state = [nested_state.tensors_of(value, key) for key, value in self._state(parameter).items()]
            for key, value in chain.from_iterable(state):
                is_like = is_sharded(value) and value.shape == parameter.shape
                if is_sharded(parameter) and not is_like and value.numel() != 1:
                    raise CheckpointError(
                        f"the optimizer's {key} of {name} has the shape {list(value.shape)}, and the parameter is "
                        f"sharded and has {list(parameter.shape)}: nothing says which part of the whole it is.",
                        "an optimizer whose state has the layout of its parameters.",
                    )
                tensors[f"{PREFIX}{key}.{name}"] = value
        return tensors

    def prepare(self, stored: Mapping[str, Any], plain: Mapping[str, Mapping[str, Any]]) -> _NewState:
        """Memory for the state that a checkpoint has of these parameters. The optimizer is not changed.

        Args:
            stored: DCP's metadata, by names.
        """
        keys: dict[str, list[str]] = {name: [] for name in self._parameters}
        for full in stored:
            if full.startswith(PREFIX):
                key, _, name = full.removeprefix(PREFIX).partition(".")
                if name in keys:
                    keys[name].append(key)
        states: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        for name, (parameter, group) in self._parameters.items():
            entries = dict(plain.get(name, {}))
            self._check_parameters(entries.pop(_ALL_PARAMETERS, None))
            memory: dict[str, Tensor] = {}
            for key in keys[name]:
                saved = stored[f"{PREFIX}{key}.{name}"]
                memory[key] = _empty(parameter, key, saved.size, saved.properties.dtype, group)
            tensors |= {f"{PREFIX}{key}.{name}": tensor for key, tensor in memory.items()}
            states[name] = {key: tensor for key, tensor in memory.items() if nested_state.SEPARATOR not in key}
            for key, entry in entries.items():
                is_nested = nested_state.is_structure(entry)
                states[name][key] = nested_state.value_of(entry, key, memory.__getitem__) if is_nested else entry
        return _NewState(states, tensors)

    def restore(self, new: _NewState, groups: Sequence[SavedGroup]) -> None:
        """Take over state and options. A parameter that had no state has none afterwards."""
        options = {name: group.options for group in groups for name in group.names}
        for name, (parameter, group) in self._parameters.items():
            self._optimizer.state.pop(parameter, None)
            if new.states[name]:
                self._optimizer.state[parameter] = new.states[name]
            for key, value in options[name].items():
                if isinstance(now := group.get(key), Tensor):
                    now.copy_(torch.as_tensor(value))
                else:
                    group[key] = value

    def _check_parameters(self, saved: list[str] | None) -> None:
        """Raise CheckpointError if a state is of other parameters together than this rank has now."""
        if saved is not None and saved != list(self._parameters):
            kind = type(self._optimizer).__name__
            raise CheckpointError(
                f"{kind} keeps one state for all parameters of a rank: it was saved for {first_names(saved)}, and "
                f"this rank has {first_names(self._parameters)}.",
                "load() with the same number of ranks and the same schedule.",
            )

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return state


@dataclass
class _NewState:
    """State that is not the optimizer's yet: by names of parameters, and its tensors by their names in storage."""

    states: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor]


def merge(shares: Sequence[OptimizerShare]) -> OptimizerShare:
    """Merge the shares of all ranks.

    Groups at the same index are merged if every rank has the same number of groups; a group without parameters on a
    rank counts, too. Otherwise groups with the same options are merged.

    Raises:
        CheckpointError: the ranks have different optimizers or options.
    """
    kinds = sorted({share.kind for share in shares})
    if len(kinds) > 1:
        raise CheckpointError(f"the ranks have different optimizers: {', '.join(kinds)}.")
    is_by_place = len({len(share.groups) for share in shares}) == 1
    merged: dict[Any, tuple[int, SavedGroup]] = {}
    for rank, share in enumerate(shares):
        for place, group in enumerate(share.groups):
            if not group.names:  # nothing has its options
                continue
            key = place if is_by_place else repr(group.options)
            first, merged_group = merged.setdefault(key, (rank, SavedGroup(group.options, [])))
            if different := _differences(merged_group.options, group.options):
                raise CheckpointError(
                    f"the optimizers of rank {first} and rank {rank} differ in group {place}: {different}.",
                    "the same groups in the same order on every rank, also those that have no parameters there.",
                )
            merged_group.names = sorted({*merged_group.names, *group.names})
    plain = {name: values for share in shares for name, values in share.plain.items()}
    return OptimizerShare(kinds[0], [group for _, group in merged.values()], plain)


def check_fits(saved: OptimizerShare, current: OptimizerShare) -> None:
    """Raise CheckpointError unless an optimizer has the class and the groups of the saved one.

    Groups with the same options may be one here and several there: two ranks that have a group each save them as one.
    """
    if saved.kind != current.kind:
        raise CheckpointError(f"the checkpoint has the state of {saved.kind}, and the optimizer is {current.kind}.")
    # In their order, so that every rank names the same difference.
    saved_groups, groups = (
        dict.fromkeys(frozenset(group.names) for group in share.groups) for share in (saved, current)
    )
    for group in (*_mixed(groups, saved), *_mixed(saved_groups, current)):
        nearest = max(saved_groups if group in groups else groups, key=lambda names: len(group & names))
        optimizer_group, saved_group = (group, nearest) if group in groups else (nearest, group)
        differences = [
            f"{first_names(sorted(parameter_names))} only in {where}"
            for parameter_names, where in (
                (optimizer_group - saved_group, "that of the optimizer"),
                (saved_group - optimizer_group, "that of the checkpoint"),
            )
            if parameter_names
        ]
        raise CheckpointError(
            f"a group of the optimizer has other parameters than the one in the checkpoint that is most like it: "
            f"{'; '.join(differences)}.",
            "the same groups as when it was saved; load() without the optimizer takes the weights alone.",
        )


def _mixed(groups: Iterable[frozenset[str]], share: OptimizerShare) -> list[frozenset[str]]:
    """The groups whose parameters have different options in the other optimizer, or some of them none."""
    options = {name: repr(group.options) for group in share.groups for name in group.names}
    grouped_options = [(group, {options.get(name) for name in group}) for group in sorted(groups, key=sorted)]
    return [group for group, different in grouped_options if len(different) > 1 or None in different]


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    keys = [key for key in {**first, **second} if repr(first.get(key)) != repr(second.get(key))]
    return ", ".join(f"{key} is {first.get(key)!r} and {second.get(key)!r}" for key in keys)


def _empty(parameter: nn.Parameter, key: str, size: torch.Size, dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    """Memory for a tensor of a parameter's state: laid out as it, or else plain."""
    if size == parameter.shape and key != "step":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if is_sharded(parameter) and size.numel() != 1:
        raise CheckpointError(
            f"the checkpoint's {key} has the shape {list(size)}, and its parameter is sharded and has "
            f"{list(parameter.shape)}.",
            "a mesh without dp_shard and tp.",
        )
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))  # as torch's optimizers have it
    return torch.empty(size, dtype=dtype, device="cpu" if on_cpu else parameter.device)


def _plain(value: Any, description: str) -> Any:
    """A plain value, or the structure of a container. Raises CheckpointError for anything else."""
    try:
        structure = nested_state.structure_of(value)
    except TypeError as error:
        raise CheckpointError(
            f"{description} is or holds a {error}: saved are tensors, numbers and strings for each parameter, and "
            "lists, tuples and dicts of them.",
            "an optimizer that keeps its state by parameters.",
        ) from None
    return structure if nested_state.is_container(value) else value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
