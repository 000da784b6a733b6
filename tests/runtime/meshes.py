"""Pipelines over meshes: the model, and functions that compare each rank with the unsplit model on the whole batch."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.testing import assert_close

from pipegraph.errors import PipegraphError
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.torch_private.dtensor import packed_place
from tests.runtime.packages import Reference, Sketch, Stage, loss

WIDTH, HIDDEN, WORDS, LENGTH = 8, 16, 6, 4

TP_PLAN = {
    "layers*.*.0": "colwise",
    "layers*.*.2": "rowwise",
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
}

Shape = dict[str, int]
"""dimension → how many ranks"""


def perceptrons(stages: int, tied: bool = True, shared: bool = False) -> Sketch:
    """Stages of two residual layers each, after an embedding and before a head, which may have the same weight.

    With `shared` all stages end with the same layer.
    """
    parts, wide = [], ("float32", ("batch", LENGTH, WIDTH), True)
    values: dict[str, tuple[str, tuple[int | str, ...], bool]] = {"tokens": ("int64", ("batch", LENGTH), False)}
    for index in range(stages):
        names = [f"layers{index}", f"norms{index}"]
        init = (
            f"self.{names[1]} = nn.ModuleList(nn.LayerNorm({WIDTH}) for _ in range(2))\n"
            f"self.{names[0]} = nn.ModuleList(\n"
            f"    nn.Sequential(nn.Linear({WIDTH}, {HIDDEN}), nn.Tanh(), nn.Linear({HIDDEN}, {WIDTH})) "
            f"for _ in range(2)\n)\n"
        )
        source = "tokens" if index == 0 else f"h{index - 1}"
        first = "x = self.embed(tokens)\n" if index == 0 else f"x = {source}\n"
        body = f"{first}for norm, layer in zip(self.{names[1]}, self.{names[0]}):\n    x = x + layer(norm(x))\n"
        if shared:
            init += f"self.shared = nn.Linear({WIDTH}, {WIDTH})\n"
            body += "x = x + torch.tanh(self.shared(x))\n"
        init += f"self.embed = nn.Embedding({WORDS}, {WIDTH})\n" if index == 0 else ""
        if index == stages - 1:
            init += f"self.head = nn.Linear({WIDTH}, {WORDS}, bias=False)\n"
            parts.append(Stage(source, "logits", init, f"{body}return self.head(x)"))
        else:
            parts.append(Stage(source, f"h{index}", init, f"{body}return x"))
            values[f"h{index}"] = wide
    values["logits"] = ("float32", ("batch", LENGTH, WORDS), True)
    return Sketch(tuple(parts), values, "logits", (("embed.weight", "head.weight"),) if tied else ())


def sequence_plan() -> dict[str, Any]:
    """Norms and residuals on a part of the sequence, also between stages."""
    part, all_of_it = Shard(1), Replicate()
    return {
        "embed": RowwiseParallel(input_layouts=all_of_it, output_layouts=part),
        "norms*.*": "sequence_parallel",
        "layers*.*": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(all_of_it,)),
        "layers*.*.0": "colwise",
        "layers*.*.2": RowwiseParallel(output_layouts=part),
        "head": ColwiseParallel(input_layouts=part, output_layouts=all_of_it),
    }


def last_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


def metered_loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    value = loss(output, target)
    return value, {"largest": output.detach().flatten(1).amax(1).mean()}


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(-1, 1, 1)).square().sum()


def full_tensor(tensor: Any) -> Tensor:
    """Of all ranks together."""
    place = packed_place(tensor)
    if place is None:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    # Torch 2.11 cannot put packed ones together. The parts become a dimension of their own, which nobody divides.
    shards = [Shard(cut.dim + (cut.dim >= place.dim)) if hasattr(cut, "dim") else cut for cut in tensor.placements]
    apart = tensor.detach().to_local().unflatten(place.dim, (place.parts, -1))
    return DTensor.from_local(apart, tensor.device_mesh, shards).full_tensor().flatten(place.dim, place.dim + 1)


def rows_of(shape: Shape, rows: tuple[int, ...], mesh: Any) -> slice:
    """The rows of the whole batch that this rank takes."""
    place = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in shape:
            place = place * shape[name] + mesh.get_local_rank(name)
    start = sum(rows[:place])
    return slice(start, start + rows[place])


def make(folder: str, shape: Shape, schedule: str, microbatches: int = 4, **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline over a new mesh, and the mesh."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    options = {"loss_fn": metered_loss, "kernels": "eager", "timeout": 60, **options}
    if "shard_by_hand" in options:
        options["parallelize_fn"] = partial(shard_by_hand, mesh[options.pop("shard_by_hand")])
    return Pipeline(Package.open(folder), schedule, microbatches, mesh=mesh, **options), mesh


def train(
    rank: int, folder: str, shape: Shape, schedule: str, rows: tuple[int, ...], options: dict[str, Any]
) -> list[str]:
    """Compare three steps of AdamW, the second of two accumulated batches, with the unsplit model. Return warnings.

    `rows` has the number of rows of each data-parallel rank.
    """
    if options.get("tp_plan") == "sequence":
        options["tp_plan"] = sequence_plan()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe, mesh = make(folder, shape, schedule, **options)
        if "norms*.*" in options.get("tp_plan", {}):  # half of the sequence crosses
            assert pipe.package.manifest.values["h0"].shape == ("batch", LENGTH // 2, WIDTH)
        local_rows = rows_of(shape, rows, mesh)
        assert_trained(pipe, local_rows, sum(rows), options.get("loss_fn", metered_loss))
    return [str(warning.message) for warning in caught if "traced" in str(warning.message)]


def shard_by_hand(mesh: Any, stage: nn.Module) -> None:
    """The first layer by itself, then all that is left but for the norms, which every rank has whole."""
    ignored = {parameter for name, parameter in stage.named_parameters() if "norms" in name}
    layer = next(module for module in stage.modules() if isinstance(module, nn.Sequential))
    fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh, ignored_params=ignored)


def train_each(rank: int, cases: list[tuple[Any, ...]]) -> list[str]:
    """What `train` returns of all cases, one after the other in the same processes."""
    messages = []
    for case in cases:
        try:
            messages += train(rank, *case)
        except BaseException as error:
            error.add_note(f"case: {case[1:]}")
            raise
    return messages


def assert_trained(pipe: Pipeline, local_rows: slice, rows: int, loss_fn: Callable[..., Any]) -> None:
    reference = Reference(pipe.package)
    parameters = list({id(parameter): parameter for parameter in reference.parameters.values()}.values())
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    pipe_adam, model_adam = torch.optim.AdamW(pipe.parameters(), **options), torch.optim.AdamW(parameters, **options)
    for number in range(3):
        for part in range(1 + (number == 1)):
            generator = torch.Generator().manual_seed(10 * number + part)
            tokens = torch.randint(WORDS, (rows, LENGTH), generator=generator)
            target = torch.randn(rows, generator=generator)
            result = pipe.step(tokens[local_rows], target=target[local_rows], return_outputs=True)
            outputs = reference({"tokens": tokens})
            returned = loss_fn(outputs, target)
            value, metrics = returned if isinstance(returned, tuple) else (returned, {})
            value.backward()
            near(result.loss, value.detach(), "loss")
            if len(reference.stages) - 1 in pipe.stages:
                near(result.outputs, outputs[local_rows].detach(), "outputs")
                for name, metric in metrics.items():
                    near(result.metrics[name], metric, name)
                near(pipe_loss(pipe, tokens[local_rows], target[local_rows]), value.detach(), "evaluation")
            else:
                pipe_loss(pipe, tokens[local_rows], target[local_rows])
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None, name
            assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor), name
            near(full_tensor(parameter.grad), reference.parameters[name].grad, f"gradient of {name}")
        near(pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(parameters, 0.1), "norm")
        for optimizer in (pipe_adam, model_adam):
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in pipe.state_dict().items():
        near(full_tensor(tensor), reference.parameters[name].detach(), name)


def pipe_loss(pipe: Pipeline, tokens: Tensor, target: Tensor) -> Any:
    return pipe.evaluate(tokens, target=target).loss


def near(actual: Any, expected: Any, name: str) -> None:
    """Equal to a millionth of the largest."""
    near_to(actual, expected, name, 1e-6)


def near_to(actual: Any, expected: Any, name: str, tolerance: float) -> None:
    """Equal to this part of the largest."""
    most = tolerance * max(1.0, float(expected.abs().max()))
    assert_close(actual, expected, rtol=tolerance, atol=most, msg=lambda m: f"{name}: {m}")


def fail(rank: int, folder: str, shape: Shape, failing: int, how: str, options: dict[str, Any]) -> tuple[str, float]:
    """After a good step a rank fails, in an action or in its data. What this rank says, and after how long.

    Every process stays alive until all have noticed.
    """
    pipe, _ = make(folder, shape, "1f1b", **options)
    tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
    pipe.step(tokens, target=target)

    def break_down(*_: Any) -> None:
        raise ValueError("broken on purpose")

    if rank == failing and how == "action":
        next(iter(pipe.stages.values())).register_forward_pre_hook(break_down)
    started = time.monotonic()
    outcome = "nothing"
    try:
        for _ in range(3):
            pipe.step(tokens[:, :-1] if rank == failing and how == "batch" else tokens, target=target)
    except PipegraphError as error:
        outcome = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    Path(folder, f"noticed-{how}-{rank}").touch()
    deadline = time.monotonic() + 15
    while len(list(Path(folder).glob(f"noticed-{how}-*"))) < pipe_size(shape) and time.monotonic() < deadline:
        time.sleep(0.05)
    return outcome, seconds


def pipe_size(shape: Shape) -> int:
    return math.prod(shape.values())


def start_and_state(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Replicas with other weights and buffers, which train a module of the loss. What is where after a step."""
    scale = nn.Linear(1, 1, bias=False)
    nn.init.constant_(scale.weight, float(rank + 1))

    def change(stage: nn.Module) -> None:
        stage.register_buffer("flags", torch.tensor([rank == 0, False, True]))
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.add_(rank)

    pipe, _ = make(
        folder,
        {"dp_replicate": 2},
        "1f1b",
        parallelize_fn=change,
        loss_fn=lambda output, target: loss(scale(output.flatten().unsqueeze(1)), target.sum()),
        loss_over="microbatch",  # a sum over rows is compared with the sum of the target
    )
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.stages[0].flags.copy_(torch.tensor([False, rank == 0, True]))
    pipe.step(torch.full((8, LENGTH), rank), target=torch.ones(8))
    return state, {"scale": scale.weight.grad, "start": scale.weight.detach(), "flags": pipe.stages[0].flags}


def mixed_precision(rank: int, folder: str) -> str:
    """In bfloat16, with gradients that are added up in float32: what crosses, and what is trained."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shape = {"pp": 2, "dp_shard": 2}
    shard_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))["dp_shard"]

    def by_hand(stage: nn.Module) -> None:
        fully_shard(stage, mesh=shard_mesh, mp_policy=policy)

    for options in ({"fsdp": {"mp_policy": policy}}, {"parallelize_fn": by_hand}):
        assert_near_in_bfloat16(*make(folder, shape, "zb-h1", strict=True, **options))
    return "near"


def assert_near_in_bfloat16(pipe: Pipeline, mesh: Any) -> None:
    assert {value.dtype for value in pipe.package.manifest.values.values()} == {"int64", "bfloat16"}
    tokens = torch.randint(WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    target = torch.randn(16, generator=torch.Generator().manual_seed(1))
    local_rows = rows_of({"dp_shard": 2}, (8, 8), mesh)
    result = pipe.step(tokens[local_rows], target=target[local_rows], return_outputs=True)
    reference = Reference(pipe.package)
    expected = loss(reference({"tokens": tokens}), target)
    expected.backward()
    assert_close(result.loss.float(), expected.detach(), rtol=2e-2, atol=2e-2)
    assert result.outputs is None or result.outputs.dtype == torch.bfloat16
    for name, parameter in pipe.named_parameters():
        gradient = full_tensor(parameter.grad)
        assert parameter.dtype == gradient.dtype == torch.float32
        assert_close(gradient, reference.parameters[name].grad, rtol=0.1, atol=0.02, msg=name)
        assert not torch.equal(gradient, gradient.to(torch.bfloat16).float()) or gradient.numel() < 9, name


def load_and_save(rank: int, folder: str, shape: Shape, plan: Any) -> str:
    """The state of the whole model is taken over, and comes back."""
    pipe, _ = make(folder, shape, "1f1b", tp_plan=plan)
    doubled = {name: 2 * parameter.detach() for name, parameter in Reference(pipe.package).parameters.items()}
    pipe.load_state_dict(doubled)
    for name, tensor in pipe.state_dict().items():
        assert_close(full_tensor(tensor), doubled[name], msg=name)
    tokens, target = torch.zeros(8, LENGTH, dtype=torch.int64), torch.zeros(8)
    doubled_loss = pipe.evaluate(tokens, target=target).loss
    pipe.load_state_dict({name: tensor / 2 for name, tensor in doubled.items()})
    restored_loss = pipe.evaluate(tokens, target=target).loss
    assert doubled_loss is None or abs(doubled_loss - restored_loss) > 1e-3
    dist.destroy_process_group()  # as scripts do before the pipeline ends
    pipe._guard.close()
    return "equal"
