"""A small model in packages of any number of stages, and what ranks run to save and load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import init_device_mesh
from torch.optim.lr_scheduler import StepLR

from pipegraph.package import Package
from pipegraph.runtime.checkpoint.loading import Checkpoint
from pipegraph.runtime.pipeline import Pipeline
from tests.runtime.packages import Sketch, Stage, loss

WIDTH, WORDS, LENGTH, LAYERS = 8, 6, 4, 8
FROZEN = "layers.1.0.weight"


def perceptrons(
    stages: int,
    width: int = WIDTH,
    tied: bool = True,
    dropout: float = 0.0,
    shared: bool = False,
    first_shared: int = 0,
) -> Sketch:
    """Eight layers with the same names however they are cut. Stages start as nobody else's: seeds are their numbers.

    With `shared` one more layer is called after every two of them, in all stages from `first_shared` on.
    """
    per_stage = LAYERS // stages
    layer = f"nn.Sequential(nn.Linear({width}, {width}), nn.Tanh(), nn.Dropout({dropout}))"
    wide = ("float32", ("batch", LENGTH, width), True)
    values: dict[str, Any] = {"tokens": ("int64", ("batch", LENGTH), False)}
    parts = []
    for index in range(stages):
        indices = range(index * per_stage, (index + 1) * per_stage)
        init = f"self.layers = nn.ModuleDict({{str(i): {layer} for i in range({indices.start}, {indices.stop})}})\n"
        source = "tokens" if index == 0 else f"h{index - 1}"
        body = "x = self.embed(tokens)\n" if index == 0 else f"x = {source}\n"
        body += "for name, layer in self.layers.items():\n    x = x + layer(x)\n"
        if shared and index >= first_shared:
            init += f"self.shared = nn.Linear({width}, {width})\n"
            body += "    if int(name) % 2:\n        x = x + torch.tanh(self.shared(x))\n"
        init += f"self.embed = nn.Embedding({WORDS}, {width})\n" if index == 0 else ""
        if index == stages - 1:
            init += f"self.norm = nn.BatchNorm1d({LENGTH})\nself.head = nn.Linear({width}, {WORDS}, bias=False)\n"
            parts.append(Stage(source, "logits", init, f"{body}return self.head(self.norm(x))"))
        else:
            parts.append(Stage(source, f"h{index}", init, f"{body}return x"))
            values[f"h{index}"] = wide
    values["logits"] = ("float32", ("batch", LENGTH, WORDS), True)
    return Sketch(tuple(parts), values, "logits", (("embed.weight", "head.weight"),) if tied else ())


class Position:
    """A place in the data, as a loader has it."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class MasterSGD(torch.optim.SGD):
    """Keeps a float32 copy of each parameter, and counts its steps in Python."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    master = state.setdefault("master", parameter.detach().float())
                    state["steps"] = state.get("steps", 0) + 1
                    master.sub_(parameter.grad.float(), alpha=group["lr"])
                    parameter.data.copy_(master)


def by_depth(pipe: Pipeline, rates: list[float], keeps_empty: bool = True) -> torch.optim.Optimizer:
    """An optimizer with a group for the earlier layers, for the later ones, and for the rest."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": rate} for rate in rates]
    for name, parameter in pipe.named_parameters():
        kind, _, suffix = name.partition(".")
        depth = 2 if kind != "layers" else int(suffix.split(".")[0]) >= LAYERS // 2
        groups[depth]["params"].append(parameter)
    return torch.optim.AdamW([group for group in groups if group["params"] or keeps_empty])


class Run:
    """A training run: some parameters decay, one is frozen, and the learning rate falls."""

    def __init__(self, pipe: Pipeline, batch: int, rows: slice = slice(None)) -> None:
        self.pipe, self.batch, self.rows = pipe, batch, rows
        decayed, undecayed = [], []
        for name, parameter in self.pipe.named_parameters():
            parameter.requires_grad_(name != FROZEN)
            (decayed if parameter.dim() > 1 else undecayed).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.05
        )
        self.scheduler = StepLR(self.optimizer, 3, 0.5)

    @property
    def extra(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def train(self, first: int, last: int) -> list[float | None]:
        """The losses of these steps; None on a rank without the loss."""
        losses = []
        for step in range(first, last):
            tokens, target = self.batch_of(step)
            self.optimizer.zero_grad()
            step_loss = self.pipe.step(tokens[self.rows], target=target[self.rows]).loss
            self.optimizer.step()
            self.scheduler.step()
            losses.append(None if step_loss is None else float(step_loss))
        return losses

    def train_in_halves(self, first: int, last: int) -> list[float]:
        """`train` in one process, with the gradients of each half of the batch added up by themselves first."""
        losses, parameters = [], list(self.pipe.parameters())
        for step in range(first, last):
            halves, microbatch_losses = [], []
            for tokens, target in zip(*(tensor.chunk(2) for tensor in self.batch_of(step)), strict=True):
                self.optimizer.zero_grad()
                result = self.pipe.step(tokens, target=target, microbatches=2, return_losses=True)
                halves.append([parameter.grad for parameter in parameters])
                microbatch_losses.append(result.losses)
            for parameter, grad_a, grad_b in zip(parameters, *halves, strict=True):
                parameter.grad = None if grad_a is None or grad_b is None else (grad_a + grad_b) / 2
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(torch.cat(microbatch_losses).double().mean().float()))
        return losses

    def batch_of(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens and the target of a step, of all ranks."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(WORDS, (self.batch, LENGTH), generator=generator), torch.randn(
            self.batch, generator=generator
        )

    def save(self, folder: str | Path, step: int, **options: Any) -> Path:
        return self.pipe.save(folder, self.optimizer, step=step, extra=self.extra, **options)

    def load(self, folder: str | Path) -> Checkpoint:
        return self.pipe.load(folder, self.optimizer, self.extra)


def start(
    package: str | Path, schedule: str = "1f1b", shape: dict[str, int] | None = None, batch: int = 8, **options: Any
) -> Run:
    """A run in this process, or over a mesh of real ones; each data-parallel rank takes its rows."""
    options = {"kernels": "eager", "loss_fn": loss, "microbatches": 4, **options}
    if not shape:
        return Run(Pipeline(Package.open(package), schedule, **options), batch)
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    count, place = 1, 0
    for name in ("dp_replicate", "dp_shard"):
        if name in shape:
            count, place = count * shape[name], place * shape[name] + mesh.get_local_rank(name)
    rows = batch // count
    run = Pipeline(Package.open(package), schedule, mesh=mesh, **{**options, "microbatches": 4 // count})
    return Run(run, batch, slice(place * rows, (place + 1) * rows))
