"""Draw the losses of runs over each other.

    python examples/text/curve.py build/text/alone build/text/killed -o build/text/curve.svg

A run's folder is what `pipegraph run --checkpoint` was given. The first one is drawn thick, so that equal curves show.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipegraph.report.drawing import GREY, LINE, Drawing, Label, Line, Shape
from pipegraph.units import tick_marks

WIDTH, HEIGHT, LEFT_MARGIN, TOP, BOTTOM = 720, 360, 48, 44, 36
COLOURS = ("#9cc4ee", "#9a3324", "#2f9e77", "#b27a00")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    losses = {run.name: read_losses(run, "loss") for run in arguments.runs}
    evaluations = {run.name: read_losses(run, "evaluation") for run in arguments.runs}
    (first, reference), *other_runs = losses.items()
    for name, run in losses.items():
        print(f"{name}: {len(run)} steps, evaluation {', '.join(f'{x:.3f}' for x in evaluations[name].values())}")
    for name, run in other_runs:
        apart = max(abs(loss - reference[step]) for step, loss in run.items() if step in reference)
        print(f"{name} differs from {first} by at most {apart:.1e}")
    arguments.out.write_text(draw(losses, evaluations).to_svg("Losses of training runs"))
    print(f"wrote {arguments.out}")


def read_losses(run: Path, kind: str) -> dict[int, float]:
    """step → loss"""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[kind] for line in lines if kind in line}


def draw(losses: dict[str, dict[int, float]], evaluations: dict[str, dict[int, float]]) -> Drawing:
    """A line of each run's losses, and a dashed one of its evaluations."""
    last = max(max(run) for run in losses.values())
    largest = max(max(run.values()) for run in losses.values())

    def place(step: float, loss: float) -> tuple[float, float]:
        across, up = step / max(last, 1), loss / largest
        return LEFT_MARGIN + across * (WIDTH - LEFT_MARGIN - 12), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    shapes: list[Shape] = []
    for loss in tick_marks(largest, 8):
        shapes.append(Line([place(0, loss), place(last, loss)], LINE))
        shapes.append(Label(LEFT_MARGIN - 6, place(0, loss)[1] + 4, f"{loss:g}", fill=GREY, anchor="end"))
    for step in tick_marks(last, 10):
        shapes.append(Label(place(step, 0)[0], HEIGHT - BOTTOM + 16, f"{step:g}", fill=GREY, anchor="middle"))
    for index, (name, run) in enumerate(losses.items()):
        colour, width = COLOURS[index % len(COLOURS)], 4.0 if index == 0 else 1.2
        shapes.append(Line([place(*point) for point in run.items()], colour, width))
        if evaluations[name]:
            shapes.append(Line([place(*point) for point in evaluations[name].items()], colour, width, dashed=True))
        shapes.append(Line([(LEFT_MARGIN + 150 * index, 20), (LEFT_MARGIN + 150 * index + 22, 20)], colour, width))
        shapes.append(Label(LEFT_MARGIN + 150 * index + 28, 24, name))
    shapes.append(Label(WIDTH - 12, 24, "loss by step; dashed: on text that was held out", fill=GREY, anchor="end"))
    return Drawing(WIDTH, HEIGHT, shapes)


if __name__ == "__main__":
    main()
