"""Stage 2 of 3 of Translator (t5.py)."""

import torch
from torch import Tensor, nn

from .blocks import T5Block4, T5LayerNorm


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
        self.t5 = nn.Module()
        self.t5.decoder = nn.Module()
        self.t5.decoder.block = nn.ModuleDict({"1": T5Block4(1), "2": T5Block4(2)})
        self.t5.decoder.final_layer_norm = T5LayerNorm()
        self.t5.decoder.dropout = nn.Dropout(p=0.0)
        self.t5.lm_head = nn.Linear(32, 89, bias=False)

    def forward(
        self, encoder_hidden_states: Tensor, self_attention_position_bias: Tensor, hidden_states: Tensor
    ) -> Tensor:
        ones = torch.ones(
            self_attention_position_bias.shape[2],
            self_attention_position_bias.shape[2],
            dtype=torch.bool,
            device=encoder_hidden_states.device,
        )
        attention_mask = ones.tril()
        position_bias = torch.zeros(
            1,
            4,
            self_attention_position_bias.shape[2],
            encoder_hidden_states.shape[1],
            dtype=encoder_hidden_states.dtype,
            device=encoder_hidden_states.device,
        )
        for block in self.t5.decoder.block.values():
            hidden_states = block(
                hidden_states,
                attention_mask,
                self_attention_position_bias,
                encoder_hidden_states,
                encoder_decoder_position_bias=position_bias,
            )[0]
        hidden_states = self.t5.decoder.final_layer_norm(hidden_states)
        hidden_states = self.t5.decoder.dropout(hidden_states)
        sequence_output = hidden_states * 0.1767766952966369
        return self.t5.lm_head(sequence_output)
