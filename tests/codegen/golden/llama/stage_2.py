"""Stage 2 of 3 of LlamaForCausalLM (hf:config.json).

Stage2: the text of modeling_llama.py (Apache License; Copyright 2022 EleutherAI and the HuggingFace Inc. team).
"""

from torch import Tensor, nn

from .blocks import LlamaModelEnd


class Stage2(nn.Module):
    """model.layers.5 … model.layers.7, model.norm, lm_head.

    hidden_states f32[batch, input_ids_1, 128] → logits f32[batch, input_ids_1, 2048].
    816.0 k parameters, 233.8 MFLOP.
    lm_head.weight is tied to model.embed_tokens.weight of stage 0.
    """

    def __init__(self):
        super().__init__()
        self.model = LlamaModelEnd()
        self.lm_head = nn.Linear(128, 2048, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.model(hidden_states)
        logits = self.lm_head(hidden_states)

        return logits
