"""Stage 0 of 3 of LlamaForCausalLM (hf:config.json)."""

from torch import Tensor, nn

from .blocks import LlamaModelStart


class Stage0(nn.Module):
    """model.embed_tokens, model.layers.0 … model.layers.1.

    input_ids i64[batch, input_ids_1] → hidden_states f32[batch, input_ids_1, 128].
    631.3 k parameters, 111.1 MFLOP.
    model.embed_tokens.weight is tied to lm_head.weight of stage 2.
    """

    def __init__(self):
        super().__init__()
        self.model = LlamaModelStart()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids)
