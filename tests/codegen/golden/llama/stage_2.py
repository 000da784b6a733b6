"""Stage 2 of 3 of LlamaForCausalLM (hf:config.json)."""

import torch
from torch import Tensor, nn

from .blocks import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Stage2(nn.Module):
    """model.layers.5 … model.layers.7, model.norm, lm_head.

    hidden_states f32[batch, input_ids_1, 128] → logits f32[batch, input_ids_1, 2048].
    816.0 k parameters, 233.8 MFLOP.
    lm_head.weight is tied to model.embed_tokens.weight of stage 0.
    """

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): LlamaDecoderLayer() for i in range(5, 8)})
        self.model.norm = LlamaRMSNorm()
        self.model.rotary_emb = LlamaRotaryEmbedding()
        self.lm_head = nn.Linear(128, 2048, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        cos, sin = self.model.rotary_emb(None, position_ids)
        for layer in self.model.layers.values():
            hidden_states = layer(hidden_states, position_embeddings=(cos, sin))
        hidden_states = self.model.norm(hidden_states)
        return self.lm_head(hidden_states)
