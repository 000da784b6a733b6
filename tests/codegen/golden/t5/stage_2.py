"""Stage 2 of 3 of Translator (t5.py)."""

from torch import Tensor, nn

from .blocks import T5ForConditionalGenerationEnd


class Stage2(nn.Module):
    """t5.decoder.block.1 … t5.decoder.block.2, t5.decoder.final_layer_norm, t5.lm_head.

    encoder_hidden_states f32[batch, input_ids_1, 32], self_attention_position_bias f32[1, 4,
    decoder_input_ids_1, decoder_input_ids_1], hidden_states f32[batch, decoder_input_ids_1, 32] → lm_logits
    f32[batch, decoder_input_ids_1, 89].
    27.6 k parameters, 878.0 kFLOP.
    t5.lm_head.weight is tied to t5.shared.weight of stage 0, t5.decoder.embed_tokens.weight of stage 1.
    """

    def __init__(self):
        super().__init__()
        self.t5 = T5ForConditionalGenerationEnd()

    def forward(
        self, encoder_hidden_states: Tensor, self_attention_position_bias: Tensor, hidden_states: Tensor
    ) -> Tensor:
        return self.t5(hidden_states, self_attention_position_bias, encoder_hidden_states)
