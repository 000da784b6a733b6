"""Stage 1 of 3 of Translator (t5.py)."""

from torch import Tensor, nn

from .blocks import T5ForConditionalGenerationMiddle


class Stage1(nn.Module):
    """t5.encoder.block.2, t5.encoder.final_layer_norm, t5.decoder.embed_tokens, t5.decoder.block.0.

    decoder_input_ids i64[batch, decoder_input_ids_1], self_attention_position_bias f32[1, 4, input_ids_1,
    input_ids_1], hidden_states f32[batch, input_ids_1, 32] → encoder_hidden_states f32[batch, input_ids_1, 32],
    self_attention_position_bias f32[1, 4, decoder_input_ids_1, decoder_input_ids_1], hidden_states f32[batch,
    decoder_input_ids_1, 32].
    23.6 k parameters, 752.4 kFLOP.
    t5.decoder.embed_tokens.weight is tied to t5.shared.weight of stage 0, t5.lm_head.weight of stage 2.
    """

    def __init__(self):
        super().__init__()
        self.t5 = T5ForConditionalGenerationMiddle()

    def forward(
        self, decoder_input_ids: Tensor, self_attention_position_bias: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        encoder_hidden_states, self_attention_position_bias, hidden_states = self.t5(
            decoder_input_ids, hidden_states, self_attention_position_bias
        )
        return encoder_hidden_states, self_attention_position_bias, hidden_states
