"""What a model does in addition to its operations: `python -m benchmarks.audit`.

Each kind of `tests.graph.audit.models` is done in each place: in the model's own forward, in that of a child, in a
function, in training or in evaluation alone, and some of them in the loss. Three steps of a pipeline are compared with
the model's. For each kind it prints whether it is refused, right, or silently wrong; and the count of each.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import PipegraphError
from tests.graph.audit import models

X, TARGET = torch.linspace(-1, 1, 32).reshape(4, 8), torch.ones(4, 8)
LOSSES = ("counter", "appends", "sets_item", "seeds", "seeds_generator", "draws", "nothing")


def loss_of(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that does this kind, with its own state."""
    state = models.State()
    do = getattr(state, kind)
    return lambda output, target: (do(output) - target).square().mean()


def outcome(model: nn.Module, reference: nn.Module, kernels: str, losses: tuple[Callable[..., Tensor], ...]) -> str:
    """Whether three steps of a pipeline are those of the model: "refused", "right" or "silent".

    Args:
        reference: an equal model, which is trained in the same way.
        losses: of the pipeline, and of the model.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            captured = pipegraph.capture(model, (X,))
            package = pipegraph.write_package(pipegraph.plan(captured, points=["last"]), Path(folder, "package"))
            pipe = pipegraph.Pipeline(package, kernels=kernels, loss_fn=losses[0], loss_over="microbatch")
        except PipegraphError:
            return "refused"
        optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, reference)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.manual_seed(step)
            loss = pipe.step(X, target=TARGET).loss
            torch.manual_seed(step)
            expected = losses[1](reference(X), TARGET)
            expected.backward()
            gradients = {
                name: parameter.grad for stage in pipe.stages.values() for name, parameter in stage.named_parameters()
            }
            matches = [torch.allclose(loss, expected.detach(), atol=1e-6)]
            matches += [
                torch.allclose(gradients[name], parameter.grad, atol=1e-6)
                for name, parameter in reference.named_parameters()
                if parameter.grad is not None
            ]
            if not all(matches):
                return "silent"
            for optimizer in optimizers:
                optimizer.step()
        for mode in (False, True):
            reference.train(mode)
            for stage in pipe.stages.values():
                stage.train(mode)
            torch.manual_seed(9)
            output = pipe.eval(X)
            torch.manual_seed(9)
            if not torch.allclose(output, reference(X).detach(), atol=1e-6):
                return "silent"
    return "right"


def main() -> None:
    """Print a row for each kind."""
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    begin = time.perf_counter()
    kernels = sys.argv[1:] or ["autograd", "eager"]
    table = Table("kind", *models.PLACES, "loss")
    count: Counter[str] = Counter()
    for kind in (*models.REFUSED, *models.RIGHT):
        row = []
        for place in (*models.PLACES, "loss"):
            if place == "loss" and kind not in LOSSES:
                row.append("")
                continue
            outcomes = []
            for name in kernels:
                build = (kind, place) if place != "loss" else ("nothing", "forward")
                pair = []
                for _ in range(2):
                    torch.manual_seed(0)
                    pair.append(models.Model(*build))
                losses = tuple(loss_of(kind if place == "loss" else "nothing") for _ in range(2))
                outcomes.append(outcome(*pair, name, losses))
                torch.set_grad_enabled(True)
            count.update(outcomes)
            row.append(" ".join(dict.fromkeys(outcomes)))
        table.add_row(kind, *row)
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{count['refused']} refused, {count['right']} right, {count['silent']} silent, with kernels "
        f"{' and '.join(kernels)}, in {time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
