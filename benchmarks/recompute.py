"""Cuts and recomputation chosen together: compared with every combination, and with the best uniform choice.

python benchmarks/recompute.py oracle [--cases 500]
    Random chains with random costs of recomputing, limits and schedules, each solved by the search alone and by trying
    every combination of cuts and choices.

python benchmarks/recompute.py models [--seq 4096] [--model Llama]
    The models of AdaPipe (Sun et al., ASPLOS 2024), GPT-3 with 175 B parameters and Llama 2 with 70 B, on 64 A100 of
    80 GB as 8 stages × 8 ranks along tp. Nothing runs: steps are predicted.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False)

GPT3: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 49152,
    "hidden_size": 12288,
    "max_position_embeddings": 16384,
    "num_attention_heads": 96,
    "num_hidden_layers": 96,
    "torch_dtype": "bfloat16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 12288,
    "dropout": 0.0,
}
"""OPT-175B, which has the sizes of GPT-3 (arXiv:2205.01068)."""

LLAMA_2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 16384,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
"""https://huggingface.co/meta-llama/Llama-2-70b-hf/blob/main/config.json"""

_GPT3_PLAN = {
    f"model.decoder.layers.*.{name}": style
    for style, names in {
        "colwise": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
        "rowwise": ("self_attn.out_proj", "fc2"),
    }.items()
    for name in names
}
MODELS: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {
    "GPT-3 175 B": (GPT3, _GPT3_PLAN),
    "Llama 2 70 B": (LLAMA_2, {}),
}
BATCHES = {4096: 128, 8192: 64, 16384: 32}
"""Tokens of a row → rows of a step, in microbatches of one row."""


@app.command()
def oracle(cases: int = 500) -> None:
    """Compare with every combination."""
    from pipegraph.planner.solver import cut_search
    from tests.planner.test_option_search import check_against_brute_force

    cut_search._ALL_STEPS = 0  # so that the search has to find what trying all would
    start, solved, proved, better, gap = time.perf_counter(), 0, 0, 0, 0.0
    for seed in range(cases):
        solution = check_against_brute_force(seed)
        if solution is not None:
            solved, proved, gap = solved + 1, proved + (solution.gap == 0), max(gap, solution.gap)
            better += solution.value < solution.uniform * (1 - 1e-9)
    print(
        f"{cases} cases in {time.perf_counter() - start:.0f} s: {solved} solved, each equal to the best of all "
        f"combinations; of the others none fits.\n{proved} proved by the bound, the largest gap {gap:.1%}; "
        f"{better} better than the best uniform choice."
    )


@app.command()
def models(
    seq: Annotated[list[int], typer.Option(help="Tokens of a row.")] = [4096],  # noqa: B006
    model: Annotated[str, typer.Option(help="A part of a model's name.")] = "",
    effort: float = 1.0,
) -> None:
    """Compare with the best uniform choice."""
    table = Table("model", "tokens", "recompute none", "block", "best uniform", "chosen", "gain", "gap", "GiB", "s")
    for name in (full_name for full_name in MODELS if model in full_name):
        for length in seq:
            table.add_row(name, str(length), *_measured(name, length, effort))
    Console(width=140).print(table)


def _measured(name: str, length: int, effort: float) -> list[str]:
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.capture import capture_rows
    from pipegraph.graph.sources import load
    from pipegraph.graph.sources.huggingface import tp_plan_of
    from pipegraph.planner.joint_plan.choices import Layout
    from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, tensor_shares
    from pipegraph.planner.plan_options import PlanOptions
    from pipegraph.planner.recompute_options import RecomputeOptions
    from pipegraph.planner.solver.solve import MemoryShortage, Problem
    from pipegraph.schedule import build
    from pipegraph.workflows.batch import loss_and_target

    start = time.perf_counter()
    config, plan = MODELS[name]
    hardware, layout = Hardware.load("a100"), Layout(8, 1, 1, 8)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        source = load(f"hf:{file}", weights=False, batch=1, seq=length)
    captured = capture_rows(source, 1)
    priced = RecomputeOptions.price(captured, PlanOptions(hardware=hardware, loss=loss_and_target(source)))
    shares = tensor_shares(priced.costs[0].priced.chain, plan or tp_plan_of(source.model))
    options = [choice.segments for choice in LayoutCosts(hardware, 1, priced, priced, shares).options(layout, 1)]

    def solved(chosen: list[int], effort: float) -> Any:
        problem = Problem(
            [options[option] for option in chosen],
            build("1f1b", 8, BATCHES[length]),
            memory_bytes=hardware.memory_bytes,
            link=lambda rank, peer: hardware.link(rank * layout.stride, peer * layout.stride),
        )
        return problem.solve(priced.uniform if len(chosen) > 1 else (0,), effort)

    uniform = []
    for option in priced.uniform:
        try:
            uniform.append(solved([option], 0.3 * effort).value)
        except MemoryShortage:
            uniform.append(float("inf"))
    solution = solved([*range(len(options))], effort)
    best = min(*uniform, solution.uniform)
    seconds = [f"{value:.2f} s" if value < float("inf") else "does not fit" for value in (uniform[0], uniform[2], best)]
    return [
        *seconds, f"{solution.value:.2f} s", f"{best / solution.value:.3f} ×", f"{solution.gap:.1%}",
        f"{max(solution.memory) / 2**30:.0f}", f"{time.perf_counter() - start:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    app()
