"""What to change, and what it would save: every candidate is simulated with the measured times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.schedule import Kind, Schedule, Times, build, names, peak_activations, simulate
from pipegraph.schedule.recipes import trains
from pipegraph.tracing.analysis.cut_moves import moves

WORTH = 0.01
"""A smaller gain is not told."""
_Gain = Callable[[float], float]  # of a makespan


@dataclass(frozen=True)
class Candidate:
    """A change; ``gain`` is the part of the time that it saves: of a step, or of a microbatch where there are more.

    What a step takes beyond what the simulation knows of, its overhead, is taken to stay.
    """

    change: str
    gain: float
    assuming: str
    same_batch: bool = True

    def __str__(self) -> str:
        what = "of a step" if self.same_batch else "of the time of a microbatch"
        aside = f" ({self.assuming})" if self.assuming else ""
        return f"{self.change} would save {self.gain * 100:.1f} % {what}{aside}"


@dataclass(frozen=True)
class Advice:
    """The candidates, the best first; ``in_turn`` where the ranks of the run shared a process; ``hindrance`` says why
    there is none, where that is no good sign."""

    candidates: tuple[Candidate, ...]
    in_turn: bool = False
    hindrance: str = ""

    @property
    def best(self) -> Candidate | None:
        """That with the largest gain, if one is worth it."""
        return next((found for found in self.candidates if found.gain >= WORTH), None)

    @property
    def sentence(self) -> str:
        """The best candidate, and beside a larger batch also the best that keeps it."""
        if self.hindrance:
            return f"There is none: {self.hindrance}."
        if not self.candidates:
            return "There is nothing to try: no rank waits for another."
        if self.best is None:
            return f"Nothing that was tried would save more than {WORTH:.0%}: other cuts, schedules, more microbatches."
        said = [str(self.best)]
        same = next((found for found in self.candidates if found.same_batch and found.gain >= WORTH), None)
        if same is not None and same is not self.best:
            said.append(f"with the batch as it is, {same}")
        text = "; ".join(said)
        if self.in_turn:
            text = f"with a process for each rank, {text}"
        return f"{text[0].upper()}{text[1:]}."


def advise(
    schedule: Schedule,
    times: Times,
    manifest: Manifest | None = None,
    shares: str = "",
    in_turn: bool = False,
    measured: float = 0.0,
) -> Advice:
    """Try every candidate. ``schedule`` has no transfers, and the package's edges; ``shares`` says how I and W were
    told apart where only B was measured; ``measured`` is the step in seconds, where it was."""
    step = simulate(schedule, times).makespan
    if schedule.ranks < 2 or step <= 0:
        return Advice((), in_turn)

    def gain(makespan: float) -> float:
        return (step - makespan) / max(step, measured)

    found = [*_cuts(schedule, times, manifest, gain), *_schedules(schedule, times, gain, shares)]
    found += _more(schedule, times, gain)
    return Advice(tuple(sorted(found, key=lambda each: -each.gain)), in_turn)


def _cuts(schedule: Schedule, times: Times, manifest: Manifest | None, gain_of: _Gain) -> Iterator[Candidate]:
    if manifest is None or len(manifest.stages) != schedule.stages:
        return
    for more_and_more in moves(manifest, times):
        best: Candidate | None = None
        for move in more_and_more:
            gain = gain_of(simulate(schedule, move.times).makespan)
            if best is not None and gain <= best.gain:
                break
            best = Candidate(move.change, gain, move.assuming)
        if best is not None:
            yield best


def _schedules(schedule: Schedule, times: Times, gain_of: _Gain, shares: str) -> Iterator[Candidate]:
    """Other orders of the same stages on the same ranks; of those that take equally long, the one that holds least."""
    if not schedule.trains:
        return
    held, divided = max(peak_activations(schedule)), _divides(schedule)
    fastest: dict[float, tuple[int, int, bool]] = {}
    for number, name in enumerate(names()):
        other = None if name == schedule.name or not trains(name) else _built(name, schedule, schedule.microbatches)
        if other is not None:
            gain = round(gain_of(simulate(other, times).makespan), 6)
            this = (max(peak_activations(other)), number, _divides(other))
            fastest[gain] = min(fastest.get(gain, this), this)
    for gain, (peak, number, divides) in fastest.items():
        holds = f"a rank then holds {peak} saved activations, now {held}" if peak != held else ""
        aside = ", and ".join(filter(None, [holds, shares if divides and not divided else ""]))
        yield Candidate(f"running {names()[number]} instead of {schedule.name}", gain, aside)


def _more(schedule: Schedule, times: Times, gain_of: _Gain) -> Iterator[Candidate]:
    """Twice the microbatches."""
    count = 2 * schedule.microbatches
    other = _built(schedule.name, schedule, count)
    if other is not None:
        gain = gain_of(simulate(other, times).makespan / 2)
        yield Candidate(f"{count} microbatches of this size instead of {schedule.microbatches}", gain, "", False)


def _divides(schedule: Schedule) -> bool:
    """Whether it tells I and W apart."""
    return any(action.kind is Kind.W for row in schedule.actions for action in row)


def _built(name: str, schedule: Schedule, microbatches: int) -> Schedule | None:
    """The schedule of this name for the same stages on the same ranks; None where there is none."""
    try:
        made = build(name, schedule.ranks, microbatches, schedule.stages // schedule.ranks)
    except ScheduleError:
        return None
    if made.placement != schedule.placement:
        return None
    return made.changed(edges=schedule.edges, gradient_edges=schedule.gradient_edges)
