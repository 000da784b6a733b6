"""Stage 0 of 3 of LlamaForCausalLM (hf:config.json)."""

import torch
from torch import Tensor, nn

from .blocks import LlamaDecoderLayer, LlamaRotaryEmbedding


class Stage0(nn.Module):
    """model.embed_tokens, model.layers.0 … model.layers.1.

    input_ids i64[batch, input_ids_1] → hidden_states f32[batch, input_ids_1, 128].
    631.3 k parameters, 111.1 MFLOP.
    model.embed_tokens.weight is tied to lm_head.weight of stage 2.
    """

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(2048, 128)
        self.model.layers = nn.ModuleList([LlamaDecoderLayer() for _ in range(2)])
        self.model.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, input_ids: Tensor) -> Tensor:
        inputs_embeds = self.model.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        cos, sin = self.model.rotary_emb(None, position_ids)
        hidden_states = inputs_embeds
        for layer in self.model.layers:
            hidden_states = layer(hidden_states, position_embeddings=(cos, sin))
        return hidden_states
