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
    """T5Attention (modeling_t5.py:176), as in t5.encoder.block.0.layer.0.SelfAttention.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32], f32[1, 4, input_ids_1,
    input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(8, 4)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
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

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias = self.SelfAttention(normed_hidden_states)
        attention_output = hidden_states + self.dropout(attention_output)
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
    """T5Block (modeling_t5.py:435), as in t5.encoder.block.0.

    hidden_states f32[batch, input_ids_1, 32] → f32[batch, input_ids_1, 32], f32[1, 4, input_ids_1,
    input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([T5LayerSelfAttention(), T5LayerFF()])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states, self_attn_position_bias = self.layer[0](hidden_states)
        hidden_states = self.layer[1](hidden_states)
        return hidden_states, self_attn_position_bias


class T5Attention2(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.encoder.block.1.layer.0.SelfAttention.

    hidden_states f32[batch, input_ids_1, 32], position_bias f32[1, 4, input_ids_1, input_ids_1] → f32[batch,
    input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)

    def forward(self, hidden_states: Tensor, position_bias: Tensor) -> Tensor:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
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

    def forward(self, hidden_states: Tensor, position_bias: Tensor) -> Tensor:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.SelfAttention(normed_hidden_states, position_bias)
        return hidden_states + self.dropout(attention_output)


class T5Block2(nn.Module):
    """T5Block (modeling_t5.py:435), as in t5.encoder.block.1.

    hidden_states f32[batch, input_ids_1, 32], position_bias f32[1, 4, input_ids_1, input_ids_1] → f32[batch,
    input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([T5LayerSelfAttention2(), T5LayerFF()])

    def forward(self, hidden_states: Tensor, position_bias: Tensor) -> Tensor:
        hidden_states = self.layer[0](hidden_states, position_bias)
        return self.layer[1](hidden_states)


class T5Attention3(nn.Module):
    """T5Attention (modeling_t5.py:176), as in t5.decoder.block.0.layer.0.SelfAttention.

    hidden_states f32[batch, decoder_input_ids_1, 32], mask bool[decoder_input_ids_1, decoder_input_ids_1]
    → f32[batch, decoder_input_ids_1, 32], f32[1, 4, decoder_input_ids_1, decoder_input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.key_value_proj_dim = 8
        self.scaling = 1.0
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32, bias=False)
        self.o = nn.Linear(32, 32, bias=False)
        self.relative_attention_bias = nn.Embedding(8, 4)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        context_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(1)
        memory_position = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        relative_position = memory_position - context_position
        relative_position = -relative_position.min(torch.zeros_like(relative_position))
        relative_position_if_large = (relative_position.to(torch.float32) / 4).log() / 1.3862943611198906 * 4
        relative_position_if_large = relative_position_if_large.to(torch.int64) + 4
        is_small = relative_position < 4
        relative_position_if_large = relative_position_if_large.min(torch.full_like(relative_position_if_large, 7))
        relative_buckets = torch.where(is_small, relative_position, relative_position_if_large)
        position_bias = self.relative_attention_bias(relative_buckets).permute(2, 0, 1).unsqueeze(0)
        attention_mask = torch.where(mask, position_bias, torch.finfo(hidden_states.dtype).min).contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        attn_output = self.o(attn_output)
        return attn_output, position_bias


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

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output, position_bias = self.SelfAttention(normed_hidden_states, attention_mask)
        attention_output = hidden_states + self.dropout(attention_output)
        return attention_output, position_bias


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

    def forward(self, hidden_states: Tensor, key_value_states: Tensor) -> Tensor:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
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
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o(attn_output)


class T5LayerCrossAttention(nn.Module):
    """T5LayerCrossAttention (modeling_t5.py:404), as in t5.decoder.block.0.layer.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32] → f32[batch,
    decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.EncDecAttention = T5Attention4()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states: Tensor, key_value_states: Tensor) -> Tensor:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.EncDecAttention(normed_hidden_states, key_value_states)
        return hidden_states + self.dropout(attention_output)


class T5Block3(nn.Module):
    """T5Block (modeling_t5.py:435), as in t5.decoder.block.0.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1], encoder_hidden_states f32[batch, input_ids_1, 32] → f32[batch, decoder_input_ids_1,
    32], f32[1, 4, decoder_input_ids_1, decoder_input_ids_1].
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([T5LayerSelfAttention3(), T5LayerCrossAttention(), T5LayerFF()])

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, encoder_hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_states, self_attn_position_bias = self.layer[0](hidden_states, attention_mask)
        hidden_states = self.layer[1](hidden_states, encoder_hidden_states)
        hidden_states = self.layer[2](hidden_states)
        return hidden_states, self_attn_position_bias


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

    def forward(self, hidden_states: Tensor, mask: Tensor, position_bias: Tensor) -> Tensor:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        attention_mask = torch.where(mask, position_bias, torch.finfo(hidden_states.dtype).min).contiguous()
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attention_mask, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o(attn_output)


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

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor) -> Tensor:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.SelfAttention(normed_hidden_states, attention_mask, position_bias)
        return hidden_states + self.dropout(attention_output)


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

    def forward(self, hidden_states: Tensor, key_value_states: Tensor, position_bias: Tensor) -> Tensor:
        query_states = self.q(hidden_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        key_states = self.k(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        value_states = self.v(key_value_states).unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        attn_output = F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=position_bias, scale=self.scaling
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o(attn_output)


class T5LayerCrossAttention2(nn.Module):
    """T5LayerCrossAttention (modeling_t5.py:404), as in t5.decoder.block.1.layer.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], key_value_states f32[batch, input_ids_1, 32],
    position_bias f32[1, 4, decoder_input_ids_1, input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.EncDecAttention = T5Attention6()
        self.layer_norm = T5LayerNorm()
        self.dropout = nn.Dropout(p=0.0)

    def forward(self, hidden_states: Tensor, key_value_states: Tensor, position_bias: Tensor) -> Tensor:
        normed_hidden_states = self.layer_norm(hidden_states)
        attention_output = self.EncDecAttention(normed_hidden_states, key_value_states, position_bias)
        return hidden_states + self.dropout(attention_output)


class T5Block4(nn.Module):
    """T5Block (modeling_t5.py:435), as in t5.decoder.block.1.

    hidden_states f32[batch, decoder_input_ids_1, 32], attention_mask bool[decoder_input_ids_1,
    decoder_input_ids_1], position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1],
    encoder_hidden_states f32[batch, input_ids_1, 32], encoder_decoder_position_bias f32[1, 4,
    decoder_input_ids_1, input_ids_1] → f32[batch, decoder_input_ids_1, 32].
    """

    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList([T5LayerSelfAttention4(), T5LayerCrossAttention2(), T5LayerFF()])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_bias: Tensor,
        encoder_hidden_states: Tensor,
        encoder_decoder_position_bias: Tensor,
    ) -> Tensor:
        hidden_states = self.layer[0](hidden_states, attention_mask, position_bias)
        hidden_states = self.layer[1](hidden_states, encoder_hidden_states, encoder_decoder_position_bias)
        return self.layer[2](hidden_states)
