"""Stage 1 of 3 of LlamaForCausalLM (hf:config.json)."""

import torch
from torch import Tensor, nn

from .blocks import LlamaDecoderLayer, LlamaRotaryEmbedding


class Stage1(nn.Module):
    """model.layers.2 … model.layers.4.

    hidden_states f32[batch, input_ids_1, 128] → hidden_states f32[batch, input_ids_1, 128].
    553.7 k parameters, 166.7 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(2, 5)})
        self.model.rotary_emb = LlamaRotaryEmbedding()

    def forward(self, hidden_states: Tensor) -> Tensor:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        cos, sin = self.model.rotary_emb(None, position_ids)
        for layer in self.model.layers.values():
            hidden_states = layer(hidden_states, position_embeddings=(cos, sin))
        return hidden_states
