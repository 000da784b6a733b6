"""F, I and W of one stage of a small model, compared with torch.compile's forward and backward of the same stage.

    python benchmarks/kernels.py --model llama --rounds 30

One process, one thread. The contenders take turns, round by round, and ratios are taken within a round, because two
separate runs on a shared machine differ by more than what is measured. Each contender adds to `.grad` and begins a
round without one.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import pipegraph
from examples import unet
from pipegraph.kernels import StageKernels, make

IMAGES = 8, 3, 96, 96


def llama() -> tuple[nn.Module, Tensor, list[str]]:
    """Four decoder layers of width 256, between others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.randint(0, 512, (4, 128)), ["model.layers.1", "model.layers.5"]


def resnet() -> tuple[nn.Module, Tensor, list[str]]:
    """A ResNet 18 without its first layers: blocks with batch norms, equal ones and others."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    return ResNetForImageClassification(config), torch.randn(IMAGES), ["resnet.encoder.stages.0.layers.1"]


def mobilenet() -> tuple[nn.Module, Tensor, list[str]]:
    """A MobileNet V2 without its first layers: depthwise convolutions in blocks, equal ones and others."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=10))
    return model, torch.randn(IMAGES), ["mobilenet_v2.layer.1"]


def u_net() -> tuple[nn.Module, Tensor, list[str]]:
    """The U-Net of `examples/unet.py` at twice its width, without its first level."""
    return unet.UNet(32), torch.randn(4, 3, 64, 64), ["down.1"]


MODELS = {"llama": llama, "resnet": resnet, "mobilenet": mobilenet, "u-net": u_net}


def build_stage(name: str, folder: Path) -> tuple[nn.Module, list[Tensor]]:
    """Return the second stage of a package that pipegraph wrote, and inputs of it."""
    torch.manual_seed(0)
    model, example, points = MODELS[name]()
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (example,)), points=points), folder)
    manifest = package.manifest.at_capture()
    inputs = [
        torch.randn(tuple(map(int, manifest.values[input_name].shape))) for input_name in manifest.stages[1].inputs
    ]
    return package.load_stage(1, "cpu"), inputs


def module_step(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward by autograd."""

    def run() -> None:
        module(*(tensor.detach().requires_grad_() for tensor in inputs)).backward(gradient)

    return run


def kernels_step(
    kernels: StageKernels, inputs: Sequence[Tensor], gradient: Tensor, divided: bool
) -> Callable[[], None]:
    """Return a function that runs F, then I and W if `divided`, else B."""

    def run() -> None:
        saved = kernels.forward(inputs).saved
        if divided:
            kernels.input_backward(saved, (gradient,))
            kernels.weight_backward(saved)
        else:
            kernels.backward(saved, (gradient,))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2, help="microbatches in a round")
    parser.add_argument("--recompute", default="min-cut")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stage, inputs = build_stage(options.model, Path(folder) / "package")
        gradient = torch.randn_like(stage(*inputs))
        modules = {name: copy.deepcopy(stage) for name in ("F I W", "F B", "torch.compile", "eager")}
    kernels = {
        name: (make("inductor", modules[name], (True,) * len(inputs), (True,), recompute=options.recompute))
        for name in list(modules)[:2]
    }
    runs = {
        "torch.compile": module_step(torch.compile(modules["torch.compile"]), inputs, gradient),
        "F I W": kernels_step(kernels["F I W"], inputs, gradient, True),
        "F B": kernels_step(kernels["F B"], inputs, gradient, False),
        "eager": module_step(modules["eager"], inputs, gradient),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            print(f"{name:14} first {time.perf_counter() - started:6.2f} s")
    report(modules, runs, options.rounds, options.repeats)


def report(modules: dict[str, nn.Module], runs: dict[str, Callable[[], None]], rounds: int, repeats: int) -> None:
    """Time all in turns; print medians, and quartiles of the ratios to the first one within a round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds + 3):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            modules[name].zero_grad()
            started = time.perf_counter()
            for _ in range(repeats):
                runs[name]()
            if number >= 3:
                times[name].append((time.perf_counter() - started) / repeats)
    base = times[order[0]]
    for name in order:
        ratios = [seconds / base_seconds for seconds, base_seconds in zip(times[name], base, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{name:14} median {statistics.median(times[name]) * 1e3:7.1f} ms   "
            f"ratio {quartiles[1]:.3f} ({quartiles[0]:.3f} – {quartiles[2]:.3f})"
        )


if __name__ == "__main__":
    main()
