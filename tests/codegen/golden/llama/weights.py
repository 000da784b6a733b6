"""Reads the tensors of a stage from this folder or from a Hugging Face checkpoint, or initialises them."""

import difflib
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
    "model.embed_tokens.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.self_attn.q_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.self_attn.k_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.self_attn.v_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.self_attn.o_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.mlp.gate_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.mlp.up_proj.weight": partial(nn.init.normal_, std=0.02),
    "model.layers.*.mlp.down_proj.weight": partial(nn.init.normal_, std=0.02),
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
    """Replace a stage's tensors by those of this folder or, if `weights` is a path, of the checkpoint there.

    `weights` may also be a mapping from names to tensors.

    Without `weights`, parameters stay as they are. Buffers that are not in `state_dict()`, such as a rotary table, are
    always read from this folder.
    """
    manifest = json.loads((_FOLDER / "pipeline.json").read_text(encoding="utf-8"))
    entry, tied = manifest["stages"][index], manifest["tied"]
    parameters = entry["parameters"] if weights else []
    buffers = [buffer for buffer in entry["buffers"] if isinstance(buffer, str)]
    non_persistent = [buffer["name"] for buffer in entry["buffers"] if not isinstance(buffer, str)]
    if isinstance(weights, bool):
        _replace(stage, [*parameters, *buffers, *non_persistent], tied, _FOLDER, device)
    else:
        _replace(stage, [*parameters, *buffers], tied, weights, device, manifest["checkpoint"])
        _replace(stage, non_persistent, tied, _FOLDER, device)
    for name, tensor in _tensors(stage).items():
        if tensor.is_meta:
            raise ValueError(
                f"{name} of stage {index} has no value: pipeline.json does not list it. List it there, in "
                f"stages[{index}], and store it in a safetensors file that the index names"
            )


def _tensors(stage):
    """Return the parameters and buffers of a stage by name, with every name of one that is used twice."""
    return {**dict(stage.named_parameters(remove_duplicate=False)), **dict(stage.named_buffers(remove_duplicate=False))}


def _replace(stage, names, tied, source, device, checkpoint=None):
    """Replace the tensors of these names by those of a folder or a mapping. Tied weights stay one parameter."""
    if not names:
        return
    files = (_Tensors if isinstance(source, Mapping) else _Files)(source, device, checkpoint or {})
    groups = {name: group for group in tied for name in group}
    parts = {name: files.find(groups.get(name, [name])) for name in names}  # all of them, before one is read
    if missing := [name for name in names if parts[name] is None]:
        nearest = difflib.get_close_matches(missing[0], files.names, n=1)
        hint = f"the nearest name there is {nearest[0]}" if nearest else "load_stage(weights=DIR) reads a checkpoint's"
        raise ValueError(f"{files.listing} lacks {', '.join(missing)}; {hint}")
    modules, previous = dict(stage.named_modules(remove_duplicate=False)), _tensors(stage)
    tensors = {}
    for name in names:
        if name not in previous:
            raise ValueError(f"the stage has no {name}, which pipeline.json lists")
        owner, _, attribute = name.rpartition(".")
        old = previous[name]
        first = groups.get(name, [name])[0]
        tensor = tensors[first] if first in tensors else files.read(parts[name], old.shape, old.dtype)
        if isinstance(old, nn.Parameter) and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
        tensors[first] = tensor
        setattr(modules[owner], attribute, tensor)


class _Tensors:
    """The tensors of a mapping, by their names.

    `checkpoint` lists the tensors that Hugging Face transformers stores under another name, or in parts.
    """

    def __init__(self, tensors, device, checkpoint):
        self.device, self.checkpoint, self.names, self.tensors = device, checkpoint, tensors.keys(), tensors
        self.listing = "the dict" if isinstance(tensors, dict) else tensors

    def get(self, name):
        return self.tensors[name], self.listing

    def find(self, names):
        """Return the names of the parts that make up a tensor; None if one is missing. A tied one has several `names`.

        A `*` in the name of a part that is no tensor's stands for each index of the tensor's first dimension.
        """
        stored = self.checkpoint.get("stored", {})
        if [] in [stored.get(name) for name in names]:
            raise ValueError(f"{names[0]} is stored in a form that only transformers can read")
        for parts in (*([name] for name in names), *(stored[name] for name in names if name in stored)):
            stored_parts = [self.stored_name(part) for part in parts]
            if None not in stored_parts:
                return stored_parts
        return None

    def stored_name(self, name):
        """Return a name as it is stored, with or without the prefix of the base model; None if there is none."""
        prefix = self.checkpoint.get("base_model_prefix", "")
        for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
            if candidate in self.names or candidate.replace("*", "0") in self.names:
                return candidate
        return None

    def read(self, parts, shape, dtype):
        """Read a tensor, whole or joined from parts: along its first dimension, or its second if a `*` counts that."""
        is_counted = "*" in parts[0] and parts[0] not in self.names
        if len(parts) == 1 and not is_counted:
            return self.tensor(parts[0], shape, dtype)
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        for number, row in enumerate(whole if is_counted else whole[None]):
            for name, part in zip(parts, row.chunk(len(parts)), strict=True):
                part.copy_(self.tensor(name.replace("*", str(number)) if is_counted else name, part.shape, dtype))
        return whole

    def tensor(self, name, shape, dtype):
        """Read one tensor, which must have this shape. Convert it to this dtype unless it is quantized."""
        if name not in self.names:
            raise ValueError(f"{self.listing} lacks {name}")
        tensor, place = self.get(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in {place} and {list(shape)} in the stage")
        converts = tensor.is_floating_point() and dtype.is_floating_point and tensor.itemsize > 1
        if tensor.dtype != dtype and not converts:
            raise ValueError(f"{name} is {tensor.dtype} in {place}, which is not converted to the stage's {dtype}")
        return tensor.to(self.device, dtype)


class _Files(_Tensors):
    """The tensors of a folder with one safetensors file, or with several and an index. Files are opened when needed."""

    def __init__(self, folder, device, checkpoint):
        self.folder, self.device, self.checkpoint, self.opened = Path(folder), device, checkpoint, {}
        self.listing = self.folder / "model.safetensors.index.json"
        if self.listing.is_file():
            try:
                self.names = dict(json.loads(self.listing.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.listing} is no index of safetensors, or truncated: {error!r}") from None
        else:
            self.listing = self.folder / "model.safetensors"
            self.names = dict.fromkeys(self.open(self.listing.name).keys(), self.listing.name)

    def get(self, name):
        file = self.names[name]
        return self.open(file).get_tensor(name), self.folder / file

    def open(self, file):
        from safetensors import SafetensorError, safe_open

        if Path(file).name != file:
            raise ValueError(f"{self.listing} names {file!r}, which is not a file of its folder")
        if file not in self.opened:
            try:
                self.opened[file] = safe_open(self.folder / file, framework="pt", device=str(self.device))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / file} cannot be read, or is truncated: {error}") from None
        return self.opened[file]
