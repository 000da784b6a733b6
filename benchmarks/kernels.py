"""F + I + W of one stage of a small Llama against torch.compile's forward and backward of the same stage.

    python benchmarks/kernels.py --layers 4 --rounds 30

One process, one thread. The contenders take turns, round by round, and ratios are taken within a round: on a shared
machine two separate runs differ by more than what is measured. Each contender adds to `.grad`, and begins a round
without one.
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


def stage(layers: int, dim: int, folder: Path) -> nn.Module:
    """A stage of so many decoder layers, from a package that pipegraph wrote."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=dim, intermediate_size=dim * 4, num_hidden_layers=layers + 2,
        num_attention_heads=dim // 32, num_key_value_heads=dim // 64, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE))
    captured = pipegraph.capture(LlamaForCausalLM(config), kwargs={"input_ids": tokens})
    plan = pipegraph.plan(captured, points=["model.layers.1", f"model.layers.{layers + 1}"])
    return pipegraph.write_package(plan, folder).load_stage(1, "cpu")


def of_module(module: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    """Forward and backward by autograd."""

    def run() -> None:
        module(x.detach().requires_grad_()).backward(gradient)

    return run


def of_kernels(kernels: StageKernels, x: Tensor, gradient: Tensor, divided: bool) -> Callable[[], None]:
    """F, then I and W, or B."""

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
    parser.add_argument("--recompute", default=None)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = stage(chosen.layers, chosen.dim, Path(folder) / "package")
        x, gradient = torch.randn(2, BATCH, SEQUENCE, chosen.dim).unbind()
        modules = {name: copy.deepcopy(made) for name in ("F I W", "F B", "torch.compile", "eager")}
    of = {
        name: (make("inductor", modules[name], (True,), (True,), recompute=chosen.recompute))
        for name in list(modules)[:2]
    }
    runs = {
        "torch.compile": of_module(torch.compile(modules["torch.compile"]), x, gradient),
        "F I W": of_kernels(of["F I W"], x, gradient, True),
        "F B": of_kernels(of["F B"], x, gradient, False),
        "eager": of_module(modules["eager"], x, gradient),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            print(f"{name:14} first {time.perf_counter() - started:6.2f} s")
    report(modules, runs, chosen.rounds, chosen.repeats)


def report(modules: dict[str, nn.Module], runs: dict[str, Callable[[], None]], rounds: int, repeats: int) -> None:
    """Time all in turns, and print medians and the ratios to the first one, pair by pair."""
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
        quarter = statistics.quantiles(ratios, n=4)
        print(
            f"{name:14} median {statistics.median(times[name]) * 1e3:7.1f} ms   "
            f"ratio {quarter[1]:.3f} ({quarter[0]:.3f} – {quarter[2]:.3f})"
        )


if __name__ == "__main__":
    main()
