"""Tiny configurations of Hugging Face architectures: real classes, a few thousand parameters each.

A configuration lists what differs from the architecture's defaults; dropout is off, so that one step can be compared.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_DECODER: dict[str, Any] = {**_TEXT, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS: dict[str, Any] = {**_DECODER, "num_experts_per_tok": 2}
_TRANSLATOR: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **_DECODER},
    "GPT2LMHeadModel": {
        "model_type": "gpt2",
        **{"vocab_size": 96, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "BertForMaskedLM": {
        "model_type": "bert",
        **_TEXT,
        **{"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    "Qwen3ForCausalLM": {"model_type": "qwen3", **_DECODER},
    "MixtralForCausalLM": {"model_type": "mixtral", **_EXPERTS, "num_local_experts": 4},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        **_EXPERTS,
        **{"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    },
    "Gemma2ForCausalLM": {"model_type": "gemma2", **_DECODER, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        **_DECODER,
        **{"query_pre_attn_scalar": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    },
    "Phi3ForCausalLM": {"model_type": "phi3", **_DECODER},
    "OPTForCausalLM": {
        "model_type": "opt",
        **_TEXT,
        **{"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "dropout": 0.0},
    },
    "BloomForCausalLM": {
        "model_type": "bloom",
        **{"vocab_size": 96, "hidden_size": 32, "n_layer": 4, "n_head": 4, "pad_token_id": 0},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    },
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox", **_TEXT, "intermediate_size": 48, "max_position_embeddings": 32},
    "MambaForCausalLM": {
        "model_type": "mamba",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, "time_step_rank": 4},
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        **_EXPERTS,
        **{"num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "GptOssForCausalLM": {"model_type": "gpt_oss", **_EXPERTS, "num_local_experts": 4, "sliding_window": 4},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        **_TRANSLATOR,
        **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
        "dropout_rate": 0.0,
    },
    "BartForConditionalGeneration": {
        "model_type": "bart",
        **_TRANSLATOR,
        **{"vocab_size": 96, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"max_position_embeddings": 32, "dropout": 0.0},
    },
    "ViTForImageClassification": {
        "model_type": "vit",
        **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48},
        **{"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    },
    "ResNetForImageClassification": {
        "model_type": "resnet",
        **{"embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [2, 2, 2], "layer_type": "basic"},
        "image_size": 32,
    },
    "ConvNextForImageClassification": {
        "model_type": "convnext",
        **{"num_stages": 3, "hidden_sizes": [8, 16, 24], "depths": [2, 2, 2], "image_size": 32},
    },
}
"""By the class that transformers calls them."""


def shallow(architecture: str) -> dict[str, Any]:
    """A configuration with two layers, for tests of something else than the architecture."""
    full = CONFIGURATIONS[architecture]
    return {**full, **{name: 2 for name in ("num_hidden_layers", "n_layer") if name in full}}
