"""Advice on what to change, and what it would save: each change is simulated with the measured times."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.schedule import Kind, Schedule, Times, build, names, peak_activations, simulate
from pipegraph.schedule.recipes import trains
from pipegraph.units import format_factor, format_percent

# ---- cut moves -------------------------------------------------------------------------------------------------------
# The cuts of a package moved over whole layers, and the times that its stages then take.
#
# The layers are recognised by the names of the stages' parameters.


_LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.(.+)")

_StageTimes = tuple[float, float, float]  # F, I, W


@dataclass(frozen=True)
class Layer:
    """``layers.5`` of a stage. Layers with the same ``structure`` have parameters of the same names."""

    name: str
    structure: tuple[str, ...]


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage.

    Attributes:
        count: of its layers.
        structures: those that the model has more than once.
        first, last: the equal layers at its begin and at its end, from the border on; empty if the stage begins or
            ends with something else.
    """

    count: int
    structures: frozenset[tuple[str, ...]]
    first: tuple[Layer, ...]
    last: tuple[Layer, ...]


def stage_layers(stages: Sequence[Sequence[str]]) -> list[StageLayers]:
    """Return the layers of each stage, given the FQNs of its parameters in the model's order.

    A layer is what stands under an FQN's first number, ``layers.5`` of ``layers.5.norm.weight``. A part of a layer that
    is cut in two counts as a layer, and equals no other because it has fewer names.
    """
    rows = [[_layer(name, list(names)) for name, names in groupby(parameters, key=_name)] for parameters in stages]
    structure_counts = Counter(layer.structure for row in rows for layer in row if layer is not None)
    layers_by_stage = []
    for row in rows:
        repeated_layers = [
            layer if layer is not None and structure_counts[layer.structure] > 1 else None for layer in row
        ]
        structures = frozenset(layer.structure for layer in repeated_layers if layer is not None)
        count = sum(layer is not None for layer in row)
        layers_by_stage.append(StageLayers(count, structures, _equal(repeated_layers), _equal(repeated_layers[::-1])))
    return layers_by_stage


def _equal(layers: Sequence[Layer | None]) -> tuple[Layer, ...]:
    """Return the layers at the begin that equal the first one."""
    equal_layers: list[Layer] = []
    for layer in layers:
        if layer is None or (equal_layers and layer.structure != equal_layers[0].structure):
            break
        equal_layers.append(layer)
    return tuple(equal_layers)


def _name(parameter: str) -> str:
    match = _LAYER.fullmatch(parameter)
    return match[1] if match else ""


def _layer(name: str, parameters: Sequence[str]) -> Layer | None:
    if not name:
        return None
    kind = name.rpartition(".")[0]  # layers of two lists, such as an encoder's and a decoder's, are not equal
    return Layer(name, (kind, *sorted(parameter.removeprefix(name) for parameter in parameters)))


@dataclass(frozen=True)
class CutMove:
    """A change of the cut before the stage ``cut``, the point where it then is, what it assumes, and its times."""

    change: str
    assuming: str
    times: Times
    cut: int
    point: str


def cut_moves(manifest: Manifest, times: Times) -> Iterator[Iterator[CutMove]]:
    """Yield, for each cut and direction, the moves of one layer, two layers, …, from the cut on.

    A layer takes as long as one layer of any stage that has equal ones: the one with the least time per layer.
    """
    layers = stage_layers([stage.parameters for stage in manifest.stages])
    for cut in range(1, len(manifest.stages)):
        for source, target in ((cut, cut - 1), (cut - 1, cut)):
            border = layers[source].first if source > target else layers[source].last
            border = border[: layers[source].count - 1]  # a stage keeps one
            if border:
                yield _moves(border, source, target, layers, times)


def _moves(
    border: Sequence[Layer], source: int, target: int, layers: Sequence[StageLayers], times: Times
) -> Iterator[CutMove]:
    def of_layer(stage: int) -> _StageTimes:
        forward, input_grad, weight_grad = _times_of(times, stage)
        count = layers[stage].count
        return forward / count, input_grad / count, weight_grad / count

    equal = [stage for stage, candidate in enumerate(layers) if border[0].structure in candidate.structures]
    best = min(equal, key=lambda stage: sum(of_layer(stage)))
    count, layer_times = layers[best].count, of_layer(best)
    assuming = f"a layer taken as {'all' if count == 1 else f'1/{count}'} of stage {best}"
    for number, last in enumerate(border, 1):
        times = _moved(times, source, target, layer_times)
        ends = (border[0], last) if source > target else (last, border[0])
        layer_names = last.name if number == 1 else f"{ends[0].name} – {ends[1].name}"
        cut, point = (source, f"{last.name}:end") if source > target else (target, last.name)
        yield CutMove(f"move {layer_names} to stage {target}", assuming, times, cut, point)


def _moved(times: Times, source: int, target: int, part: _StageTimes) -> Times:
    """Return the times with a part of one stage in another.

    Each stage keeps its own share of I in a backward: the first has no I, because its input has no gradient.
    """
    rows = [list(_times_of(times, stage)) for stage in range(times.stages)]
    for stage, sign in ((source, -1), (target, 1)):
        _, input_grad, weight_grad = _times_of(times, stage)
        backward = input_grad + weight_grad
        share = input_grad / backward if backward else 0.0
        change = part[1] + part[2]
        changes = (part[0], change * share, change * (1 - share))
        rows[stage] = [max(0.0, figure + sign * amount) for figure, amount in zip(rows[stage], changes, strict=True)]
    forward, input_grads, weight_grads = zip(*rows, strict=True)
    return replace(times, forward=forward, input_grad=input_grads, weight_grad=weight_grads)


def _times_of(times: Times, stage: int) -> _StageTimes:
    return times.forward[stage], times.input_grad[stage], times.weight_grad[stage]


# ---- advice ----------------------------------------------------------------------------------------------------------


WORTH = 0.01
"""A smaller gain is not worth a change."""

_FAR_OFF = 1.5  # times: predictions that are further off name no good cuts
_GainOf = Callable[[float], float]  # of a makespan


@dataclass(frozen=True)
class CommandNames:
    """Arguments of commands: the package's folder, and the model that was split; empty if unknown.

    `mesh` has the options of the dimensions other than `pp`, such as ``--dp-shard 2``.
    """

    package: str = ""
    model: str = ""
    mesh: str = ""

    def run(self, schedule: str, microbatches: int) -> str:
        """Return the command that runs the package under a schedule."""
        model = f" --model {shlex.quote(self.model)}" if self.model.partition(":")[0].endswith(".py") else ""
        mesh = f" {self.mesh}" if self.mesh else ""
        return f"pipegraph run {self._package}{model} --schedule {schedule} --microbatches {microbatches}{mesh}"

    def split(self, *options: str) -> str:
        """Return the command that splits the model again, into the same folder."""
        model = shlex.quote(self.model or "MODEL")
        return " ".join(["pipegraph split", model, *options, "-o", self._package, "--overwrite"])

    @property
    def _package(self) -> str:
        return shlex.quote(self.package or "OUT")


@dataclass(frozen=True)
class SimulatedChange:
    """A change, and its ``gain``: the part of a step's time that it saves, or of a microbatch's if there are more.

    The overhead, by which a step takes longer than its simulation, is assumed to stay. ``command`` makes the change.
    """

    change: str
    gain: float
    assuming: str
    same_batch: bool = True
    command: str = ""

    @property
    def measure(self) -> str:
        """Return what becomes less, or more."""
        return "step time" if self.same_batch else "time of a microbatch"

    def __str__(self) -> str:
        assumption = f" ({self.assuming})" if self.assuming else ""
        return f"{self.change}: {self.measure} {format_percent(-self.gain, signed=True)}{assumption}"


@dataclass(frozen=True)
class Advice:
    """The changes that were tried, the best first.

    Attributes:
        changes: each with its gain.
        shared_process: whether the ranks of the run shared a process.
        hindrance: why nothing could be tried; empty if something was.
        mispredicted: how many times as long as predicted a step of compiled kernels took; 1 if that is not known.
        names: of what commands are given.
    """

    changes: tuple[SimulatedChange, ...]
    shared_process: bool = False
    hindrance: str = ""
    mispredicted: float = 1.0
    names: CommandNames = CommandNames()
    stages: int = 0

    @property
    def best(self) -> SimulatedChange | None:
        """Return the change with the largest gain; None if no gain is worth a change."""
        return next((change for change in self.changes if change.gain >= WORTH), None)

    @property
    def sentence(self) -> str:
        """Return the advice: better predictions if these are far off; then the best change and, if that enlarges the
        batch, also the best that keeps it."""
        if not self.predictions_are_off:
            return self._of_changes()
        factor = format_factor(max(self.mispredicted, 1 / self.mispredicted))
        off = f"{factor} × too {'short' if self.mispredicted > 1 else 'long'}"
        further_advice = "" if self.hindrance or self.best is None else f" {self._of_changes()}"
        return f"Predictions are {off}: calibrate, then split again.{further_advice}"

    @property
    def predictions_are_off(self) -> bool:
        """Return whether the plan was made with times that are no guide."""
        return max(self.mispredicted, 1 / self.mispredicted) >= _FAR_OFF

    @property
    def commands(self) -> list[str]:
        """Return what to type, in the order of the sentence."""
        chosen = [change.command for change in (self.best, self._best_of_same_batch) if change is not None]
        if self.predictions_are_off:
            stages = ("--stages", str(self.stages)) if self.stages else ()
            again = self.names.split("--hardware", "hardware.json", *stages)
            chosen = ["pipegraph calibrate -o hardware.json", again, *chosen]
        return list(dict.fromkeys(filter(None, chosen)))

    @property
    def _best_of_same_batch(self) -> SimulatedChange | None:
        return next((change for change in self.changes if change.same_batch and change.gain >= WORTH), None)

    def _of_changes(self) -> str:
        if self.hindrance:
            return f"There is none: {self.hindrance}."
        if not self.changes:
            return "There is nothing to try: no rank waits for another."
        if self.best is None:
            worth = format_percent(WORTH, decimals=0)
            return f"Nothing that was tried would save more than {worth}: other cuts, schedules, more microbatches."
        sentences = [str(self.best)]
        alternative = self._best_of_same_batch
        if alternative is not None and alternative is not self.best:
            sentences.append(f"or with the batch as it is, {alternative}")
        text = "; ".join(sentences)
        if self.shared_process:
            text = f"with a process for each rank: {text}"
        return f"{text[0].upper()}{text[1:]}."


def advise(
    schedule: Schedule,
    times: Times,
    manifest: Manifest | None = None,
    shares: str = "",
    shared_process: bool = False,
    measured: float = 0.0,
    names: CommandNames = CommandNames(),
) -> Advice:
    """Simulate every change.

    Args:
        schedule: without transfers, and with the package's edges.
        times: as measured.
        manifest: of the package, for changes of its cuts.
        shares: how B was divided into I and W if only B was measured.
        shared_process: whether ranks shared a process.
        measured: seconds of the step, if they were measured.
        names: of what commands are given.
    """
    step = simulate(schedule, times).makespan
    if schedule.ranks < 2 or step <= 0:
        return Advice((), shared_process, names=names)

    def gain_of(makespan: float) -> float:
        return (step - makespan) / max(step, measured)

    candidates = [
        *_cuts(schedule, times, manifest, gain_of, names),
        *_schedules(schedule, times, gain_of, shares, names),
    ]
    candidates += _more_microbatches(schedule, times, gain_of, names)
    changes = tuple(sorted(candidates, key=lambda change: -change.gain))
    return Advice(changes, shared_process, names=names, stages=schedule.stages)


def _cuts(
    schedule: Schedule, times: Times, manifest: Manifest | None, gain_of: _GainOf, names: CommandNames
) -> Iterator[SimulatedChange]:
    """Yield for each cut and direction the best number of layers to move."""
    if manifest is None or len(manifest.stages) != schedule.stages:
        return
    for moves in cut_moves(manifest, times):
        best: SimulatedChange | None = None
        for move in moves:
            gain = gain_of(simulate(schedule, move.times).makespan)
            if best is not None and gain <= best.gain:
                break
            best = SimulatedChange(move.change, gain, move.assuming, command=_split_at(manifest, move, names))
        if best is not None:
            yield best


def _schedules(
    schedule: Schedule, times: Times, gain_of: _GainOf, shares: str, commands: CommandNames
) -> Iterator[SimulatedChange]:
    """Yield other orders of the same stages on the same ranks; of equally fast ones, the one that holds least."""
    if not schedule.trains:
        return
    current_peak, divided = max(peak_activations(schedule)), _divides_backward(schedule)
    fastest: dict[float, tuple[int, int, bool]] = {}
    for number, name in enumerate(names()):
        rebuilt = _rebuilt(name, schedule, schedule.microbatches) if trains(name) and name != schedule.name else None
        if rebuilt is not None:
            gain = round(gain_of(simulate(rebuilt, times).makespan), 6)
            candidate = (max(peak_activations(rebuilt)), number, _divides_backward(rebuilt))
            fastest[gain] = min(fastest.get(gain, candidate), candidate)
    for gain, (peak, number, divides) in fastest.items():
        holds = f"a rank then holds {peak} saved activations, now {current_peak}" if peak != current_peak else ""
        assumption = ", and ".join(filter(None, [holds, shares if divides and not divided else ""]))
        name = names()[number]
        command = commands.run(name, schedule.microbatches)
        yield SimulatedChange(f"run {name} instead of {schedule.name}", gain, assumption, command=command)


def _more_microbatches(
    schedule: Schedule, times: Times, gain_of: _GainOf, commands: CommandNames
) -> Iterator[SimulatedChange]:
    count = 2 * schedule.microbatches
    rebuilt = _rebuilt(schedule.name, schedule, count)
    if rebuilt is not None:
        gain = gain_of(simulate(rebuilt, times).makespan / 2)
        change = f"take {count} microbatches of this size instead of {schedule.microbatches}"
        yield SimulatedChange(change, gain, "", False, commands.run(schedule.name, count))


def _split_at(manifest: Manifest, move: CutMove, names: CommandNames) -> str:
    """Return the command that splits the model with one cut moved; empty if the package does not name its cuts."""
    points = list(manifest.plan.points)
    if len(points) != len(manifest.stages) - 1:
        return ""
    points[move.cut - 1] = move.point
    return names.split("--points", shlex.quote(",".join(points)))


def _divides_backward(schedule: Schedule) -> bool:
    return any(action.kind is Kind.W for row in schedule.actions for action in row)


def _rebuilt(name: str, schedule: Schedule, microbatches: int) -> Schedule | None:
    """Build the schedule of this name for the same stages on the same ranks; None if that is not possible."""
    try:
        new_schedule = build(name, schedule.ranks, microbatches, schedule.stages // schedule.ranks)
    except ScheduleError:
        return None
    if new_schedule.placement != schedule.placement:
        return None
    return new_schedule.changed(edges=schedule.edges, gradient_edges=schedule.gradient_edges)
