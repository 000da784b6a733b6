"""Plans of models with branches: stages side by side, beside stages of which each waits for the one before.

    python -m benchmarks.branches [--model transformers] [--ranks 8,16,32] [--rows 4]

Nothing runs: steps are predicted for H100, with as many microbatches as ranks. The models are like two of GraphPipe's
(Jeon et al., arXiv:2406.17145): four branches of eight Transformer layers, and seven branches of four linear layers,
joined by a few layers. The paper reports up to 1.6 times the speed of sequential pipelines in 1F1B, PipeDream's and
Piper's, on 32 V100. It measures, also varies the rows of a microbatch, and publishes no times of layers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipegraph.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipegraph.planner.cut_choice import CutChoice


class Branches(nn.Module):
    """Branches over inputs of their own, and layers that join them."""

    def __init__(self, branches: Sequence[nn.Module], join: nn.Module) -> None:
        super().__init__()
        self.branches, self.join = nn.ModuleList(branches), join

    def forward(self, *inputs: Tensor) -> Tensor:
        features = [branch(x) for branch, x in zip(self.branches, inputs, strict=True)]
        joined: Tensor = self.join(torch.cat(features, dim=-1))
        return joined


def transformers(rows: int, width: int = 1024, tokens: int = 256) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four branches of eight Transformer layers, and their inputs."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)

    branches = [nn.Sequential(*(layer() for _ in range(8))) for _ in range(4)]
    return Branches(branches, nn.Linear(4 * width, width)), tuple(torch.randn(rows, tokens, width) for _ in range(4))


def linear_layers(rows: int, width: int = 4096) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Seven branches of four linear layers, and their inputs."""

    def layers(first: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(first, width), *(part for _ in range(3) for part in (nn.ReLU(), nn.Linear(width, width)))
        )

    branches = [layers(width) for _ in range(7)]
    return Branches(branches, layers(7 * width)), tuple(torch.randn(256 * rows, width) for _ in range(7))


MODELS: Final = {"4 × 8 transformers": transformers, "7 × 4 linear layers": linear_layers}


class Way(NamedTuple):
    """A way to plan a model.

    Attributes:
        name: of the way.
        choice: its cuts and order.
    """

    name: str
    choice: CutChoice


def compare(model: nn.Module, inputs: tuple[Tensor, ...], ranks: int, microbatches: int) -> list[Way]:
    """Return the plans of a model: in sequence with 1F1B, side by side with 1F1B and in the order of branches, and the
    best one of all schedules."""
    import pipegraph
    from pipegraph.cost.hardware import Hardware
    from pipegraph.planner.comparison import candidates, compare_model
    from pipegraph.planner.cut_choice import choose_cuts, refine_cuts
    from pipegraph.planner.plan_options import PlanOptions

    captured = pipegraph.capture(model, inputs)
    options = PlanOptions(schedule="1f1b", microbatches=microbatches, hardware=Hardware.load("h100")).on_ranks(ranks)
    sequential = choose_cuts(options.price(captured, stages=ranks), options, ranks)
    side_by_side = refine_cuts(sequential.with_branches())
    ways = [Way("in sequence", sequential), Way("side by side", side_by_side)]
    ways += [Way("order of branches", order) for order in list(side_by_side.branch_orders())[:1]]
    plans = candidates(ranks, microbatches=[microbatches], recompute=["min-cut"])
    best = compare_model(captured, PlanOptions(hardware=options.hardware), ranks, plans, searches=True).best
    return [*ways, Way("best of all orders", best)]


def main(
    model: Annotated[str, typer.Option(help="A part of a model's name.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "8,16,32",
    rows: Annotated[int, typer.Option(help="Rows of a microbatch; 256 times as many of linear layers.")] = 4,
) -> None:
    """Compare stages side by side with stages in sequence."""
    table = Table("model", "ranks", "plan", "schedule", "step", "in sequence ÷ it", "memory")
    for name, build_model in MODELS.items():
        for count in map(int, ranks.split(",")) if model in name else ():
            start = time.perf_counter()
            ways = compare(*build_model(rows), count, count)
            for way, choice in ways:
                ratio = f"{ways[0].choice.value / choice.value:.2f}"
                figures = format_seconds(choice.value), ratio, format_bytes(choice.peak)
                table.add_row(name, str(count), way, choice.schedule.name, *figures)
            print(f"{name} on {count} ranks took {time.perf_counter() - start:.0f} s", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
