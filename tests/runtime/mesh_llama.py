"""A small Llama over all dimensions by its own plan: what each rank runs, beside the model on the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from tests.runtime.meshes import Shape, near, rows_of, whole

WORDS, LENGTH, ROWS = 96, 16, 8


def build(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=WORDS,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def write(folder: Path, stages: int, tied: bool) -> str:
    captured = pipegraph.capture(build(tied), (), {"input_ids": torch.randint(WORDS, (2, LENGTH))})
    points = [f"model.layers.{4 // stages * index}" for index in range(1, stages)]
    return str(pipegraph.write_package(pipegraph.plan(captured, points=points), folder).path)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def train(rank: int, folder: str, shape: Shape, schedule: str, kernels: str, tied: bool) -> str:
    """Three steps of AdamW. Nothing is left to autograd."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    pipe = pipegraph.Pipeline(folder, schedule, 4, loss_fn=loss, mesh=mesh, kernels=kernels, strict=True, timeout=250)
    model = build(tied)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    ours, theirs = torch.optim.AdamW(pipe.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        tokens, target = (torch.randint(WORDS, (2 * ROWS, LENGTH), generator=generator) for _ in range(2))
        mine = rows_of(shape, (ROWS, ROWS), mesh)
        result = pipe.step(input_ids=tokens[mine], target=target[mine])
        value = loss(model(input_ids=tokens), target)
        value.backward()
        if result.loss is not None:
            near(result.loss, value.detach(), "loss")
        for name, parameter in pipe.named_parameters():
            near(whole(parameter.grad), parameters[name].grad, name)
        near(pipe.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(model.parameters(), 1.0), "norm")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in pipe.state_dict().items():
        if name in parameters:
            near(whole(tensor), parameters[name].detach(), name)
    return "equal"
