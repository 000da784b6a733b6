"""What is said of a plan."""

from __future__ import annotations

from msgspec.structs import replace

from pipegraph.package.prediction import Cut, Prediction, RankMemory, ShiftedCut, StagePrediction
from pipegraph.report.text.package_tables import render_prediction, render_prediction_summary

PREDICTION = Prediction(
    balance="time",
    recompute="min-cut",
    hardware="h100",
    unit="s",
    schedule="1f1b",
    placement=(0, 1, 2),
    microbatches=8,
    value=0.25,
    places=40,
    lower_bound=0.249,
    memory=(3 * 2**30, 2 * 2**30, 2 * 2**30),
    memory_parts=(
        RankMemory(2**28, 2**28, 2**29, 0, 2**31 - 2**28, 0, 2**28, 0),
        *[RankMemory(2**27, 2**27, 2**28, 0, 2**30, 2**21, 2**29 - 2**21, 0)] * 2,
    ),
    stages=(
        StagePrediction(0.005, 0.0, 0.015, 2**28, 2**28),
        StagePrediction(0.010, 0.010, 0.0, 2**28, 2**27),
        StagePrediction(0.005, 0.0025, 0.0025, 2**28, 2**27),
    ),
    cuts=(
        Cut("layers.4", 2**21, None, ShiftedCut("layers.4.mlp", 0.2525)),
        Cut("layers.8", 2**21, ShiftedCut("layers.7.mlp", 0.25), ShiftedCut("layers.8.mlp", None)),
    ),
)


def test_summary() -> None:
    assert render_prediction_summary(PREDICTION).splitlines() == [
        "predicted  250 ms a step of 1f1b with 8 microbatches on h100; other cuts at the 40 places looked at are "
        "better by 0.4 % at most",
        "memory     3.0 GiB on the fullest rank with recompute min-cut",
    ]
    assert (
        render_prediction_summary(replace(PREDICTION, lower_bound=0.25))
        .splitlines()[0]
        .endswith("; no other cuts at the 40 places looked at are better")
    )
    assert (
        render_prediction_summary(replace(PREDICTION, lower_bound=0.24995))
        .splitlines()[0]
        .endswith("; other cuts at the 40 places looked at are better by less than 0.1 %")
    )
    assert (
        render_prediction_summary(replace(PREDICTION, lower_bound=None))
        .splitlines()[0]
        .endswith("8 microbatches on h100")
    )
    weighed = replace(PREDICTION, unit="FLOP", balance="flops", value=2.5e12, lower_bound=2.5e12)
    assert (
        render_prediction_summary(weighed)
        == "largest stage  2.5 TFLOP; no other cuts at the 40 places looked at are better"
    )
    counted = replace(PREDICTION, unit="parameters", balance="parameters", value=10_290_000, lower_bound=None)
    assert render_prediction_summary(counted) == "largest stage  10.3 M parameters"


def test_what_the_memory_is_for_is_said() -> None:
    planned = replace(PREDICTION, precision="bf16", zero1=True)
    assert render_prediction_summary(planned).endswith("recompute min-cut, bf16, adamw with ZeRO-1")
    assert planned.to_dict()["zero1"] and "zero1" not in PREDICTION.to_dict()


def test_stages_memory_and_cuts() -> None:
    assert render_prediction(PREDICTION).plain.splitlines() == [
        "stage  rank      F      I      W     ms",
        "    0     0   5.00   0.00  15.00  20.00  ██████████░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░",
        "    1     1  10.00  10.00   0.00  20.00  ████████████████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓",
        "    2     2   5.00   2.50   2.50  10.00  ██████████▓▓▓▓▓░░░░░",
        "",
        "memory                 rank 0   rank 1–2",
        "parameters          256.0 MiB  128.0 MiB",
        "gradients           256.0 MiB  128.0 MiB",
        "optimizer state     512.0 MiB  256.0 MiB",
        "activations           1.8 GiB    1.0 GiB",
        "receive buffers       0 B        2.0 MiB",
        "transient           256.0 MiB  510.0 MiB",
        "together              3.0 GiB    2.0 GiB",
        "a microbatch keeps  256.0 MiB  256.0 MiB",
        "",
        "stage  begins at  crosses  one segment earlier       one later",
        "    1  layers.4   2.0 MiB  —                         +1.00 % (layers.4.mlp)",
        "    2  layers.8   2.0 MiB  no change (layers.7.mlp)  does not fit (layers.8.mlp)",
    ]


def test_a_schedule_without_a_backward() -> None:
    forward = replace(PREDICTION, schedule="forward")
    lines = render_prediction(forward).plain.splitlines()
    assert (lines[0].split(), lines[5].split()[:1]) == (["stage", "rank", "F", "ms"], ["memory"])
    assert not any(line.startswith("a microbatch keeps") for line in lines)
    assert render_prediction_summary(forward).endswith("3.0 GiB on the fullest rank")


def test_colour_changes_no_text() -> None:
    plain, coloured = render_prediction(PREDICTION), render_prediction(PREDICTION, coloured=True)
    assert coloured.plain == plain.plain.replace("▓", "█").replace("░", "█")
    assert len({str(span.style) for span in coloured.spans}) == 3


def test_a_reason_in_words() -> None:
    assert PREDICTION.reason(1) == (
        "stages 1 and 2 take 20 ms and 10 ms; 2.0 MiB cross; one segment earlier, at layers.7.mlp, no change; "
        "one segment later, at layers.8.mlp, does not fit"
    )
