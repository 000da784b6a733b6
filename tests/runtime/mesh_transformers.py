"""Small models of transformers over meshes by their own plans: each rank is compared with the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import pipegraph
from tests.runtime.meshes import Shape, full_tensor, near_to, rows_of

WORDS, LENGTH, ROWS = 96, 16, 8
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": WORDS,
    "use_cache": False,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "tie_word_embeddings": False},
    "llama, tied": {**SMALL, "tie_word_embeddings": True},
    "mixtral": {**SMALL, **EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {
        **SMALL,
        **EXPERTS,
        "num_experts": 4,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],  # which is dense
    },
    "glm4_moe_lite": {  # a latent of keys and values, from which heads take their own
        **SMALL,
        **EXPERTS,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1},
    },
    "gemma2": {**SMALL, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
}


def build(model: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model.partition(",")[0], **MODELS[model])
    module: nn.Module = AutoModelForCausalLM.from_config(config)
    return module


def write(folder: Path, model: str, stages: int) -> str:
    captured = pipegraph.capture(build(model), (), {"input_ids": torch.randint(WORDS, (2, LENGTH))})
    points = [f"model.layers.{4 // stages * index}" for index in range(1, stages)]
    return str(pipegraph.write_package(pipegraph.plan(captured, points=points), folder).path)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def train(
    rank: int,
    folder: str,
    shape: Shape,
    schedule: str,
    kernels: str,
    name: str,
    device: str = "cpu",
    tolerance: float = 1e-6,
) -> str:
    """Three steps of AdamW. Nothing is left to autograd."""
    mesh = init_device_mesh(torch.device(device).type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    pipe = pipegraph.Pipeline(
        folder, schedule, 4, loss_fn=loss, mesh=mesh, device=device, kernels=kernels, strict=True, timeout=250
    )
    model = build(name).to(device)
    near = partial(near_to, tolerance=tolerance)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    piped, unsplit = torch.optim.AdamW(pipe.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
    generator = torch.Generator().manual_seed(3)
    rows = (ROWS,) * shape.get("dp_shard", 1)
    for _ in range(3):
        tokens, target = (torch.randint(WORDS, (sum(rows), LENGTH), generator=generator).to(device) for _ in range(2))
        local_rows = rows_of(shape, rows, mesh)
        result = pipe.step(input_ids=tokens[local_rows], target=target[local_rows])
        value = loss(model(input_ids=tokens), target)
        value.backward()
        near(result.loss, value.detach(), "loss")
        for parameter_name, parameter in pipe.named_parameters():
            near(full_tensor(parameter.grad), parameters[parameter_name].grad, parameter_name)
        near(pipe.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(model.parameters(), 1.0), "norm")
        for optimizer in (piped, unsplit):
            optimizer.step()
            optimizer.zero_grad()
    for tensor_name, tensor in pipe.state_dict().items():
        if tensor_name in parameters:
            near(full_tensor(tensor), parameters[tensor_name].detach(), tensor_name)
    return "equal"
