"""``torch.export`` on a model as it stands, in one mode or another, and no trace of it left on the model."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.proxy import TracerBase

from pipegraph.errors import CaptureError, user_line
from pipegraph.graph.export.call_arguments import record_calls
from pipegraph.graph.export.fake_parameters import fake_parameters

_TORCH = str(Path(torch.__file__).parent)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ExportedProgram, bool]:
    """Export in training mode, or in the first other mode that works; and whether it was training mode.

    Raises:
        CaptureError: no mode works.
    """
    modules = list(model.modules())
    as_it_is = {module: module.training for module in modules}
    modes = [dict.fromkeys(modules, True), as_it_is, dict.fromkeys(modules, False)]
    first_error: Exception | None = None
    for mode in modes:
        try:
            exported = export_in(mode, model, args, kwargs)
        except Exception as error:
            first_error = first_error or error
            continue
        if first_error is not None:
            warnings.warn(
                f"{type(model).__name__} cannot be traced in training mode ({summary(first_error)}); it was captured "
                "in evaluation mode, without the dropout inside attention.",
                stacklevel=3,
            )
        return exported, mode[model]
    assert first_error is not None
    raise CaptureError(explain(model, first_error)) from first_error


def export_in(
    mode: Mapping[nn.Module, bool], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportedProgram:
    """Export with each module in the mode that ``mode`` gives it (True: training). Raises what export raises."""
    with (
        _modes(mode),
        fake_parameters(model, args, kwargs) as (fake_args, fake_kwargs),
        _custom_backwards_named(),
        _helpers_traced(),
        record_calls(),
        warnings.catch_warnings(),
    ):
        # The second list of weights of an nn.LSTM follows the fake ones, and goes back with them.
        warnings.filterwarnings("ignore", r"The tensor attributes? self\.\S*_flat_weights")
        return torch.export.export(model, fake_args, fake_kwargs, strict=False)


@contextmanager
def _modes(mode: Mapping[nn.Module, bool]) -> Iterator[None]:
    before = {module: module.training for module in mode}
    for module, training in mode.items():
        module.training = training
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def _helpers_traced() -> Iterator[None]:
    """Keep the lines of functions that a ``forward`` calls in the stack traces of operations, to look names up there.

    Private interface: ``TracerBase._filter_traceback_frames``, "can be overridden to customize the frame filtering
    logic", of a tracer that export makes itself; on its own, export keeps the frames of ``forward`` methods alone.
    """
    before = TracerBase._filter_traceback_frames

    def with_helpers(tracer: TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
        kept = {(frame.filename, frame.lineno) for frame in before(tracer, summary)}
        inside, frames = False, []
        for frame in summary:
            known = (frame.filename, frame.lineno) in kept
            inside = inside or known
            if known or (inside and not frame.filename.startswith(_TORCH)):
                frames.append(frame)
        return traceback.StackSummary.from_list(frames)

    setattr(TracerBase, "_filter_traceback_frames", with_helpers)  # noqa: B010 (mypy takes no other form)
    try:
        yield
    finally:
        setattr(TracerBase, "_filter_traceback_frames", before)  # noqa: B010


@contextmanager
def _custom_backwards_named() -> Iterator[None]:
    """Warn of a ``torch.autograd.Function`` of the model's: export keeps its forward and silently drops its backward.

    It is no error, because many have a forward that autograd can differentiate to the same (an explicit GELU).
    """
    apply = torch.autograd.Function.__dict__["apply"]
    named: set[type] = set()

    def apply_and_warn(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] != "torch" and cls not in named:
            named.add(cls)
            warnings.warn(
                f"{cls.__qualname__} of {cls.__module__} has a backward of its own, which torch.export drops: its "
                "forward is differentiated instead. pipegraph verify tells whether gradients are the same; where they "
                "are not, make it an operation with torch.library.custom_op and register_autograd.",
                stacklevel=2,
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply_and_warn))  # noqa: B010 (mypy takes no other form)
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", apply)  # noqa: B010


def summary(error: Exception) -> str:
    """What went wrong, in a line."""
    if _depends_on_values(error):
        return "what it does depends on the values of a tensor, which are not known while it is traced"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _depends_on_values(error: Exception) -> bool:
    return "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__


def explain(model: nn.Module, error: Exception) -> str:
    """What export says, where in the user's source, and what to try."""
    where = user_line(error)
    advice = (
        "model(*example_inputs) in Python. If that fails too, mend the inputs or the model; if not, "
        f"{'the line above' if where else 'something in it'} is Python that torch.export cannot follow"
    )
    if _depends_on_values(error):
        advice = "for a branch, compute both sides and choose with torch.where; for a number, pass it as an argument"
    at = f"\n  at {where}" if where else ""
    return f"{type(model).__name__} cannot be captured: {summary(error)}.{at}\nTry: {advice}."
