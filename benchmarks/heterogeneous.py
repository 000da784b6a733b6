"""Plans of models whose layers take unequal times, beside equal layers in Megatron's interleaved 1F1B.

    python -m benchmarks.heterogeneous [--model Gemma] [--ranks 8] [--microbatches 32] [--seq 4096]

Nothing runs: steps are predicted for H100. The models are like those of AdaPtis (Guo et al., arXiv:2509.23722), which
chooses cuts, placement and orders together and reports 1.42 times the speed of interleaved 1F1B on average, and 2.14 at
most: Gemma has a large vocabulary, DeepSeek dense layers before those of experts, and Nemotron-H layers of three kinds.
The paper's own layer times are not published; these are of a roofline.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pipegraph.package.prediction import Prediction

GEMMA: Final[dict[str, Any]] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
"""As wide as google/gemma-2-9b, with 32 of its 42 layers and a head of its own."""

DEEPSEEK: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""As wide as deepseek-ai/DeepSeek-V2-Lite, with 32 layers for its 27, of which 3 are dense."""

NEMOTRON_H: Final[dict[str, Any]] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-",
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
"""The first 48 of the 52 layers of nvidia/Nemotron-H-8B-Base-8K: Mamba-2 (M), MLP (-) and attention (*)."""

MODELS: Final = {"Gemma": GEMMA, "DeepSeek": DEEPSEEK, "Nemotron-H": NEMOTRON_H}


def equal_layers(layers: int, stages: int) -> str:
    """Megatron's layout of equal numbers of layers, with the embedding in the first stage and the loss in the last."""
    rows = ["t" * (layers // stages)] * stages
    rows[0], rows[-1] = f"E{rows[0]}", f"{rows[-1]}L"
    return "|".join(rows)


def compare(config: dict[str, Any], ranks: int, microbatches: int, seq: int) -> dict[str, tuple[str, float]]:
    """Return for each way to plan a model the schedule and the predicted seconds of a step."""
    import pipegraph
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.capture import capture
    from pipegraph.graph.sources import load
    from pipegraph.planner.comparison import candidates, compare_model
    from pipegraph.planner.plan_options import PlanOptions
    from pipegraph.workflows.batch import loss_and_target

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config))
        source = load(f"hf:{file}", weights=False, batch=1, seq=seq)
    captured = capture(source.model, source.args, source.kwargs)
    hardware, loss = Hardware.load("h100"), loss_and_target(source)
    layers = len([*source.model.get_submodule("model.layers").children()])

    def prediction(schedule: str, chunks: int) -> Prediction:
        """Of equal layers."""
        plan = pipegraph.plan(
            captured, points=equal_layers(layers, chunks * ranks), schedule=schedule, microbatches=microbatches,
            ranks=ranks, hardware=hardware, loss=loss, recompute="none",
        )  # fmt: skip
        assert plan.prediction is not None
        return plan.prediction

    interleaved, plain = prediction("interleaved-1f1b", 2), prediction("1f1b", 1)
    steps = {f"equal layers, {equal.schedule}": (equal.schedule, equal.value) for equal in (interleaved, plain)}
    plans = candidates(ranks, microbatches=[microbatches], recompute=["none"])
    options = PlanOptions(hardware=hardware, loss=loss)
    for way, searches in (("best named", False), ("best of all orders", True)):
        best = compare_model(captured, options, ranks, plans, searches).best
        steps[way] = best.schedule.name, best.value
    work = sum(stage.forward + stage.input_grad + stage.weight_grad for stage in plain.stages)
    steps["all ranks busy all the time"] = "", microbatches * work / ranks
    return steps


def main(
    model: Annotated[str, typer.Option(help="A part of a model's name.")] = "",
    ranks: int = 8,
    microbatches: int = 32,
    seq: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 4096,
) -> None:
    """Compare the planner's best plans with equal layers."""
    table = Table("model", "plan", "schedule", "step", "interleaved 1F1B ÷ it")
    for name, config in MODELS.items():
        if model not in name:
            continue
        start = time.perf_counter()
        steps = compare(config, ranks, microbatches, seq)
        (_, interleaved), *_ = steps.values()
        for way, (schedule, seconds) in steps.items():
            table.add_row(name, way, schedule, f"{seconds:.3f} s", f"{interleaved / seconds:.2f}")
        print(f"{name} took {time.perf_counter() - start:.0f} s", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
