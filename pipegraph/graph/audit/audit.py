"""Run a model on fake tensors, and refuse what no graph of it would have.

One call shows hooks, seeds and clocks. If it also changes an attribute, the model is called again: it is refused if
the later call computes something else, or if a plain value changes with every call, as a counter does.

call 1 ─▶ effects; what changed ── nothing ─▶ done
call 2 ─▶ the same dataflow as call 1, and no plain value changed again ─▶ done
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipegraph.errors import CaptureError, first_names, one_line
from pipegraph.graph.audit.state import Place, Snapshot
from pipegraph.graph.export.executed_lines import LineRecorder
from pipegraph.graph.export.operation_record import OriginRecord, without_memory
from pipegraph.graph.model_structure import modes_of
from pipegraph.side_effects import Effect, EffectCall, Notes, effects_noted

# ---- data changes ----------------------------------------------------------------------------------------------------
# Changes to parameters and buffers through ``.data``, which no call of Python shows.


_DATA_OF_PARAMETER: Final = Effect(
    "assigns to .data of a parameter or buffer",
    "a stage would not",
    "with torch.no_grad(): p.copy_(...) on a buffer; a parameter that training does not change can be a buffer",
)
_DATA_CHANGED: Final = Effect(
    "changes a parameter or buffer through .data",
    "torch.export cannot follow that",
    "with torch.no_grad(): around the same on the buffer itself: self.sizes.mul_(0.8)",
)
_GET_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DataChanges(TorchFunctionMode):
    """Notes changes to parameters and buffers through ``.data``, which no call of Python shows.

    Args:
        model: with the tensors that it is run with.
        notes: to which they are added.
    """

    def __init__(self, model: nn.Module, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._state = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._data: dict[int, Any] = {}  # holds them, so that an id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _SET_DATA and id(args[0]) in self._state:
            self._add(_DATA_OF_PARAMETER)
        elif func == _GET_DATA and id(args[0]) in self._state:
            self._data[id(result)] = result
        elif args and id(args[0]) in self._data and _is_in_place(getattr(func, "__name__", "")):
            self._data[id(result)] = result
            self._add(_DATA_CHANGED)
        return result

    def _add(self, effect: Effect) -> None:
        frame = inspect.currentframe()
        line = self._notes.line_of(frame.f_back.f_back if frame is not None and frame.f_back is not None else None)
        if line is not None:
            self._notes.calls.append(EffectCall(effect, line))


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")


# ---- audit -----------------------------------------------------------------------------------------------------------


_CALLS: Final = 3


def audit_model(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lines: LineRecorder | None = None,
) -> list[str]:
    """Check that a model does nothing in a mode that its graph does not have. The model is left as it was.

    Args:
        mode: whether each module is in training mode.
        args, kwargs: its inputs; only their shapes and dtypes count.
        lines: records the lines of the model's source that run.

    Returns:
        the attributes with tensors that its forward sets in each call, and no later call reads. Stages do not set them.

    Raises:
        CaptureError: it does; names the line, and what to do instead.
    """
    with without_memory(model, args, kwargs) as (fake_args, fake_kwargs), torch.enable_grad():
        _set_mode(mode)
        snapshot = Snapshot(model)
        packages = frozenset(type(module).__module__.partition(".")[0] for module in model.modules())
        with effects_noted(snapshot.containers, packages) as notes, DataChanges(model, notes):
            results = _run(model, fake_args, fake_kwargs, lines)
        if not torch.is_grad_enabled():
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its forward leaves gradients switched off.",
                "with torch.no_grad(): around what needs none.",
            )
        changes = snapshot.changes(Snapshot(model))
        notes.restore_states()
        _refuse_effects(model, notes)
        if results is None or not changes:
            return []
    with without_memory(model, args, kwargs) as (fake_args, fake_kwargs), torch.enable_grad():
        _set_mode(mode)
        return _check_calls(model, fake_args, fake_kwargs, changes, notes)


def reason_beside(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
    """Why a model that cannot be traced could not be captured either, if the cause is outside of its operations.

    It is often the cause, and what torch raises is about a consequence.
    """
    for mode in modes_of(model):
        try:
            audit_model(model, mode, args, kwargs)
        except CaptureError as reason:
            return reason
    return None


def _check_calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], first_changes: Sequence[Place], notes: Notes
) -> list[str]:
    """Call a model several times. Raises CaptureError if a call depends on those before; else as `audit_model`.

    Args:
        first_changes: what a first call has changed, of which some stays changed.
    """
    record, snapshots, dataflow = OriginRecord(model, (args, kwargs)), [Snapshot(model)], []
    for _ in range(_CALLS):
        record.begin()
        with record:
            results = _run(model, args, kwargs)
        snapshots.append(Snapshot(model))
        dataflow.append(record.describe(results))
        changes = snapshots[-2].changes(snapshots[-1])
        plain = [place for place in changes if not place.is_tensor]
        if len(dataflow) > 1 and plain:
            _refuse_state(model, plain[0], notes, "changes with every call")
        if dataflow[-1] != dataflow[0]:
            _refuse_state(model, first_changes[0], notes, "is read by the next call")
    # Those that torch sets are read by its own modules alone: the weight of a spectral norm.
    return [one_line(place.name) for place in changes if notes.lines.get((place.owner, place.attribute))]


def _set_mode(mode: Mapping[nn.Module, bool]) -> None:
    for module, training in mode.items():
        module.training = training


def _run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], lines: LineRecorder | None = None
) -> tuple[Any] | None:
    """What the model returns; None if it cannot run without memory."""
    try:
        with nullcontext() if lines is None else lines.recording():
            return (model(*args, **kwargs),)
    except Exception:  # whatever the model raises on tensors without values
        return None


def _refuse_effects(model: nn.Module, notes: Notes) -> None:
    for effect, line in (call for call in notes.calls if not call.effect.is_compared):
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: it {effect.description}, and {effect.consequence}.\n"
            f"  at {line}",
            f"{effect.advice}.",
        )


def _refuse_state(model: nn.Module, place: Place, notes: Notes, problem: str) -> None:
    line = notes.lines.get((place.owner, place.attribute))
    where = f"\n  at {line}" if line else ""
    name = one_line(place.name)
    if place.is_tensor:
        advice = f"a buffer, self.register_buffer(...), which a stage updates; or {name} as an input of the model"
    else:
        advice = f"a buffer that counts, self.register_buffer(...); or {name} as an input of the model"
    raise CaptureError(
        f"{type(model).__name__} cannot be captured: its forward changes {name}, which {problem}, and a stage would "
        f"have its value at capture for ever.{where}",
        f"{advice}.",
    )


def warn_of_written(model: nn.Module, names: Collection[str]) -> None:
    """Warn of attributes that the forward sets, and stages do not. `names` has no name twice."""
    if names:
        warnings.warn(
            f"the forward of {type(model).__name__} sets {first_names(names)}, which stages do not.", stacklevel=5
        )
