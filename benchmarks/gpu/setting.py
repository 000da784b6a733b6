"""What is measured: a Llama of some size, its middle stage, and the device that runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.hardware import Hardware
from pipegraph.device import Device
from pipegraph.graph.captured import Captured
from pipegraph.graph.sources import load
from pipegraph.package import Package
from pipegraph.planner.plan import Plan
from pipegraph.units import format_number_of


@dataclass(frozen=True)
class Setting:
    """One measurement.

    Attributes:
        layers: of the stage that is measured; the model has one more on either side.
        width: of the model; a head has 64 of it.
        rows, length: of a microbatch.
        profile_names: the hardware profiles that predict blocks, of which the first one predicts all else; by default
            the one that has the device's name.
        folder: for the model's configuration and package.
    """

    device: torch.device
    layers: int
    width: int
    rows: int
    length: int
    rounds: int
    profile_names: tuple[str, ...]
    folder: Path = field(repr=False)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def title(self) -> str:
        """The device and the model, as a line."""
        layers = format_number_of("layer", self.layers)
        size = f"{layers} of width {self.width}, {self.rows} × {self.length} tokens, bfloat16"
        return f"{Device(self.device).name}, torch {torch.__version__}: {size}"

    @property
    def hardware(self) -> Hardware:
        """The profile that predicts."""
        return self.profiles[0]

    @cached_property
    def profiles(self) -> list[Hardware]:
        """All of them."""
        if self.profile_names:
            return [Hardware.load(profile) for profile in self.profile_names]
        if not self.is_gpu:
            return [Hardware.load("cpu")]
        name = Device(self.device).name.lower()
        profile_name = next((candidate for candidate in Hardware.names() if candidate in name), None)
        if profile_name is None:
            raise SystemExit(
                f"no profile is of {Device(self.device).name}.\n"
                "Try: pipegraph calibrate --device cuda -o gpu.json, and --profile gpu.json"
            )
        return [Hardware.load(profile_name)]

    @cached_property
    def captured(self) -> Captured:
        """The model, without memory."""
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": 512,
            "hidden_size": self.width,
            "intermediate_size": self.width * 7 // 2,
            "num_hidden_layers": self.layers + 2,
            "num_attention_heads": max(self.width // 64, 1),
            "num_key_value_heads": max(self.width // 256, 1),
            "use_cache": False,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "config.json"
        file.write_text(json.dumps(config))
        source = load(f"hf:{file}", weights=False, batch=self.rows, seq=self.length)
        return pipegraph.capture(source.model, source.args, source.kwargs)

    @cached_property
    def plan(self) -> Plan:
        """Three stages, of which the second is measured, with predictions."""
        points = ["model.layers.1", f"model.layers.{self.layers + 1}"]
        return pipegraph.plan(self.captured, points=points, balance="time", hardware=self.hardware)

    @cached_property
    def package(self) -> Path:
        """The package of the plan."""
        return pipegraph.write_package(self.plan, self.folder / "package", weights=False).path

    def stage(self) -> nn.Module:
        """The measured stage, on the device, with weights as the model starts."""
        return Package.open(self.package).load_stage(1, str(self.device), weights=False)

    def microbatch(self) -> tuple[Tensor, Tensor]:
        """What the stage takes, and the gradient of what it returns."""
        shape = 2, self.rows, self.length, self.width
        generator = torch.Generator(self.device).manual_seed(0)
        tensors = torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16)
        return tensors[0], tensors[1]
