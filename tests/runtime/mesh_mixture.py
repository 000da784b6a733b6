"""A model that is hard to pipeline, over a mesh: each rank is compared with the model on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import local
from tests.runtime.meshes import Shape, full_tensor, near, rows_of

WORDS, WIDTH, LAYERS = 12, 8, 4
SCALE = 8.0
STEPS = ((8, 0), (6, 4), (5, 0))
"""(length of the sequence, rows beyond those of a rank)"""
INFINITE = 1
"""the step in which a gradient is infinite on one rank"""
TP_PLAN = {
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mixture(nn.Module):
    """A tied head, a skip over all layers, a frozen layer, and a frozen bias in another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)
        self.layers[2].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + first))


class Experts(nn.Module):
    """Every token goes to all of them: what counts is how their parameters are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 4 * WIDTH, WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(3, WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        gate, up = torch.einsum("bth,eih->btei", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("btei,ehi->bteh", F.silu(gate) * up * share[..., None], self.down_proj).sum(2)


class TransposedExperts(nn.Module):
    """The same with the dimensions of parameters the other way round, as Llama 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, WIDTH, 4 * WIDTH) / 4)
        self.down_proj = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        gate, up = torch.einsum("bth,ehi->btei", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("btei,eih->bteh", F.silu(gate) * up * share[..., None], self.down_proj).sum(2)


class ExpertLayer(nn.Module):
    def __init__(self, bias: bool, experts: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3), experts()
        self.fused, self.out = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate, up = self.fused(h).chunk(2, dim=-1)
        return x + self.experts(h, self.router(h).softmax(-1)) + self.out(F.silu(gate) * up)


class ScaledEmbedding(nn.Module):
    """An embedding of the model's own, with a part that has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(F.embedding(tokens, self.weight) * self.scale)


class ExpertModel(nn.Module):
    """Packed projections, and experts."""

    def __init__(self, bias: bool = True, experts: type[nn.Module] = Experts, scaled: bool = False) -> None:
        super().__init__()
        self.embed = ScaledEmbedding() if scaled else nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(ExpertLayer(bias, experts) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class SlopedLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.slope, self.down = nn.Linear(WIDTH, WIDTH), Slope(), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.slope(self.up(x))))


class SlopedModel(nn.Module):
    """A parameter that every rank has whole, and uses for its own part of the features."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(SlopedLayer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    forward = ExpertModel.forward


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixture": Mixture,
    "experts": ExpertModel,
    "slopes": SlopedModel,
    "slopes and dropout": partial(SlopedModel, 0.5),
    "experts without bias": partial(ExpertModel, bias=False),
    "transposed experts": partial(ExpertModel, experts=TransposedExperts, scaled=True),
}
EXPERT_PLAN = {
    "layers.*.experts.gate_up_proj": "packed_colwise",
    "layers.*.experts.down_proj": "rowwise",
    "layers.*.experts": "moe_tp_experts",
    "layers.*.fused": "packed_colwise",
    "layers.*.out": "rowwise",
}
TRANSPOSED_PLAN = {
    **EXPERT_PLAN,
    "layers.*.experts.gate_up_proj": "packed_rowwise",
    "layers.*.experts.down_proj": "colwise",
    "embed": "embedding_rowwise",
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def write(folder: Path, model: str, stages: int) -> str:
    module = build(model)
    captured = pipegraph.capture(module, (torch.zeros(2, 8, dtype=torch.int64),))
    layers = len(list(module.get_submodule("layers").children()))
    points = [f"layers.{layers // stages * index}" for index in range(1, stages)]
    return str(pipegraph.write_package(pipegraph.plan(captured, points=points), folder).path)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train_each(rank: int, cases: list[tuple[Any, ...]]) -> list[list[float] | str]:
    """What `train` returns of all cases, one after the other in the same processes, or how it is refused."""
    outcomes: list[list[float] | str] = []
    for case in cases:
        try:
            outcomes.append(train(rank, *case))
        except PipegraphError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
        except BaseException as error:
            error.add_note(f"case: {case[1:]}")
            raise
    return outcomes


def train(
    rank: int,
    folder: str,
    name: str,
    shape: Shape,
    schedule: str,
    rows: tuple[int, ...],
    failing: int,
    options: dict[str, Any],
) -> list[float]:
    """Steps of several sizes, clipped, of which one is left out on every rank. The scale after each.

    Nothing is left to autograd. `rows` has those of each data-parallel rank.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    options = {"kernels": "eager", "timeout": 100, "strict": True, **options}
    pipe = pipegraph.Pipeline(
        folder, schedule, 4, loss_fn=lambda *arguments: scaler.scale(loss(*arguments)), mesh=mesh, **options
    )
    model = build(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    how: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    pipe_adam = torch.optim.AdamW([parameter for parameter in pipe.parameters() if parameter.requires_grad], **how)
    model_adam = torch.optim.AdamW(trained, **how)
    generator, scales = torch.Generator().manual_seed(7), []
    for number, (length, extra_rows) in enumerate(STEPS):
        batch_rows = tuple(count + extra_rows for count in rows)
        tokens, target = (torch.randint(WORDS, (sum(batch_rows), length), generator=generator) for _ in range(2))
        local_rows = rows_of(shape, batch_rows, mesh)
        result, scale = pipe.step(tokens[local_rows], target=target[local_rows]), scaler.get_scale()
        value = loss(model(tokens), target)
        value.backward()
        near(result.loss / scale, value.detach(), "loss")
        if number == INFINITE and rank == failing:
            local(next(weight for weight in pipe.parameters() if weight.grad is not None).grad).fill_(torch.inf)
        scaler.unscale_(pipe_adam)
        if number != INFINITE:
            for name, parameter in pipe.named_parameters():
                if not parameters[name].requires_grad:
                    assert parameter.grad is None, name
                    continue
                near(full_tensor(parameter.grad), parameters[name].grad, f"gradient of {name} in step {number}")
            near(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(trained, 0.1), "norm")
            model_adam.step()
        scaler.step(pipe_adam)
        scaler.update()
        scales.append(scaler.get_scale())
        for optimizer in (pipe_adam, model_adam):
            optimizer.zero_grad()
    for name, tensor in pipe.state_dict().items():
        near(full_tensor(tensor), parameters[name].detach(), name)
    return scales


def save_on_a_mesh(rank: int, package: str, shape: Shape, folder: str, save_folder: str) -> str:
    """What a mesh saves of what it has read from a folder, and reads again. Where it is."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    schedule = "1f1b" if shape["pp"] == 2 else "interleaved-1f1b"
    pipe = pipegraph.Pipeline(package, schedule, 2, loss, kernels="eager", mesh=mesh, tp_plan=EXPERT_PLAN)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.load(folder, optimizer)
    place = pipe.save(save_folder, optimizer, step=1, background=True)
    pipe.wait_for_save()
    read = {name: full_tensor(tensor).clone() for name, tensor in pipe.state_dict().items()}
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    pipe.load(save_folder, optimizer)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(full_tensor(tensor), read[name]), name
    return str(place)
