"""Small packages written by hand, each with the plain model that it has to equal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET, structs
from safetensors.torch import save_file
from torch import Tensor, nn

from pipegraph.package import (
    CALLER,
    MANIFEST,
    WEIGHTS_INDEX,
    Buffer,
    ListedFile,
    Manifest,
    ModelEntry,
    Package,
    StageEntry,
    Value,
)
from pipegraph.package.manifest import Role
from pipegraph.package.sizes import BATCH, Size
from pipegraph.runtime.batch import fill_structure

INIT = """
import json
from pathlib import Path

from safetensors.torch import load_file

{imports}

STAGES = [{classes}]


def load_stage(index, device="cpu", weights=True):
    stage = STAGES[index]()
    folder = Path(__file__).parent
    manifest = json.loads((folder / "pipeline.json").read_text())
    shard = manifest["stages"][index]["weights"]
    stored = load_file(folder / shard) if shard else {{}}
    shared = {{}}
    for each in (folder / "stage-0.safetensors", folder / "stage-1.safetensors"):
        shared |= load_file(each) if each.exists() else {{}}
    first = {{name: group[0] for group in manifest["tied"] for name in group}}
    for name, tensor in [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers()]:
        name = first.get(name, name)
        if name in stored or name in shared:
            tensor.data.copy_(stored[name] if name in stored else shared[name])
        elif weights:
            raise KeyError(name)
    return stage.to(device)
"""


@dataclass(frozen=True)
class Stage:
    """What a stage takes and returns, its layers, and the body of its forward."""

    inputs: str
    outputs: str
    init: str
    forward: str


@dataclass(frozen=True)
class Sketch:
    """A package in few words. A value is (dtype, shape of a microbatch, requires_grad); the callers' come first.

    A shape may begin with "batch", which is 2 at capture.
    """

    stages: tuple[Stage, ...]
    values: dict[str, tuple[str, tuple[int | str, ...], bool]]
    outputs: Any
    tied: tuple[tuple[str, ...], ...] = ()
    integers: int = 6
    constants: dict[str, object] = field(default_factory=dict)
    kwargs: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # in addition to "batch", at capture
    roles: dict[str, Role] = field(default_factory=dict)  # "whole" and "list"; other values have rows


def write(sketch: Sketch, folder: Path, weights: bool = True) -> Path:
    """Write the package of a sketch, with seeded random weights."""
    folder.mkdir(parents=True)
    entries, weight_map, stored = [], {}, set()
    first = {name: group[0] for group in sketch.tied for name in group}
    for index, stage in enumerate(sketch.stages):
        source = (
            f"import torch\nfrom torch import nn\n\n\nclass Stage{index}(nn.Module):\n"
            f"    def __init__(self):\n        super().__init__()\n{textwrap.indent(stage.init, ' ' * 8)}\n\n"
            f"    def forward(self, {stage.inputs}):\n{textwrap.indent(stage.forward, ' ' * 8)}\n"
        )
        (folder / f"stage_{index}.py").write_text(source)
        scope: dict[str, Any] = {}
        exec(source, scope)
        torch.manual_seed(index)
        module = scope[f"Stage{index}"]()
        shard, tensors = f"stage-{index}.safetensors", {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            key = first.get(name, name)
            if weights and key not in stored:
                stored.add(key)
                tensors[key], weight_map[key] = parameter.detach().clone(), shard
        persistent = module.state_dict().keys()
        buffers = tuple(Buffer(name, name in persistent) for name, _ in module.named_buffers())
        tensors |= {name: buffer.clone() for name, buffer in module.named_buffers()}
        weight_map |= {buffer.name: shard for buffer in buffers}
        save_file(tensors, folder / shard)
        parameters = tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
        inputs, outputs = tuple(stage.inputs.split(", ")), tuple(stage.outputs.split(", "))
        part = shard if tensors else None
        entries.append(StageEntry(index, f"stage_{index}", f"Stage{index}", inputs, outputs, parameters, buffers, part))
    count = range(len(entries))
    (folder / "__init__.py").write_text(
        INIT.format(
            imports="\n".join(f"from .stage_{index} import Stage{index}" for index in count),
            classes=", ".join(f"Stage{index}" for index in count),
        )
    )
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    files = {file.name: ListedFile.read(file) for file in folder.glob("*.py")}
    shards = {name: ListedFile.read(folder / name) for name in {*weight_map.values(), WEIGHTS_INDEX}}
    manifest = structs.replace(_manifest(sketch, entries), files=files, shards=shards)
    (folder / MANIFEST).write_text(manifest.to_json())
    return folder


def _manifest(sketch: Sketch, stages: Sequence[StageEntry]) -> Manifest:
    values = {}
    for name, (dtype, shape, requires_grad) in sketch.values.items():
        producer = next((stage.index for stage in stages if name in stage.outputs and name not in stage.inputs), CALLER)
        consumers = tuple(stage.index for stage in stages if name in stage.inputs)
        bound = sketch.integers if dtype == "int64" else None
        values[name] = Value(
            name,
            dtype,
            shape,
            producer,
            consumers,
            requires_grad,
            bound,
            batch_dim=0 if shape and name not in sketch.roles else None,
            role=sketch.roles.get(name, UNSET) if producer == CALLER else UNSET,
        )
    for name, constant in sketch.constants.items():
        values[name] = Value(name, "", (), CALLER, (), constant=constant)
    args = [name for name, value in values.items() if value.producer == CALLER and name not in sketch.kwargs.values()]
    return Manifest(
        generator="pipegraph",
        model=ModelEntry("sketch", "Sketch"),
        args=args,
        kwargs=sketch.kwargs,
        outputs=sketch.outputs,
        sizes={
            **({BATCH: Size(2, min=1)} if any(BATCH in value.shape for value in values.values()) else {}),
            **{name: Size(size, min=1) for name, size in sketch.sizes.items()},
        },
        values=values,
        stages=tuple(stages),
        tied=sketch.tied,
    )


class Reference:
    """The unsplit model: the stages' modules called one after the other under plain autograd, tied weights shared."""

    def __init__(self, package: Package) -> None:
        self.manifest = package.manifest
        self.stages = [package.load_stage(stage.index) for stage in self.manifest.stages]
        self.parameters: dict[str, nn.Parameter] = {}
        shared: dict[str, nn.Parameter] = {}
        for module in self.stages:
            for name, parameter in list(module.named_parameters(remove_duplicate=False)):
                shared_parameter = shared.setdefault(self.manifest.stored_name(name), parameter)
                path, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(path), attribute, shared_parameter)
                self.parameters[name] = shared_parameter

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        values = dict(inputs)
        for entry, module in zip(self.manifest.stages, self.stages, strict=True):
            returned = module(*(values[name] for name in entry.inputs))
            values.update(zip(entry.outputs, returned if isinstance(returned, tuple) else (returned,), strict=True))
        return fill_structure(self.manifest.outputs, values)


def batch(manifest: Manifest, microbatches: int, seed: int = 0) -> dict[str, Tensor]:
    """Seeded inputs for this number of microbatches, by name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in manifest.at_capture().values.items():
        if value.producer == CALLER and not value.is_constant:
            shape = (value.shape[0] * microbatches, *value.shape[1:]) if value.shape else ()
            if value.bound is not None:
                tensors[name] = torch.randint(value.bound, shape, generator=generator)
            else:
                tensors[name] = torch.randn(shape, generator=generator).to(getattr(torch, value.dtype))
    return tensors


def loss(output: Any, target: Any) -> Tensor:
    """The sum over all outputs of their mean square difference to the target."""
    if isinstance(output, Mapping):
        return sum((loss(item, target) for item in output.values()), start=torch.zeros(()))
    if isinstance(output, tuple):
        return sum((loss(item, target) for item in output), start=torch.zeros(()))
    if output is None:
        return torch.zeros(())
    return (output - target.reshape(-1, *[1] * (output.dim() - 1))).square().mean()
