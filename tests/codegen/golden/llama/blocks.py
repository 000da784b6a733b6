"""The blocks that the stages of LlamaForCausalLM (hf:config.json) share.

rotate_half, apply_rotary_pos_emb, LlamaRotaryEmbedding, LlamaRMSNorm, LlamaAttention, LlamaMLP,
LlamaDecoderLayer, LlamaModelStart, LlamaModelMiddle, LlamaModelEnd: the text of modeling_llama.py (Apache
License; Copyright 2022 EleutherAI and the HuggingFace Inc. team).
SiLUActivation: the text of activations.py (Apache License; Copyright 2020 The HuggingFace Team).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Applies Rotary Position Embedding to the query and key tensors.

    Args:
        q (`torch.Tensor`): The query tensor.
        k (`torch.Tensor`): The key tensor.
        cos (`torch.Tensor`): The cosine part of the rotary embedding.
        sin (`torch.Tensor`): The sine part of the rotary embedding.
        unsqueeze_dim (`int`, *optional*, defaults to 1):
            The 'unsqueeze_dim' argument specifies the dimension along which to unsqueeze cos[position_ids] and
            sin[position_ids] so that they can be properly broadcasted to the dimensions of q and k. For example, note
            that cos[position_ids] and sin[position_ids] have the shape [batch_size, seq_len, head_dim]. Then, if q and
            k have the shape [batch_size, heads, seq_len, head_dim], then setting unsqueeze_dim=1 makes
            cos[position_ids] and sin[position_ids] broadcastable to the shapes of q and k. Similarly, if q and k have
            the shape [batch_size, seq_len, heads, head_dim], then set unsqueeze_dim=2.
    Returns:
        `tuple(torch.Tensor)` comprising of the query and key tensors rotated using the Rotary Position Embedding.
    """
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class LlamaRotaryEmbedding(nn.Module):
    """LlamaRotaryEmbedding (modeling_llama.py:72), as in model.rotary_emb.

    position_ids i64[1, input_ids_1] → f32[1, input_ids_1, 16], f32[1, input_ids_1, 16].
    """

    def __init__(self):
        super().__init__()
        self.attention_scaling = 1.0
        self.register_buffer("inv_freq", torch.empty(8), persistent=False)
        self.register_buffer("original_inv_freq", torch.empty(8), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling

        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class LlamaRMSNorm(nn.Module):
    """LlamaRMSNorm (modeling_llama.py:51), as in model.layers.0.input_layernorm.

    hidden_states f32[batch, input_ids_1, 128] → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-05
        self.weight = nn.Parameter(torch.ones(128))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class LlamaAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper.

    LlamaAttention (modeling_llama.py:205), as in model.layers.0.self_attn.
    hidden_states f32[batch, input_ids_1, 128], cos f32[1, input_ids_1, 16], sin f32[1, input_ids_1, 16]
    → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.head_dim = 16
        self.q_proj = nn.Linear(128, 128, bias=False)
        self.k_proj = nn.Linear(128, 64, bias=False)
        self.v_proj = nn.Linear(128, 64, bias=False)
        self.o_proj = nn.Linear(128, 128, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        key_states = key_states.repeat_interleave(2, dim=1)
        value_states = value_states.repeat_interleave(2, dim=1)
        attn_output = F.scaled_dot_product_attention(query_states, key_states, value_states, is_causal=True)
        attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, None


class SiLUActivation(nn.Module):
    """SiLUActivation (activations.py:92), as in model.layers.0.mlp.act_fn.

    input f32[batch, input_ids_1, 352] → f32[batch, input_ids_1, 352].
    """

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.silu(input)


class LlamaMLP(nn.Module):
    """LlamaMLP (modeling_llama.py:152), as in model.layers.0.mlp.

    x f32[batch, input_ids_1, 128] → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(128, 352, bias=False)
        self.up_proj = nn.Linear(128, 352, bias=False)
        self.down_proj = nn.Linear(352, 128, bias=False)
        self.act_fn = SiLUActivation()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj


class LlamaDecoderLayer(nn.Module):
    """LlamaDecoderLayer (modeling_llama.py:273), as in model.layers.0.

    hidden_states f32[batch, input_ids_1, 128], cos f32[1, input_ids_1, 16], sin f32[1, input_ids_1, 16]
    → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = LlamaRMSNorm()
        self.post_attention_layernorm = LlamaRMSNorm()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        # Self Attention
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, position_embeddings=position_embeddings)
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class LlamaModelStart(nn.Module):
    """LlamaModel (modeling_llama.py:335), a part of it, as in model.

    input_ids i64[batch, input_ids_1] → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(2048, 128)
        self.layers = nn.ModuleList([LlamaDecoderLayer() for _ in range(2)])
        self.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, input_ids: Tensor) -> Tensor:
        inputs_embeds: torch.Tensor = self.embed_tokens(input_ids)

        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        position_ids = position_ids.unsqueeze(0)

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, position_embeddings=position_embeddings)
        return hidden_states


class LlamaModelMiddle(nn.Module):
    """LlamaModel (modeling_llama.py:335), a part of it, as in model.

    hidden_states f32[batch, input_ids_1, 128] → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(2, 5)})
        self.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, hidden_states: Tensor) -> Tensor:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        position_ids = position_ids.unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for decoder_layer in self.layers.values():
            hidden_states = decoder_layer(hidden_states, position_embeddings=position_embeddings)
        return hidden_states


class LlamaModelEnd(nn.Module):
    """LlamaModel (modeling_llama.py:335), a part of it, as in model.

    hidden_states f32[batch, input_ids_1, 128] → f32[batch, input_ids_1, 128].
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(5, 8)})
        self.norm = LlamaRMSNorm()
        self.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, hidden_states: Tensor) -> Tensor:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        position_ids = position_ids.unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for decoder_layer in self.layers.values():
            hidden_states = decoder_layer(hidden_states, position_embeddings=position_embeddings)

        hidden_states = self.norm(hidden_states)
        return hidden_states
