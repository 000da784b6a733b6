"""UNet (unet.py) in 3 stages, written by pipegraph 0.1.0."""

import json
from pathlib import Path

import torch
from torch import nn

from .stage_0 import Stage0
from .stage_1 import Stage1
from .stage_2 import Stage2

__all__ = ["NUM_STAGES", "Stage0", "Stage1", "Stage2", "load_stage"]

NUM_STAGES = 3
_STAGES = (Stage0, Stage1, Stage2)
_FOLDER = Path(__file__).parent


def load_stage(index, device="cpu", weights=True):
    """Build stage `index` on `device`, in the mode (training or evaluation) that the model was in.

    With `weights`, parameters are read from the safetensors files of this folder. Without, they are as their
    constructors make them, and a bare `nn.Parameter(torch.empty(…))` holds no values yet. Buffers are read in both
    cases, unless the device is meta.
    """
    with torch.device("meta" if weights else device):
        stage = _STAGES[index]()
    if torch.device(device).type != "meta":
        _read(stage, index, device, weights)
    return stage


def _read(stage, index, device, weights):
    """Replace the tensors of a stage by those of the files; tied weights stay one parameter."""
    manifest = json.loads((_FOLDER / "pipeline.json").read_text(encoding="utf-8"))
    entry = manifest["stages"][index]
    buffers = [each if isinstance(each, str) else each["name"] for each in entry["buffers"]]
    names = [*entry["parameters"], *buffers] if weights else buffers
    stored = {name: group[0] for group in manifest["tied"] for name in group}
    tensors = _tensors([stored.get(name, name) for name in names], device)
    for name in names:
        tensor = tensors[stored.get(name, name)]
        owner, _, attribute = name.rpartition(".")
        module = stage.get_submodule(owner)
        before = getattr(module, attribute)
        if before.shape != tensor.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in the files and {list(before.shape)} in stage {index}")
        if isinstance(before, nn.Parameter) and not isinstance(tensor, nn.Parameter):
            tensor = tensors[stored.get(name, name)] = nn.Parameter(tensor, requires_grad=before.requires_grad)
        setattr(module, attribute, tensor)


def _tensors(names, device):
    """Read tensors by name, and no others."""
    if not names:
        return {}
    from safetensors import safe_open

    files = json.loads((_FOLDER / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    tensors = {}
    for file in sorted({files[name] for name in names}):
        with safe_open(_FOLDER / file, framework="pt", device=str(device)) as shard:
            for name in names:
                if files[name] == file:
                    tensors[name] = shard.get_tensor(name)
    return tensors
