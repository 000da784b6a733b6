"""Stage 1 of 3 of LlamaForCausalLM (hf:config.json)."""

from torch import Tensor, nn

from .blocks import LlamaModelMiddle


class Stage1(nn.Module):
    """model.layers.2 … model.layers.4.

    hidden_states f32[batch, input_ids_1, 128] → hidden_states f32[batch, input_ids_1, 128].
    553.7 k parameters, 166.7 MFLOP.
    """

    def __init__(self):
        super().__init__()
        self.model = LlamaModelMiddle()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.model(hidden_states)
