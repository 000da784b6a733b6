"""Advice, and what it is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import force_setattr

from pipegraph.schedule import Schedule, Times, build, simulate
from pipegraph.tracing.analysis.advice import CommandNames, SimulatedChange, advise, stage_layers
from tests.tracing.recordings import manifest


def with_edges(schedule: Schedule) -> Schedule:
    return schedule.changed(edges=schedule.dependencies.edges, gradient_edges=schedule.dependencies.gradient_edges)


def changes(alternatives: tuple[SimulatedChange, ...]) -> dict[str, float]:
    return {alternative.change: alternative.gain for alternative in alternatives}


def test_a_layer_moves_away_from_the_longest_stage() -> None:
    schedule = with_edges(build("1f1b", 2, 8))
    # Five layers of 1, 1, 1 on stage 1, and three on stage 0.
    times = Times((3.0, 5.0), (3.0, 5.0), (3.0, 5.0))
    even = Times.equal(2, 4.0, 4.0, 4.0)
    gain = 1 - simulate(schedule, even).makespan / simulate(schedule, times).makespan
    pipeline = manifest(2, layers=4)
    stages = [pipeline.stages[0], pipeline.stages[1]]
    names = [f"layers.{n}.weight" for n in range(8)]
    force_setattr(stages[0], "parameters", tuple(names[:3]))
    force_setattr(stages[1], "parameters", tuple(names[3:]))
    advice = advise(schedule, times, pipeline)
    assert changes(advice.changes)["move layers.3 to stage 0"] == pytest.approx(gain)
    assert changes(advice.changes)["move layers.2 to stage 1"] < 0
    moved = next(alternative for alternative in advice.changes if alternative.change.startswith("move layers.3"))
    assert str(moved) == (f"move layers.3 to stage 0: step time −{gain * 100:.1f} % (a layer taken as 1/3 of stage 0)")


def test_a_moved_cut_has_a_command() -> None:
    pipeline = manifest(2, layers=4)
    force_setattr(pipeline.plan, "points", ("layers.4",))
    advice = advise(with_edges(build("1f1b", 2, 8)), Times((1.0, 5.0), (1.0, 5.0), (1.0, 5.0)), pipeline)
    assert advice.best is not None and advice.best.change.startswith("move layers.4")
    last = advice.best.change.split()[-4]
    assert f"pipegraph split MODEL --points {last}:end -o OUT --overwrite" in advice.commands


def test_commands_name_the_package_and_the_model() -> None:
    names = CommandNames("build/gpt", "gpt.py")
    pipeline = manifest(2, layers=4)
    force_setattr(pipeline.plan, "points", ("layers.4",))
    advice = advise(with_edges(build("1f1b", 2, 4)), Times((1.0, 5.0), (1.0, 5.0), (1.0, 5.0)), pipeline, names=names)
    assert all("OUT" not in text and "MODEL" not in text for text in replace(advice, mispredicted=3.7).commands)
    assert advice.commands[0].startswith("pipegraph split gpt.py --points layers.")
    assert advice.commands[0].endswith(":end -o build/gpt --overwrite")
    runs = [alternative.command for alternative in advice.changes if alternative.command.startswith("pipegraph run")]
    assert runs
    assert all(command.startswith("pipegraph run build/gpt --model gpt.py --schedule ") for command in runs)
    again = replace(advice, mispredicted=3.7).commands[1]
    assert again == "pipegraph split gpt.py --hardware hardware.json --stages 2 -o build/gpt --overwrite"


def test_predictions_that_are_far_off_come_first() -> None:
    advice = advise(with_edges(build("1f1b", 2, 4)), Times.equal(2))
    short, long, near = (replace(advice, mispredicted=factor) for factor in (3.7, 0.5, 1.2))
    assert short.sentence.startswith("Predictions are 3.7 × too short: calibrate, then split again. Run zb-h1 ")
    assert long.sentence.startswith("Predictions are 2 × too long: calibrate, then split again. Run zb-h1 ")
    assert near.sentence == advice.sentence
    assert short.commands[0] == "pipegraph calibrate -o hardware.json"
    assert short.commands[2:] == advice.commands == ["pipegraph run OUT --schedule zb-h1 --microbatches 4"]
    assert replace(advice, changes=(), mispredicted=3.7).sentence.endswith("calibrate, then split again.")


def test_overhead_is_not_saved() -> None:
    schedule, times = with_edges(build("1f1b", 2, 4)), Times.equal(2, 1.0, 1.0, 1.0)
    step = simulate(schedule, times).makespan
    alone, half = advise(schedule, times), advise(schedule, times, measured=2 * step)
    assert changes(half.changes) == pytest.approx(
        {change: gain / 2 for change, gain in changes(alone.changes).items()}, abs=1e-6
    )
    assert half.best is not None and half.best.gain > 0.05
    assert advise(schedule, times, measured=50 * step).best is None


def test_as_many_layers_move_as_it_takes() -> None:
    schedule = with_edges(build("1f1b", 2, 8))
    pipeline = manifest(2, layers=4)
    names = [f"layers.{n}.weight" for n in range(8)]
    force_setattr(pipeline.stages[0], "parameters", tuple(names[:6]))
    force_setattr(pipeline.stages[1], "parameters", tuple(names[6:]))
    best = advise(schedule, Times((6.0, 2.0), (6.0, 2.0), (6.0, 2.0)), pipeline).best
    assert best is not None
    assert best.change == "move layers.4 – layers.5 to stage 1"


def test_another_schedule_says_what_it_holds_and_how_i_and_w_were_divided() -> None:
    schedule = with_edges(build("1f1b", 2, 4))
    advice = advise(schedule, Times.equal(2), shares="I and W taken as halves of B")
    assert advice.best is not None
    assert advice.sentence == ("Run zb-h1 instead of 1f1b: step time −13.3 % (I and W taken as halves of B).")
    # interleaved-zb is the same with one stage on a rank, and zb-h2 holds more: one of equals is told.
    assert [alternative.change.split()[1] for alternative in advice.changes if alternative.gain > 0.1] == ["zb-h1"]


def test_more_microbatches_and_the_best_change_that_keeps_the_batch() -> None:
    schedule = with_edges(build("gpipe", 4, 4))
    times = Times((1.0,) * 4, (0.0,) * 4, (0.0,) * 4)
    advice = advise(build("forward", 4, 4), times)
    assert advice.sentence == ("Take 8 microbatches of this size instead of 4: time of a microbatch −21.4 %.")
    advice = advise(schedule, Times.equal(4, 1.0, 1.9, 0.1))
    assert advice.sentence.startswith("Take 8 microbatches of this size instead of 4: time of a microbatch −")
    assert "; or with the batch as it is, run zb-h" in advice.sentence


def test_nothing_helps() -> None:
    schedule = with_edges(build("1f1b", 2, 512))
    advice = advise(schedule, Times.equal(2))
    assert advice.best is None
    assert advice.sentence == (
        "Nothing that was tried would save more than 1 %: other cuts, schedules, more microbatches."
    )


def test_ranks_of_one_process_are_advised_for_a_process_each() -> None:
    advice = advise(with_edges(build("1f1b", 2, 4)), Times.equal(2), shared_process=True)
    assert advice.sentence.startswith("With a process for each rank: run zb-h1")


@pytest.mark.parametrize("times", [Times.equal(1), Times.equal(1, 0.0, 0.0, 0.0)])
def test_a_single_rank_has_nothing_to_try(times: Times) -> None:
    assert advise(build("1f1b", 1, 2), times).sentence == "There is nothing to try: no rank waits for another."


def test_layers_are_what_stands_under_the_first_number() -> None:
    first, second = stage_layers(
        [
            ["embed.weight", "blocks.0.a.0.w", "blocks.0.a.1.w", "blocks.1.a.0.w", "blocks.1.a.1.w", "blocks.2.a.0.w"],
            ["blocks.2.a.1.w", "blocks.3.a.0.w", "blocks.3.a.1.w", "norm.weight"],
        ]
    )
    assert first.first == () and first.last == ()  # it ends with half of blocks.2
    assert (first.count, second.count) == (3, 2)
    assert second.first == () and second.last == ()
    assert first.structures == second.structures == {("blocks", ".a.0.w", ".a.1.w")}


def test_layers_of_two_lists_are_not_equal() -> None:
    (layers,) = stage_layers([["encoder.0.w", "encoder.1.w", "decoder.0.w", "decoder.1.w"]])
    assert {structure[0] for structure in layers.structures} == {"encoder", "decoder"}
    assert [layer.name for layer in layers.first + layers.last] == ["encoder.0", "encoder.1", "decoder.1", "decoder.0"]
