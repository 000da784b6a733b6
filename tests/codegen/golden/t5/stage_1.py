"""Stage 1 of 3 of Translator (t5.py)."""

import torch
from torch import Tensor, nn

from .blocks import T5Block2, T5Block3, T5LayerNorm


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
        self.t5 = nn.Module()
        self.t5.encoder = nn.Module()
        self.t5.encoder.block = nn.ModuleDict({"2": T5Block2()})
        self.t5.encoder.final_layer_norm = T5LayerNorm()
        self.t5.encoder.dropout = nn.Dropout(p=0.0)
        self.t5.decoder = nn.Module()
        self.t5.decoder.embed_tokens = nn.Embedding(89, 32)
        self.t5.decoder.block = nn.ModuleList([T5Block3()])
        self.t5.decoder.dropout = nn.Dropout(p=0.0)

    def forward(
        self, decoder_input_ids: Tensor, self_attention_position_bias: Tensor, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = self.t5.encoder.block["2"](hidden_states, position_bias=self_attention_position_bias)[0]
        hidden_states = self.t5.encoder.final_layer_norm(hidden_states)
        encoder_hidden_states = self.t5.encoder.dropout(hidden_states)
        inputs_embeds = self.t5.decoder.embed_tokens(decoder_input_ids)
        ones = torch.ones(
            decoder_input_ids.shape[1], decoder_input_ids.shape[1], dtype=torch.bool, device=decoder_input_ids.device
        )
        attention_mask = ones.tril()
        hidden_states = self.t5.decoder.dropout(inputs_embeds)
        hidden_states, self_attention_position_bias, _ = self.t5.decoder.block[0](
            hidden_states, attention_mask, encoder_hidden_states=encoder_hidden_states
        )
        return encoder_hidden_states, self_attention_position_bias, hidden_states
