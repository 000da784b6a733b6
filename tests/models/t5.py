"""An encoder-decoder: the encoder's last value goes to every decoder layer, past the stages between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY = 89


class Translator(nn.Module):
    """Hides the wrapped model's many optional outputs: only the logits come out."""

    def __init__(self) -> None:
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
        self.t5 = T5ForConditionalGeneration(config)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.t5(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Translator()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


_generator = torch.Generator().manual_seed(0)
example_inputs = {
    "input_ids": torch.randint(VOCABULARY, (2, 10), generator=_generator),
    "decoder_input_ids": torch.randint(VOCABULARY, (2, 7), generator=_generator),
}
example_target = torch.randint(VOCABULARY, (2, 7), generator=_generator)
