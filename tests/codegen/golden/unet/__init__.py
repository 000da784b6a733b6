"""UNet (unet.py) in 3 stages, written by pipegraph 0.1.0."""

from collections.abc import Mapping
from os import PathLike

import torch
from torch import nn

from .stage_0 import Stage0
from .stage_1 import Stage1
from .stage_2 import Stage2
from .weights import initialise, read_stage

__all__ = ["NUM_STAGES", "Stage0", "Stage1", "Stage2", "load_stage"]

NUM_STAGES = 3
_STAGES = (Stage0, Stage1, Stage2)


def load_stage(
    index: int,
    device: str | torch.device = "cpu",
    weights: bool | str | PathLike[str] | Mapping[str, torch.Tensor] = True,
    seed: int = 0,
) -> nn.Module:
    """Build stage `index` on `device`, in the mode (training or evaluation) that the model was in.

    With `weights`, parameters are read from the safetensors files of this folder. If `weights` is a path, parameters
    and the buffers of `state_dict()` are read from the Hugging Face checkpoint in that folder and converted to the
    stage's dtypes; a mapping from names to tensors is read in the same way. Without `weights`, parameters are
    initialised as the model does it, with random numbers that follow from `seed` and their names. Buffers are read in
    all cases, unless the device is meta.
    """
    is_meta = torch.device(device).type == "meta"
    with torch.device("meta" if weights or is_meta else "cpu"):
        stage = _STAGES[index]()
    if is_meta:
        return stage
    if not weights:
        initialise(stage, seed)
        stage.to(device)
    read_stage(stage, index, device, weights)
    return stage
