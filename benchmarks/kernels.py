"""F, I and W of one stage of a small Llama, compared with torch.compile's forward and backward of the same stage.

    python benchmarks/kernels.py --layers 4 --rounds 30

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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.kernels import StageKernels, make

BATCH, SEQUENCE = 4, 128


def build_stage(layers: int, dim: int, folder: Path) -> nn.Module:
    """Return a stage of this many decoder layers, from a package that pipegraph wrote."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=dim, intermediate_size=dim * 4, num_hidden_layers=layers + 2,
        num_attention_heads=dim // 32, num_key_value_heads=dim // 64, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE))
    captured = pipegraph.capture(LlamaForCausalLM(config), kwargs={"input_ids": tokens})
    plan = pipegraph.plan(captured, points=["model.layers.1", f"model.layers.{layers + 1}"])
    return pipegraph.write_package(plan, folder).load_stage(1, "cpu")


def module_step(module: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward by autograd."""

    def run() -> None:
        module(x.detach().requires_grad_()).backward(gradient)

    return run


def kernels_step(kernels: StageKernels, x: Tensor, gradient: Tensor, divided: bool) -> Callable[[], None]:
    """Return a function that runs F, then I and W if `divided`, else B."""

    def run() -> None:
        saved = kernels.forward((x,)).saved
        if divided:
            kernels.input_backward(saved, (gradient,))
            kernels.weight_backward(saved)
        else:
            kernels.backward(saved, (gradient,))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2, help="microbatches in a round")
    parser.add_argument("--recompute", default="min-cut")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stage = build_stage(options.layers, options.dim, Path(folder) / "package")
        x, gradient = torch.randn(2, BATCH, SEQUENCE, options.dim).unbind()
        modules = {name: copy.deepcopy(stage) for name in ("F I W", "F B", "torch.compile", "eager")}
    kernels = {
        name: (make("inductor", modules[name], (True,), (True,), recompute=options.recompute))
        for name in list(modules)[:2]
    }
    runs = {
        "torch.compile": module_step(torch.compile(modules["torch.compile"]), x, gradient),
        "F I W": kernels_step(kernels["F I W"], x, gradient, True),
        "F B": kernels_step(kernels["F B"], x, gradient, False),
        "eager": module_step(modules["eager"], x, gradient),
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
        ratios = [mine / other for mine, other in zip(times[name], base, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"{name:14} median {statistics.median(times[name]) * 1e3:7.1f} ms   "
            f"ratio {quartiles[1]:.3f} ({quartiles[0]:.3f} – {quartiles[2]:.3f})"
        )


if __name__ == "__main__":
    main()
