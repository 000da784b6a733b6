"""Do transformers' plans of tensor parallelism train what the model trains?

`python -m benchmarks.tp_plans` makes a small version of every causal language model for which transformers has a plan,
splits it in two, trains it for two steps under `zb-h1` on four processes, pp 2 × tp 2, and compares it with the unsplit
model.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, multiprocessing, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor

import pipegraph

WORDS, LENGTH, ROWS, MICROBATCHES = 96, 16, 8, 4
MESH = {"pp": 2, "tp": 2}
MOST_PARAMETERS = 20_000_000
CLOSE = 2e-5
"""What a gradient may differ by, of its largest number or a thousandth of the largest of all."""

SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "vocab_size_per_layer_input": WORDS,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "use_cache": False,
    "tie_word_embeddings": False,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_kv_shared_layers": 0},
    # nothing random, and no loss of a router's own
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "hidden_dropout_prob", "router_aux_loss_coef"), 0.0),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group"), 2),
    **dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace", "decoder_sparse_step"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    # a latent of keys and values, and its index
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"index_n_heads": 4, "index_head_dim": 8, "index_topk": 4},
    # state spaces and linear attention
    **{"mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 4},
    **{"mamba_n_groups": 1, "mamba_expand": 2, "mamba_dt_rank": 4, "ssm_state_size": 4, "n_groups": 2, "chunk_size": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""Attribute of a configuration → what it is here, if the architecture has it."""


@dataclass(frozen=True)
class SmallModel:
    """A small model that was split."""

    name: str
    config: Any
    folder: str


def architectures() -> list[str]:
    """The types of causal language models for which transformers has a plan."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)
    return [name for name in names if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)]


def small_config(name: str) -> Any:
    """A small configuration of an architecture. Raises ValueError for one with sub-configurations."""
    from transformers import CONFIG_MAPPING, AutoConfig

    default = CONFIG_MAPPING[name]()
    if default.sub_configs:
        raise ValueError(f"it has the sub-configurations {', '.join(default.sub_configs)}")
    settings = default.to_dict()
    chosen = {key: value for key, value in SMALL.items() if key in settings and not isinstance(settings[key], list)}
    if "qk_rope_head_dim" in settings:
        chosen |= {"num_key_value_heads": 4, **({"head_dim": 4} if "head_dim" in settings else {})}
    for key in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers"):
        if isinstance(settings.get(key), list):
            chosen[key] = (list(dict.fromkeys(settings[key])) * 4)[:4]
    return AutoConfig.for_model(name, **chosen)


def build(config: Any) -> nn.Module:
    """A model with random weights, the same in every process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def make(name: str, folder: Path) -> SmallModel:
    """Split a small version in two. Raises what transformers and pipegraph raise."""
    config = small_config(name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its small version has {count:,} parameters")
    model = build(config)
    layers = next(
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == 4
    )
    captured = pipegraph.capture(model, (), {"input_ids": torch.randint(WORDS, (2, LENGTH))})
    package = pipegraph.write_package(pipegraph.plan(captured, points=[f"{layers}.2"]), folder / name)
    return SmallModel(name, config, str(package.path))


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


@dataclass(frozen=True, order=True)
class Worst:
    """The largest relative difference of two steps' losses and gradients on a rank.

    Attributes:
        gradient_name: the name of the gradient.
        rounding: the largest difference of the unsplit model from itself in float64.
    """

    difference: float
    gradient_name: str
    rounding: float

    @property
    def verdict(self) -> str:
        """In a word. Ranks add up in another order, which a model with large rounding errors has to allow for."""
        if self.difference == float("inf"):
            return "refused"
        return "equal" if self.difference < max(CLOSE, 20 * self.rounding) else "differs"


def worst_difference(small_model: SmallModel, mesh: Any) -> Worst:
    """Train the pipeline and the unsplit model for two steps, and compare them."""
    model = build(small_model.config)
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # products of groups are of float32 and less
    pipe = pipegraph.Pipeline(
        small_model.folder, "zb-h1", MICROBATCHES, loss_fn=loss, mesh=mesh, kernels="eager", strict=True, timeout=60
    )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    generator = torch.Generator().manual_seed(3)
    differences, roundings = [(0.0, "")], [0.0]
    for _ in range(2):
        tokens, target = (torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
        result = pipe.step(input_ids=tokens, target=target)
        expected = loss(model(input_ids=tokens), target)
        expected.backward()
        loss(exact(input_ids=tokens), target).backward()
        if result.loss is not None:
            differences.append((abs(result.loss.item() / expected.item() - 1), "the loss"))
        largest = max(float(weight.grad.abs().max()) for weight in parameters.values() if weight.grad is not None)
        for name, parameter in pipe.named_parameters():
            gradient, reference = (
                _full_gradient(parameter.grad, parameter),
                _full_gradient(parameters[name].grad, parameters[name]),
            )
            scale = max(float(reference.abs().max()), largest / 1000)
            differences.append((float((gradient - reference).abs().max()) / scale, name))
            in_double = _full_gradient(exact.get_parameter(name).grad, parameters[name])
            roundings.append(float((in_double - reference).abs().max()) / scale)
            parameter.grad = None
        model.zero_grad()
        exact.zero_grad()
    return Worst(*max(differences), max(roundings))


def _full_gradient(gradient: Any, parameter: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros(parameter.shape)
    full_gradient: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full_gradient


def train_each(rank: int, port: int, every: list[SmallModel], results: Any) -> None:
    """Train all of them in a process of the mesh. Rank 0 puts a line for each into the queue."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    with _quiet():
        for small_model in every:
            try:
                worst = worst_difference(small_model, mesh)
            except Exception as error:  # the others continue
                worst = Worst(float("inf"), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 0.0)
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, worst)
            if rank == 0:
                results.put(max(gathered))
    dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Architectures whose name contains this.")] = None,
) -> None:
    """Train small versions of the architectures on a mesh, and compare them with the unsplit models.

    Exit code 1 if one differs.
    """
    names = [name for name in architectures() if not only or any(part in name for part in only)]
    every, verdicts = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                with _quiet():
                    every.append(make(name, Path(folder)))
            except Exception as error:  # what transformers and torch raise for such a configuration
                typer.echo(f"{name}: not tried: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        processes = multiprocessing.start_processes(train_each, (port, every, results), nprocs=4, join=False)
        assert processes is not None
        for small_model in every:
            while results.empty():
                processes.join(timeout=1)
            worst: Worst = results.get()
            verdicts[worst.verdict] += 1
            figures = (
                "" if worst.verdict == "refused" else f"{worst.difference:.1e} (rounding {worst.rounding:.1e}) of "
            )
            typer.echo(f"{small_model.name}: {worst.verdict}, {figures}{worst.gradient_name}")
        while not processes.join():
            pass
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    typer.echo(f"{len(names)} have a plan, {len(every)} were tried: {counts}.")
    raise typer.Exit(verdicts["differs"] > 0)


if __name__ == "__main__":
    typer.run(main)
