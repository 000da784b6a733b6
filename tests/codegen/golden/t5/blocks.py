"""The blocks that the stages of Translator (t5.py) share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class T5LayerNorm(nn.Module):
    """T5LayerNorm (modeling_t5.py:50), as in t5.encoder.block.0.layer.0.layer_norm.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-06
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = (hidden_states.to(torch.float32) ** 2).mean(-1, keepdim=True)
        hidden_states = (hidden_states * (variance + self.variance_epsilon).rsqrt()).to(hidden_states.dtype)
        return self.weight * hidden_states


class T5Attention(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.1.layer.0.SelfAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], mask bool[decoder_input_ids_1, decoder_input_ids_1],
    position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self, has_relative_attention_bias=False, size=None, value=None, size_1=None):
        super().__init__()
        self.has_relative_attention_bias = has_relative_attention_bias
        self.size = size
        self.value = value
        self.size_1 = size_1
        self.key_value_proj_dim = 8
        self.n_heads = 4
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(8, 4)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        key_value_states: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        has_key_value_states = key_value_states is not None
        if key_value_states is None:
            key_value_states = hidden_states
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        if self.has_relative_attention_bias:
            context_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(1)
            memory_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
            relative_position = memory_position - context_position
            if mask is not None:
                relative_position = -relative_position.min(torch.zeros_like(relative_position))
            else:
                relative_buckets = (relative_position > 0).to(torch.int64) * 4
                relative_position = relative_position.abs()
            relative_position_if_large = (
                (relative_position.to(torch.float32) / self.size).log() / self.value * self.size
            )
            relative_position_if_large = relative_position_if_large.to(torch.int64) + self.size
            is_small = relative_position < self.size
            relative_position_if_large = relative_position_if_large.min(
                torch.full_like(relative_position_if_large, self.size_1)
            )
            if mask is not None:
                relative_buckets = torch.where(is_small, relative_position, relative_position_if_large)
            else:
                relative_buckets = relative_buckets + torch.where(
                    is_small, relative_position, relative_position_if_large
                )
            position_bias = self.relative_attention_bias(relative_buckets).permute(2, 0, 1).unsqueeze(0)
            if mask is not None:
                attention_mask = torch.where(mask, position_bias, torch.finfo(hidden_states.dtype).min).contiguous()
            else:
                attention_mask = position_bias.contiguous()
            attn_output = F.scaled_dot_product_attention(
                query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
            )
        elif has_key_value_states:
            if position_bias is None:
                position_bias = torch.zeros(
                    1,
                    self.n_heads,
                    hidden_states.shape[1],
                    key_value_states.shape[1],
                    dtype=hidden_states.dtype,
                    device=hidden_states.device,
                )
            attn_output = F.scaled_dot_product_attention(
                query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
            )
        elif mask is not None:
            attention_mask = torch.where(mask, position_bias, torch.finfo(hidden_states.dtype).min).contiguous()
            attn_output = F.scaled_dot_product_attention(
                query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
            )
        else:
            position_bias = position_bias.contiguous()
            attn_output = F.scaled_dot_product_attention(
                query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
            )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        attn_output = self.o(attn_output)
        if self.has_relative_attention_bias:
            return attn_output, position_bias
        return attn_output


class T5LayerSelfAttention(nn.Module):
    """T5LayerSelfAttention (modeling_t5.py:372), as in t5.decoder.block.1.layer.0.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1], position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self, has_relative_attention_bias=False, size=None, value=None, size_1=None):
        super().__init__()
        self.SelfAttention = T5Attention(
            has_relative_attention_bias=has_relative_attention_bias, size=size, value=value, size_1=size_1
        )
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        has_position_bias = position_bias is not None
        normed_hidden_states = self.layer_norm(hidden_states)
        if position_bias is not None:
            attention_output = self.SelfAttention(normed_hidden_states, attention_mask, position_bias)
        else:
            attention_output, position_bias = self.SelfAttention(normed_hidden_states, attention_mask)
        attention_output = hidden_states + self.dropout(attention_output)
        if has_position_bias:
            return attention_output
        return attention_output, position_bias


class T5DenseActDense(nn.Module):
    """T5DenseActDense (modeling_t5.py:75), as in t5.encoder.block.0.layer.1.DenseReluDense.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(32, 64, bias=False)
        self.wo = nn.Linear(64, 32, bias=False)
        self.dropout = nn.Dropout(p=0.0)
        self.act = nn.ReLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.wi(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.wo(hidden_states)


class T5LayerFF(nn.Module):
    """T5LayerFF (modeling_t5.py:126), as in t5.encoder.block.0.layer.1.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.DenseReluDense = T5DenseActDense()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.DenseReluDense(forwarded_states)
        return hidden_states + self.dropout(forwarded_states)


class T5Block(nn.Module):
    """T5Block (modeling_t5.py:435), as in t5.decoder.block.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1], position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1],
    encoder_hidden_states f32[batch, input_ids_1, 32], encoder_decoder_position_bias f32[1, 4,
    decoder_input_ids_1, input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self, layer, index):
        super().__init__()
        self.index = index
        self.layer = layer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        encoder_decoder_position_bias: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if position_bias is not None:
            hidden_states = self.layer[0](hidden_states, attention_mask, position_bias)
            if encoder_hidden_states is not None:
                hidden_states = self.layer[1](hidden_states, encoder_hidden_states, encoder_decoder_position_bias)
        else:
            hidden_states, self_attn_position_bias = self.layer[0](hidden_states, attention_mask)
            if encoder_hidden_states is not None:
                hidden_states = self.layer[1](hidden_states, encoder_hidden_states)
        hidden_states = self.layer[self.index](hidden_states)
        if position_bias is not None:
            return hidden_states
        return hidden_states, self_attn_position_bias


class T5LayerCrossAttention(nn.Module):
    """T5LayerCrossAttention (modeling_t5.py:404), as in t5.decoder.block.1.layer.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32],
    position_bias f32[1, 4, decoder_input_ids_1, input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.EncDecAttention = T5Attention()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states: Tensor, key_value_states: Tensor, position_bias: Tensor | None = None) -> Tensor:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.EncDecAttention(
            normed_hidden_states, position_bias=position_bias, key_value_states=key_value_states
        )
        return hidden_states + self.dropout(attention_output)
