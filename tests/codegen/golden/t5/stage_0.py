"""Stage 0 of 3 of Translator (t5.py)."""

from torch import Tensor, nn

from .blocks import T5ForConditionalGenerationStart


class Stage0(nn.Module):
    """t5.encoder.embed_tokens, t5.encoder.block.0 … t5.encoder.block.1.

    input_ids i64[batch, input_ids_1] → self_attention_position_bias f32[1, 4, input_ids_1, input_ids_1],
    hidden_states f32[batch, input_ids_1, 32].
    19.4 k parameters, 706.6 kFLOP.
    t5.shared.weight is tied to t5.decoder.embed_tokens.weight of stage 1, t5.lm_head.weight of stage 2.
    """

    def __init__(self):
        super().__init__()
        self.t5 = T5ForConditionalGenerationStart()
        self.t5.encoder.embed_tokens.weight = self.t5.shared.weight

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        self_attention_position_bias, hidden_states = self.t5(input_ids)
        return self_attention_position_bias, hidden_states
