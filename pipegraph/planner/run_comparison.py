"""The prediction of a run's stages, step and memory, compared with the measurement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import one_line
from pipegraph.package import Manifest
from pipegraph.package.prediction import Prediction, RankMemory, mesh_text
from pipegraph.planner.step_prediction import PlannedStep, describe_step, predict_step, pricing_profile
from pipegraph.runtime.measurements import COMPUTING, MeasuredRun, Message
from pipegraph.runtime.precision import PRECISIONS, changes_dtypes
from pipegraph.schedule import CollectiveKind, Kind, Schedule
from pipegraph.units import format_bytes, format_factor

_LARGE_ERROR = 0.3
"""If the time of all stages together differs by more than this fraction of the prediction, a hint says so."""


@dataclass(frozen=True)
class PredictedAndMeasured:
    """A figure as predicted and as measured; None for one that is not known."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """The error of the prediction, as a part of the measured figure; None if one of the two is missing or 0."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class RunComparison:
    """A run, compared with its prediction.

    Attributes:
        stages: for each stage, the seconds of each kind of action in the schedule; B is compared with I + W.
        step: seconds; if all ranks run in one process, in turn, the sum of theirs.
        bubble: the share of a step in which ranks compute nothing, the mean over ranks, measured step by step; None if
            ranks run in turn.
        memory: of each rank, bytes by kind (`RankMemory.by_kind`); a kind is missing if it is neither predicted nor
            measured.
        allocated: bytes of each rank, all of these; measured on GPUs that have one rank each.
        measured: the run.
        basis: what the prices rest on: ``time on h100``; empty without prices.
        hints: why figures are missing or cannot be compared, and what to try.
        collectives: for each stage, the seconds of each kind of collective in the schedule; () if it has none.
    """

    schedule: Schedule
    stages: tuple[dict[Kind, PredictedAndMeasured], ...]
    step: PredictedAndMeasured
    bubble: PredictedAndMeasured | None
    memory: tuple[dict[str, PredictedAndMeasured], ...]
    allocated: tuple[PredictedAndMeasured, ...]
    measured: MeasuredRun
    basis: str
    hints: tuple[str, ...]
    collectives: tuple[dict[CollectiveKind, PredictedAndMeasured], ...] = ()


def compare_run(
    manifest: Manifest,
    schedule: Schedule,
    measured: MeasuredRun,
    hardware: Hardware | None = None,
    mesh: Mapping[str, int] | None = None,
) -> RunComparison:
    """Compare a run with the prediction of its package for the run's schedule, with its collectives.

    ``hardware`` is the profile with the links; see `predict_step`. ``mesh`` has the lengths of the mesh's other
    dimensions; without it they count as planned.
    """
    plan, in_turn = manifest.prediction, measured.processes < schedule.ranks
    collectives = tuple(
        _collectives(stage, measured, hardware or pricing_profile(manifest)) for stage in range(schedule.stages)
    )
    expected = predict_step(
        manifest,
        schedule,
        hardware,
        in_turn,
        {
            (stage, kind): pair.predicted or 0.0
            for stage, kinds in enumerate(collectives)
            for kind, pair in kinds.items()
        },
        measured.parts or None,
    )
    costs, memory = None if expected.times is None else expected.costs, expected.memory
    ranks = schedule.ranks
    kinds = [kind for kind in COMPUTING if any(action.kind is kind for row in schedule.actions for action in row)]
    stages = tuple(
        {
            kind: PredictedAndMeasured(
                _seconds(costs[stage], kind) if costs else None, measured.times.get((stage, kind))
            )
            for kind in kinds
        }
        for stage in range(schedule.stages)
    )
    hints = [_other_plan_hint(manifest, schedule, mesh), *_hints(manifest, stages, measured, expected.links_known)]
    totals = [rank.total for rank in memory] if memory else [None] * schedule.ranks
    allocated = measured.allocated if len(measured.allocated) == schedule.ranks else [None] * schedule.ranks
    return RunComparison(
        schedule=schedule,
        stages=stages,
        step=PredictedAndMeasured(expected.step, measured.step),
        bubble=None if in_turn else PredictedAndMeasured(expected.bubble, measured.bubble),
        memory=tuple(_memory_of(None if memory is None else memory[rank], measured, rank) for rank in range(ranks)),
        allocated=tuple(map(PredictedAndMeasured, totals, allocated)),
        measured=measured,
        basis=one_line(f"{plan.balance} on {plan.hardware}") if costs and plan else "",
        hints=tuple(filter(None, hints)),
        collectives=collectives if any(collectives) else (),
    )


def _memory_of(predicted: RankMemory | None, measured: MeasuredRun, rank: int) -> dict[str, PredictedAndMeasured]:
    """Return the bytes of a rank by kind."""
    predicted_bytes = {} if predicted is None else predicted.by_kind()
    measured_bytes: dict[str, int | None] = {
        name.replace("_", " "): size for name, size in asdict(measured.state[rank]).items()
    }
    measured_bytes["activations"] = measured.saved[rank]
    pairs = {
        kind: PredictedAndMeasured(predicted_bytes.get(kind), measured_bytes.get(kind)) for kind in RankMemory.kinds()
    }
    return {kind: pair for kind, pair in pairs.items() if pair != PredictedAndMeasured(None, None)}


def _collectives(
    stage: int, measured: MeasuredRun, hardware: Hardware | None
) -> dict[CollectiveKind, PredictedAndMeasured]:
    """Return the seconds of each kind of collective of a stage that sends something."""
    return {
        kind: PredictedAndMeasured(seconds_of_messages(collective.messages, hardware), collective.seconds)
        for kind in CollectiveKind
        if (collective := measured.collectives.get((stage, kind))) is not None and collective.messages
    }


def seconds_of_messages(messages: Iterable[Message], hardware: Hardware | None) -> float | None:
    """Return what the messages of a collective take one after the other; None if the links are not known."""
    if hardware is None:
        return None
    total = 0.0
    for message in messages:
        link = hardware.links.among(message.ranks)
        total += link.collective_seconds(message.way, message.size, len(message.ranks))
    return total


def _seconds(cost: SegmentCost, kind: Kind) -> float:
    """Return the predicted seconds of one action."""
    return {
        Kind.F: cost.forward,
        Kind.I: cost.input_grad,
        Kind.W: cost.weight_grad,
        Kind.B: cost.input_grad + cost.weight_grad,
    }[kind]


def _other_plan_hint(manifest: Manifest, schedule: Schedule, mesh: Mapping[str, int] | None) -> str:
    """Return a hint if the plan was made for another step or mesh than what ran, else an empty string."""
    plan, planned = manifest.prediction, PlannedStep.from_manifest(manifest)
    if plan is None or planned is None:
        return ""
    plan_mesh, ran = plan.mesh_text, plan.mesh_text if mesh is None else mesh_text(schedule.ranks, mesh, plan.resident)
    if planned.is_of(schedule) and plan_mesh == ran:
        return ""
    step = describe_step(schedule.name, schedule.microbatches, schedule.ranks)
    options = "without --schedule, --microbatches and --nproc"
    if plan_mesh != ran:
        options = f"{options}, --dp-replicate, --dp-shard and --tp"
        plan_mesh, ran = (f" in a mesh of {text}" if text else " in one pipeline" for text in (plan_mesh, ran))
    else:
        plan_mesh = ran = ""
    how = options if planned.to_schedule() is not None else "--schedule with the plan's CSV file"
    return f"The plan was {planned}{plan_mesh}, and this was {step}{ran}. Try: {how}"


def _hints(
    manifest: Manifest,
    stages: Sequence[Mapping[Kind, PredictedAndMeasured]],
    measured: MeasuredRun,
    links_known: bool,
) -> Iterator[str]:
    timed = all(pair.predicted is not None for stage in stages for pair in stage.values())
    priced = timed or all(stage.cost.saved_bytes is not None for stage in manifest.stages)
    if not measured.steps:
        yield "Times are measured from the second step on, because the first one compiles. Try: --steps 5"
    if priced and measured.tensor_ranks > 1:
        subject = "Times and saved bytes were" if timed else "Saved bytes were"
        yield f"{subject} predicted for whole stages, and {measured.tensor_ranks} ranks along tp divide each."
    if not timed:
        yield "The package has no predicted times. Try: pipegraph split … --balance time"
    subject = "Times and bytes were predicted" if timed else "Bytes were predicted"
    planned = manifest.prediction.precision if manifest.prediction is not None else None
    is_compiled, is_planned = measured.kernels == "inductor", measured.precision == _changing(planned, manifest)
    if priced and not is_compiled:
        yield f"{subject} for compiled kernels, and this run used --kernels {measured.kernels}."
    if priced and not is_planned:
        dtypes, used = (
            f"--precision {name}" if name is not None else "the package's own dtypes"
            for name in (planned, measured.precision)
        )
        yield f"{subject} for {dtypes}, and this run used {used}."
    if timed and is_compiled and is_planned and manifest.prediction is not None and measured.tensor_ranks == 1:
        yield _error_hint(manifest.prediction.balance, stages)
    if is_planned and manifest.prediction is not None:
        yield _optimizer_hint(manifest.prediction, measured)
    if timed and not links_known and manifest.prediction is not None:
        name = one_line(manifest.prediction.hardware)
        yield f"The links of {name} are not known here and were left out. Try: --hardware with the profile's file"


def _optimizer_hint(plan: Prediction, measured: MeasuredRun) -> str:
    """Return a hint if the optimizer of a run holds more than the plan counts on, else an empty string."""
    if len(plan.memory_parts) != len(measured.state):
        return ""
    pairs = zip(measured.state, plan.memory_parts, strict=True)
    rank, (measured_bytes, planned_bytes) = max(
        enumerate((state.optimizer_state, memory.optimizer_state) for state, memory in pairs),
        key=lambda member: member[1][0] - member[1][1],
    )
    if measured_bytes <= (1 + _LARGE_ERROR) * planned_bytes:
        return ""
    optimizer = f"{one_line(plan.optimizer)}{' with ZeRO-1' if plan.zero1 else ''}"
    return (
        f"The optimizer holds {format_bytes(measured_bytes)} on rank {rank}, and the plan counts "
        f"{format_bytes(planned_bytes)} for {optimizer}. Try: that optimizer in the model's file; or plan with "
        "this one"
    )


def _changing(precision: str | None, manifest: Manifest) -> str | None:
    """Return a precision; None for one that is that of the package."""
    is_of_runs = precision in PRECISIONS
    return None if is_of_runs and not changes_dtypes(precision, manifest) else precision


def _error_hint(balance: str, stages: Sequence[Mapping[Kind, PredictedAndMeasured]]) -> str:
    """Return a hint if all stages together took much more or less than predicted, else an empty string."""
    figures = [pair for stage in stages for pair in stage.values() if pair.predicted and pair.measured]
    predicted, measured = sum(pair.predicted or 0.0 for pair in figures), sum(pair.measured or 0.0 for pair in figures)
    factor = measured / predicted if figures else 1.0
    if abs(factor - 1) <= _LARGE_ERROR:
        return ""
    message = f"Stages took {format_factor(factor)} times what was predicted."
    if balance != "time":
        return f"{message} Their times were measured: was it on this device, and was nothing else running on it?"
    return (
        f"{message} Try, while nothing else runs: pipegraph calibrate -o hardware.json and pipegraph split … "
        "--hardware hardware.json, or pipegraph run … --recalibrate corrected.json"
    )
