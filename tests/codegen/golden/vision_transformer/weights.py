"""Reads the tensors of a stage from this folder or from another one, or initialises them."""

import json
import zlib
from collections.abc import Mapping
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

    `weights` may also be a mapping from names to tensors.

    Without `weights`, parameters stay as they are. Buffers that are not in `state_dict()`, such as a rotary table, are
    always read from this folder.
    """
    manifest = json.loads((_FOLDER / "pipeline.json").read_text(encoding="utf-8"))
    entry, tied = manifest["stages"][index], {name: group for group in manifest["tied"] for name in group}
    parameters = entry["parameters"] if weights else []
    buffers = [buffer for buffer in entry["buffers"] if isinstance(buffer, str)]
    non_persistent = [buffer["name"] for buffer in entry["buffers"] if not isinstance(buffer, str)]
    tensors = _read(_FOLDER if isinstance(weights, bool) else weights, [*parameters, *buffers], tied, device)
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


def _read(source, names, tied, device):
    """Read tensors from a folder or a mapping. A tied weight has one of several names there."""
    if not names:
        return {}
    stored_tensors = source if isinstance(source, Mapping) else _Files(Path(source), device)
    keys = stored_tensors.keys()
    stored = {name: next((other for other in tied.get(name, [name]) if other in keys), None) for name in names}
    if missing := [name for name in names if stored[name] is None]:
        raise ValueError(f"{'the dict' if isinstance(source, dict) else source} lacks {', '.join(missing)}")
    return {name: stored_tensors[stored[name]].to(device) for name in names}


class _Files:
    """The tensors of `model.safetensors`, or of the files of its index."""

    def __init__(self, folder, device):
        self.folder, self.device, self.opened = folder, device, {}
        self.index = folder / "model.safetensors.index.json"
        if self.index.is_file():
            self.files = json.loads(self.index.read_text(encoding="utf-8"))["weight_map"]
        else:
            self.files = dict.fromkeys(self.open("model.safetensors").keys(), "model.safetensors")

    def keys(self):
        return self.files.keys()

    def open(self, file):
        from safetensors import safe_open

        if Path(file).name != file:
            raise ValueError(f"{self.index} names {file!r}, which is not a file of its folder")
        if file not in self.opened:
            self.opened[file] = safe_open(self.folder / file, framework="pt", device=str(self.device))
        return self.opened[file]

    def __getitem__(self, name):
        return self.open(self.files[name]).get_tensor(name)
