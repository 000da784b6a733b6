"""Reads the tensors of a stage from this folder or from another one, or initialises them."""

import json
import zlib
from functools import partial
from pathlib import Path

import torch
from torch import nn

_FOLDER = Path(__file__).parent

# How the model initialises its parameters, if not as their modules do: by name, * for any number.
INITIALISATION = {
    "patch_embed.pos_embed": partial(nn.init.trunc_normal_, std=0.02),
}


def initialise(stage, seed):
    """Initialise parameters as the model does, with random numbers that follow from `seed` and from names.

    They are equal on every rank, and however the model is cut.
    """
    tied = json.loads((_FOLDER / "pipeline.json").read_text(encoding="utf-8"))["tied"]
    first_name = {name: group[0] for group in tied for name in group}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in reversed(list(stage.named_modules())):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                torch.manual_seed(zlib.crc32(name.encode(), seed))
                reset()
        for name, parameter in stage.named_parameters():
            name = first_name.get(name, name)
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            function = INITIALISATION.get(name, INITIALISATION.get(pattern))
            if function is not None:
                torch.manual_seed(zlib.crc32(name.encode(), seed))
                function(parameter)


def read_stage(stage, index, device, weights):
    """Replace a stage's tensors by those of this folder or, if `weights` is a path, of the safetensors files there.

    Without `weights`, parameters stay as they are. Buffers that are not in `state_dict()`, such as a rotary table, are
    always read from this folder.
    """
    manifest = json.loads((_FOLDER / "pipeline.json").read_text(encoding="utf-8"))
    entry, tied = manifest["stages"][index], {name: group for group in manifest["tied"] for name in group}
    parameters = entry["parameters"] if weights else []
    buffers = [buffer for buffer in entry["buffers"] if isinstance(buffer, str)]
    non_persistent = [buffer["name"] for buffer in entry["buffers"] if not isinstance(buffer, str)]
    tensors = _read(_FOLDER if isinstance(weights, bool) else Path(weights), [*parameters, *buffers], tied, device)
    tensors |= _read(_FOLDER, non_persistent, tied, device)
    previous = {
        **dict(stage.named_parameters(remove_duplicate=False)),
        **dict(stage.named_buffers(remove_duplicate=False)),
    }
    tied_parameters = {}  # a tied weight stays one parameter
    for name, tensor in tensors.items():
        if name not in previous:
            raise ValueError(f"the stage has no {name}, which pipeline.json lists")
        old = previous[name]
        if old.shape != tensor.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in its file and {list(old.shape)} in the stage")
        if isinstance(old, nn.Parameter):
            parameter = nn.Parameter(tensor.to(old.dtype), requires_grad=old.requires_grad)
            tensor = tied_parameters.setdefault(tied.get(name, [name])[0], parameter)
        owner, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(owner), attribute, tensor)
    unread = [name for name, tensor in previous.items() if tensor.is_meta and name not in tensors]
    if unread:
        raise ValueError(f"{unread[0]} of stage {index} has no value: list it in pipeline.json and store it in a shard")


def _read(folder, names, tied, device):
    """Read tensors from `model.safetensors`, or from the files of its index. A tied weight has one of several names."""
    if not names:
        return {}
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    tensors, opened = {}, {}
    for name in names:
        stored = next((tied_name for tied_name in tied.get(name, [name]) if tied_name in files), name)
        file = files.get(stored, "model.safetensors")
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file of its folder")
        if file not in opened:
            opened[file] = safe_open(folder / file, framework="pt", device=str(device))
        tensors[name] = opened[file].get_tensor(stored)
    return tensors
