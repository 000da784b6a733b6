"""The blocks that the stages of Translator (t5.py) share.

create_position_bias_mask: the text of sdpa_attention.py.
T5LayerNorm, T5LayerSelfAttention, T5DenseActDense, T5LayerFF, T5Block, T5LayerSelfAttention2, T5StackStart,
T5StackEnd, T5Attention3, T5LayerSelfAttention3, T5Attention4, T5LayerCrossAttention, T5StackStart2,
T5Attention5, T5LayerSelfAttention4, T5Attention6, T5StackEnd2, T5ForConditionalGenerationEnd: the text of
modeling_t5.py (Apache License; Copyright 2018 Mesh TensorFlow authors, T5 Authors and HuggingFace Inc. team).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def create_position_bias_mask(
    position_bias: torch.Tensor,
    attention_mask: torch.Tensor | None,
    key: torch.Tensor,
) -> torch.Tensor:
    """
    Create a floating-point dtype mask to use with sdpa. The mask contains the values of `position_bias` to positions where we should
    attend to tokens, and -inf where we should not. It will be added to the QK^T result in the attention, before the softmax. Note
    that using such a mask will usually prevent sdpa from dispatching to the most efficient kernel implementations.

    Note that we cannot create this in advance when we create the mask in the model, as the position_bias is usually learned
    differently in every layer.
    """
    min_dtype = torch.finfo(key.dtype).min
    # If we don't have a mask already, we need to check causality to be sure to respect it
    # If we have a boolean mask, superpose both into a single float additive mask to use in sdpa
    position_bias_mask = torch.where(attention_mask, position_bias, min_dtype)

    return position_bias_mask.contiguous()


class T5LayerNorm(nn.Module):
    """T5LayerNorm (modeling_t5.py:50), as in t5.encoder.block.0.layer.0.layer_norm.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-06
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, hidden_states):
        # T5 uses a layer_norm which only scales and doesn't shift, which is also known as Root Mean
        # Square Layer Normalization https://huggingface.co/papers/1910.07467 thus variance is calculated
        # w/o mean and there is no bias. Additionally we want to make sure that the accumulation for
        # half-precision inputs is done in fp32

        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)

        # convert into half-precision if necessary
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)

        return self.weight * hidden_states


class T5Attention(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.encoder.block.0.layer.0.SelfAttention.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32], f32[1, 4, input_ids_1,
    input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(8, 4)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        query_states = self.q(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        context_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(1)
        memory_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        relative_position = memory_position - context_position
        relative_buckets = (relative_position > 0).to(torch.int64) * 4
        relative_position = relative_position.abs()
        relative_position_if_large = (relative_position.to(torch.float32) / 2).log() / 2.0794415416798357 * 2
        relative_position_if_large = relative_position_if_large.to(torch.int64) + 2
        is_small = relative_position < 2
        relative_position_if_large = relative_position_if_large.min(torch.full_like(relative_position_if_large, 3))
        relative_buckets = relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)
        position_bias = self.relative_attention_bias(relative_buckets).permute(2, 0, 1).unsqueeze(0)
        attention_mask = position_bias.contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        attn_output = self.o(attn_output)
        return attn_output, position_bias


class T5LayerSelfAttention(nn.Module):
    """T5LayerSelfAttention (modeling_t5.py:372), as in t5.encoder.block.0.layer.0.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32], f32[1, 4, input_ids_1,
    input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.SelfAttention = T5Attention()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states, attention_mask=None, position_bias=None, past_key_values=None, **kwargs):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias = self.SelfAttention(normed_hidden_states)
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output, position_bias, None


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

    def forward(self, hidden_states):
        hidden_states = self.wi(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class T5LayerFF(nn.Module):
    """T5LayerFF (modeling_t5.py:126), as in t5.encoder.block.0.layer.1.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.DenseReluDense = T5DenseActDense()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states):
        forwarded_states = self.layer_norm(hidden_states)
        forwarded_states = self.DenseReluDense(forwarded_states)
        hidden_states = hidden_states + self.dropout(forwarded_states)
        return hidden_states


class T5Block(nn.Module):
    """T5Block (modeling_t5.py:435), as in t5.encoder.block.0.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32], f32[1, 4, input_ids_1,
    input_ids_1].
    """

    def __init__(self, is_decoder, layer):
        super().__init__()
        self.is_decoder = is_decoder
        self.layer = nn.ModuleList(layer)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_bias=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        encoder_decoder_position_bias=None,
        past_key_values=None,
    ):
        hidden_states, self_attn_position_bias, _ = self.layer[0](
            hidden_states,
            attention_mask=attention_mask,
            position_bias=position_bias,
            past_key_values=past_key_values,
        )

        # clamp inf values to enable fp16 training
        if hidden_states.dtype == torch.float16:
            clamp_value = torch.where(
                torch.isinf(hidden_states).any(),
                torch.finfo(hidden_states.dtype).max - 1000,
                torch.finfo(hidden_states.dtype).max,
            )
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

        cross_attn_position_bias = None
        do_cross_attention = self.is_decoder and encoder_hidden_states is not None
        if do_cross_attention:
            hidden_states, cross_attn_position_bias, _ = self.layer[1](
                hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                position_bias=encoder_decoder_position_bias,
                past_key_values=past_key_values,
            )

            # clamp inf values to enable fp16 training
            if hidden_states.dtype == torch.float16:
                clamp_value = torch.where(
                    torch.isinf(hidden_states).any(),
                    torch.finfo(hidden_states.dtype).max - 1000,
                    torch.finfo(hidden_states.dtype).max,
                )
                hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

        # Apply Feed Forward layer
        hidden_states = self.layer[-1](hidden_states)

        # clamp inf values to enable fp16 training
        if hidden_states.dtype == torch.float16:
            clamp_value = torch.where(
                torch.isinf(hidden_states).any(),
                torch.finfo(hidden_states.dtype).max - 1000,
                torch.finfo(hidden_states.dtype).max,
            )
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

        return hidden_states, self_attn_position_bias, cross_attn_position_bias


class T5Attention2(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.encoder.block.1.layer.0.SelfAttention.

    hidden_states f32[batch, input_ids_1, 32], position_bias f32[1, 4, input_ids_1, input_ids_1] → f32[batch,
    input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, position_bias: Tensor) -> Tensor:
        query_states = self.q(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, 8)).transpose(1, 2)
        position_bias = position_bias.contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o(attn_output)


class T5LayerSelfAttention2(nn.Module):
    """T5LayerSelfAttention (modeling_t5.py:372), as in t5.encoder.block.1.layer.0.

    hidden_states f32[batch, input_ids_1, 32], position_bias f32[1, 4, input_ids_1, input_ids_1] → f32[batch,
    input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.SelfAttention = T5Attention2()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states, attention_mask=None, position_bias=None, past_key_values=None, **kwargs):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.SelfAttention(normed_hidden_states, position_bias)
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output, position_bias, None


class T5StackStart(nn.Module):
    """T5Stack (modeling_t5.py:640), a part of it, as in t5.encoder.

    input_ids i64[batch, input_ids_1] → f32[1, 4, input_ids_1, input_ids_1], f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(89, 32)
        self.block = nn.ModuleList(
            [
                T5Block(is_decoder=False, layer=[T5LayerSelfAttention(), T5LayerFF()]),
                T5Block(is_decoder=False, layer=[T5LayerSelfAttention2(), T5LayerFF()]),
            ]
        )
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        inputs_embeds = self.embed_tokens(input_ids)

        hidden_states = self.dropout(inputs_embeds)

        hidden_states, self_attention_position_bias, _ = self.block[0](hidden_states)
        hidden_states = self.block[1](hidden_states, position_bias=self_attention_position_bias)[0]
        return self_attention_position_bias, hidden_states


class T5ForConditionalGenerationStart(nn.Module):
    """T5ForConditionalGeneration (modeling_t5.py:893), a part of it, as in t5.

    input_ids i64[batch, input_ids_1] → f32[1, 4, input_ids_1, input_ids_1], f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(89, 32)
        self.encoder = T5StackStart()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        position_bias, hidden_states = self.encoder(input_ids)
        return position_bias, hidden_states


class T5StackEnd(nn.Module):
    """T5Stack (modeling_t5.py:640), a part of it, as in t5.encoder.

    hidden_states f32[batch, input_ids_1, 32], self_attention_position_bias f32[1, 4, input_ids_1, input_ids_1]
    → f32[batch, input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"2": T5Block(is_decoder=False, layer=[T5LayerSelfAttention2(), T5LayerFF()])})
        self.final_layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states: Tensor, self_attention_position_bias: Tensor) -> Tensor:
        hidden_states = self.block["2"](hidden_states, position_bias=self_attention_position_bias)[0]

        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)

        return hidden_states


class T5Attention3(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.0.layer.0.SelfAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], mask bool[decoder_input_ids_1, decoder_input_ids_1]
    → f32[batch, decoder_input_ids_1, 32], f32[1, 4, decoder_input_ids_1, decoder_input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.relative_attention_num_buckets = 8
        self.relative_attention_max_distance = 16
        self.is_decoder = True
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(8, 4)

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        """
        Self-attention (if key_value_states is None) or attention over source sentence (provided by key_value_states).
        """
        # Input is (batch_size, seq_length, dim)
        # Mask is (batch_size, 1, 1, key_length) (non-causal encoder) or (batch_size, 1, seq_length, key_length) (causal decoder)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.key_value_proj_dim)
        past_seen_tokens = 0
        # We clone here for StaticCache, as we get the value before updating it, but use it after and it's the same ref
        past_seen_tokens = past_seen_tokens.clone() if isinstance(past_seen_tokens, torch.Tensor) else past_seen_tokens

        # if key_value_states are provided this layer is used as a cross-attention layer for the decoder
        is_cross_attention = key_value_states is not None

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)

        current_states = key_value_states if is_cross_attention else hidden_states
        kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
        key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
        value_states = self.v(current_states).view(kv_shape).transpose(1, 2)

        # compute scores, equivalent of torch.einsum("bnqd,bnkd->bnqk", query_states, key_states), compatible with onnx op>9
        key_length = key_states.shape[-2]
        position_bias = self.compute_bias(
            input_shape[1], key_length, device=query_states.device, past_seen_tokens=past_seen_tokens
        )

        attention_mask = create_position_bias_mask(position_bias, mask, key_states)
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o(attn_output)

        return attn_output, position_bias, None

    def compute_bias(self, query_length, key_length, device=None, past_seen_tokens=0):
        """Compute binned relative position bias"""
        context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
        memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
        relative_position = memory_position - context_position  # shape (query_length, key_length)
        relative_position_bucket = self._relative_position_bucket(
            relative_position,  # shape (query_length, key_length)
            bidirectional=(not self.is_decoder),
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        values = self.relative_attention_bias(relative_position_bucket)  # shape (query_length, key_length, num_heads)
        values = values.permute([2, 0, 1]).unsqueeze(0)  # shape (1, num_heads, query_length, key_length)
        return values

    @staticmethod
    def _relative_position_bucket(relative_position, bidirectional=True, num_buckets=32, max_distance=128):
        """
        Adapted from Mesh Tensorflow:
        https://github.com/tensorflow/mesh/blob/0cb87fe07da627bf0b7e60475d59f95ed6b5be3d/mesh_tensorflow/transformer/transformer_layers.py#L593

        Translate relative position to a bucket number for relative attention. The relative position is defined as
        memory_position - query_position, i.e. the distance in tokens from the attending position to the attended-to
        position. If bidirectional=False, then positive relative positions are invalid. We use smaller buckets for
        small absolute relative_position and larger buckets for larger absolute relative_positions. All relative
        positions >=max_distance map to the same bucket. All relative positions <=-max_distance map to the same bucket.
        This should allow for more graceful generalization to longer sequences than the model has been trained on

        Args:
            relative_position: an int32 Tensor
            bidirectional: a boolean - whether the attention is bidirectional
            num_buckets: an integer
            max_distance: an integer

        Returns:
            a Tensor with the same shape as relative_position, containing int32 values in the range [0, num_buckets)
        """
        relative_buckets = 0
        if bidirectional:
            num_buckets //= 2
            relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        # now relative_position is in the range [0, inf)

        # half of the buckets are for exact increments in positions
        max_exact = num_buckets // 2
        is_small = relative_position < max_exact

        # The other half of the buckets are for logarithmically bigger bins in positions up to max_distance
        relative_position_if_large = max_exact + (
            torch.log(relative_position.float() / max_exact)
            / math.log(max_distance / max_exact)
            * (num_buckets - max_exact)
        ).to(torch.long)
        relative_position_if_large = torch.min(
            relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
        )

        relative_buckets += torch.where(is_small, relative_position, relative_position_if_large)
        return relative_buckets


class T5LayerSelfAttention3(nn.Module):
    """T5LayerSelfAttention (modeling_t5.py:372), as in t5.decoder.block.0.layer.0.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1] → f32[batch, decoder_input_ids_1, 32], f32[1, 4, decoder_input_ids_1,
    decoder_input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.SelfAttention = T5Attention3()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states, attention_mask=None, position_bias=None, past_key_values=None, **kwargs):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias, attn_weights = self.SelfAttention(
            normed_hidden_states,
            mask=attention_mask,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output, position_bias, attn_weights


class T5Attention4(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.0.layer.1.EncDecAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.n_heads = 4
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        """
        Self-attention (if key_value_states is None) or attention over source sentence (provided by key_value_states).
        """
        # Input is (batch_size, seq_length, dim)
        # Mask is (batch_size, 1, 1, key_length) (non-causal encoder) or (batch_size, 1, seq_length, key_length) (causal decoder)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.key_value_proj_dim)

        # if key_value_states are provided this layer is used as a cross-attention layer for the decoder
        is_cross_attention = key_value_states is not None

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)

        current_states = key_value_states if is_cross_attention else hidden_states
        kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
        key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
        value_states = self.v(current_states).view(kv_shape).transpose(1, 2)

        # compute scores, equivalent of torch.einsum("bnqd,bnkd->bnqk", query_states, key_states), compatible with onnx op>9
        key_length = key_states.shape[-2]
        position_bias = torch.zeros(
            (1, self.n_heads, input_shape[1], key_length),
            device=query_states.device,
            dtype=query_states.dtype,
        )

        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o(attn_output)

        return attn_output, position_bias, None


class T5LayerCrossAttention(nn.Module):
    """T5LayerCrossAttention (modeling_t5.py:404), as in t5.decoder.block.0.layer.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self, EncDecAttention):
        super().__init__()
        self.EncDecAttention = EncDecAttention
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(
        self, hidden_states, key_value_states, attention_mask=None, position_bias=None, past_key_values=None, **kwargs
    ):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias, attn_weights = self.EncDecAttention(
            normed_hidden_states,
            mask=attention_mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        layer_output = hidden_states + self.dropout(attention_output)
        return layer_output, position_bias, attn_weights


class T5StackStart2(nn.Module):
    """T5Stack (modeling_t5.py:640), a part of it, as in t5.decoder.

    input_ids i64[batch, decoder_input_ids_1], encoder_hidden_states f32[batch, input_ids_1, 32] → f32[1, 4,
    decoder_input_ids_1, decoder_input_ids_1], f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(89, 32)
        self.block = nn.ModuleList(
            [
                T5Block(
                    is_decoder=True,
                    layer=[T5LayerSelfAttention3(), T5LayerCrossAttention(EncDecAttention=T5Attention4()), T5LayerFF()],
                )
            ]
        )
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        inputs_embeds = self.embed_tokens(input_ids)

        attention_mask = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool, device=input_ids.device)
        attention_mask = attention_mask.tril()

        hidden_states = self.dropout(inputs_embeds)

        hidden_states, self_attention_position_bias, _ = self.block[0](
            hidden_states, attention_mask, encoder_hidden_states=encoder_hidden_states
        )
        return self_attention_position_bias, hidden_states


class T5ForConditionalGenerationMiddle(nn.Module):
    """T5ForConditionalGeneration (modeling_t5.py:893), a part of it, as in t5.

    decoder_input_ids i64[batch, decoder_input_ids_1], hidden_states f32[batch, input_ids_1, 32],
    self_attention_position_bias f32[1, 4, input_ids_1, input_ids_1] → f32[batch, input_ids_1, 32], f32[1, 4,
    decoder_input_ids_1, decoder_input_ids_1], f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.encoder = T5StackEnd()
        self.decoder = T5StackStart2()

    def forward(
        self, decoder_input_ids: Tensor, hidden_states: Tensor, self_attention_position_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        encoder_outputs = self.encoder(hidden_states, self_attention_position_bias)
        position_bias, hidden_states = self.decoder(decoder_input_ids, encoder_outputs)
        return encoder_outputs, position_bias, hidden_states


class T5Attention5(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.1.layer.0.SelfAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], mask bool[decoder_input_ids_1, decoder_input_ids_1],
    position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        """
        Self-attention (if key_value_states is None) or attention over source sentence (provided by key_value_states).
        """
        # Input is (batch_size, seq_length, dim)
        # Mask is (batch_size, 1, 1, key_length) (non-causal encoder) or (batch_size, 1, seq_length, key_length) (causal decoder)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.key_value_proj_dim)

        # if key_value_states are provided this layer is used as a cross-attention layer for the decoder
        is_cross_attention = key_value_states is not None

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)

        current_states = key_value_states if is_cross_attention else hidden_states
        kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
        key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
        value_states = self.v(current_states).view(kv_shape).transpose(1, 2)

        attention_mask = create_position_bias_mask(position_bias, mask, key_states)
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o(attn_output)

        return attn_output, position_bias, None


class T5LayerSelfAttention4(nn.Module):
    """T5LayerSelfAttention (modeling_t5.py:372), as in t5.decoder.block.1.layer.0.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1], position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.SelfAttention = T5Attention5()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states, attention_mask=None, position_bias=None, past_key_values=None, **kwargs):
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias, attn_weights = self.SelfAttention(
            normed_hidden_states,
            mask=attention_mask,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output, position_bias, attn_weights


class T5Attention6(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.1.layer.1.EncDecAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32],
    position_bias f32[1, 4, decoder_input_ids_1, input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, past_key_values=None, **kwargs
    ):
        """
        Self-attention (if key_value_states is None) or attention over source sentence (provided by key_value_states).
        """
        # Input is (batch_size, seq_length, dim)
        # Mask is (batch_size, 1, 1, key_length) (non-causal encoder) or (batch_size, 1, seq_length, key_length) (causal decoder)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.key_value_proj_dim)

        # if key_value_states are provided this layer is used as a cross-attention layer for the decoder
        is_cross_attention = key_value_states is not None

        query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)

        current_states = key_value_states if is_cross_attention else hidden_states
        kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
        key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
        value_states = self.v(current_states).view(kv_shape).transpose(1, 2)

        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2)

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o(attn_output)

        return attn_output, position_bias, None


class T5StackEnd2(nn.Module):
    """T5Stack (modeling_t5.py:640), a part of it, as in t5.decoder.

    encoder_hidden_states f32[batch, input_ids_1, 32], hidden_states f32[batch, decoder_input_ids_1, 32],
    self_attention_position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict(
            {
                str(i): T5Block(
                    is_decoder=True,
                    layer=[T5LayerSelfAttention4(), T5LayerCrossAttention(EncDecAttention=T5Attention6()), T5LayerFF()],
                )
                for i in range(1, 3)
            }
        )
        self.final_layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(
        self, encoder_hidden_states: Tensor, hidden_states: Tensor, self_attention_position_bias: Tensor
    ) -> Tensor:
        attention_mask = torch.ones(
            hidden_states.shape[1], hidden_states.shape[1], dtype=torch.bool, device=encoder_hidden_states.device
        )
        attention_mask = attention_mask.tril()

        position_bias = torch.zeros(
            1,
            4,
            hidden_states.shape[1],
            encoder_hidden_states.shape[1],
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        for layer_module in self.block.values():
            hidden_states = layer_module(
                hidden_states,
                attention_mask,
                self_attention_position_bias,
                encoder_hidden_states,
                encoder_decoder_position_bias=position_bias,
            )[0]

        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)

        return hidden_states


class T5ForConditionalGenerationEnd(nn.Module):
    """T5ForConditionalGeneration (modeling_t5.py:893), a part of it, as in t5.

    hidden_states f32[batch, decoder_input_ids_1, 32], self_attention_position_bias f32[1, 4,
    decoder_input_ids_1, decoder_input_ids_1], hidden_states_1 f32[batch, input_ids_1, 32] → f32[batch,
    decoder_input_ids_1, 89].
    """

    def __init__(self):
        super().__init__()
        self.model_dim = 32
        self.decoder = T5StackEnd2()
        self.lm_head = nn.Linear(32, 89, bias=False)

    def forward(self, hidden_states: Tensor, self_attention_position_bias: Tensor, hidden_states_1: Tensor) -> Tensor:
        # Decode
        sequence_output = self.decoder(hidden_states_1, hidden_states, self_attention_position_bias)

        sequence_output = sequence_output * (self.model_dim**-0.5)

        lm_logits = self.lm_head(sequence_output)

        return lm_logits
