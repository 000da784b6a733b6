"""A Llama of transformers that is trained on from a checkpoint of torchtitan, which has other names.

python torchtitan_llama.py CHECKPOINT OUT
"""

import sys
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import pipegraph
from pipegraph.integrations.transformers import causal_lm_loss, count_causal_lm_labels

HEADS, KEY_HEADS = 4, 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, use_cache=False)
RENAME = {
    r"^tok_embeddings\.": "model.embed_tokens.",
    r"^norm\.": "model.norm.",
    r"^output\.": "lm_head.",  # before torchtitan 0.3
    r"^layers\.": "model.layers.",
    r"attention\.(qkv_linear\.)?w([qkv])\.": r"self_attn.\2_proj.",
    r"attention\.wo\.": "self_attn.o_proj.",
    r"feed_forward\.w1\.": "mlp.gate_proj.",
    r"feed_forward\.w2\.": "mlp.down_proj.",
    r"feed_forward\.w3\.": "mlp.up_proj.",
    r"attention_norm\.": "input_layernorm.",
    r"ffn_norm\.": "post_attention_layernorm.",
}


def convert(name: str, tensor: Tensor) -> Tensor:
    """torchtitan has the two numbers of a rotary pair in adjacent rows, transformers in the two halves of a head."""
    heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(name.split(".")[-2])
    return tensor if heads is None else tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def pipeline(checkpoint: Path, folder: Path) -> pipegraph.Pipeline:
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(CONFIG)
    captured = pipegraph.capture(model, kwargs={"input_ids": torch.ones(2, 12, dtype=torch.long)})
    package = pipegraph.write_package(pipegraph.plan(captured, points=["model.layers.1"]), folder, weights=False)
    weights = pipegraph.Weights(checkpoint, rename=RENAME, convert=convert)
    loss = {"loss_fn": causal_lm_loss, "loss_weight": count_causal_lm_labels}
    return pipegraph.Pipeline(package, "1f1b", 2, weights=weights, kernels="eager", **loss)


if __name__ == "__main__":
    pipe = pipeline(Path(sys.argv[1]), Path(sys.argv[2]))
    pipe.train()
    tokens = torch.arange(48).view(4, 12)
    print(f"loss {pipe.step(input_ids=tokens, target=tokens).loss:.6f}")
