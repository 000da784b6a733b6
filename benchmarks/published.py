"""Steps that others have published, and what the planner predicts for the same set-up.

    python -m benchmarks.published              Megatron-LM's models on A100, Llama 3 on H100; nothing runs here
    python -m benchmarks.published --best       with the planner's own best plan next to each

A set-up names the mesh, the schedule and the rows of a microbatch; where to cut and what to compute again is the
planner's choice. Models are captured without memory, with as many tokens in a row as published. A published step
includes the optimizer, which reads and writes its state once: that is added to what the planner predicts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.planner_scale import LLAMA_405B
from benchmarks.recompute import GPT3

MEGATRON: Final = "Korthikanti et al., arXiv:2205.05198, table 5, sequence parallelism and selective recompute"
LLAMA: Final = "Llama 3, arXiv:2407.21783, table 4: 8,192 tokens a row; model FLOPs are 6 a parameter and token"


def gpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """A GPT of Megatron-LM in the classes of OPT: 2,048 tokens a row, 51,200 words."""
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width, "num_hidden_layers": layers}
    # Megatron-LM had no kernel for the whole attention yet: scores are in memory, and computed again for the backward.
    return GPT3 | sizes | {"num_attention_heads": heads, "vocab_size": 51200, "_attn_implementation": "eager"}


GPT_PLAN: Final = {
    "model.decoder.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    **dict.fromkeys((f"model.decoder.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
}
"""As Megatron-LM divides layers, embeddings and the head."""


@dataclass(frozen=True)
class SetUp:
    """A published step.

    Attributes:
        mesh: pp, copies of the pipeline, and tp.
        chunks: stages of each rank.
        rows: of a microbatch; ``global_batch`` those of a step.
        seconds: as published.
        sharded: whether the copies divide parameters, gradients and optimizer state; else the optimizer's state alone.
    """

    name: str
    config: Mapping[str, Any]
    tokens: int
    hardware: str
    mesh: tuple[int, int, int]
    chunks: int
    rows: int
    global_batch: int
    seconds: float
    source: str
    plan: Mapping[str, str] | None = None
    sharded: bool = False

    @property
    def devices(self) -> int:
        pp, copies, tp = self.mesh
        return pp * copies * tp


def _llama_seconds(devices: int, tflops: float) -> float:
    return 6 * 405.85e9 * 2048 * 8192 / (devices * tflops * 1e12)


SET_UPS: Final = (
    SetUp("GPT 22 B", gpt(6144, 48, 64), 2048, "a100", (1, 1, 8), 1, 4, 4, 1.10, MEGATRON, GPT_PLAN),
    SetUp("GPT 175 B", gpt(12288, 96, 96), 2048, "a100", (8, 1, 8), 3, 1, 64, 13.75, MEGATRON, GPT_PLAN),
    SetUp("GPT 530 B", gpt(20480, 105, 128), 2048, "a100", (35, 1, 8), 3, 1, 280, 37.83, MEGATRON, GPT_PLAN),
    SetUp("GPT 1 T", gpt(25600, 128, 160), 2048, "a100", (64, 1, 8), 1, 1, 512, 71.49, MEGATRON, GPT_PLAN),
    SetUp(
        "Llama 3 405 B", LLAMA_405B, 8192, "h100", (16, 64, 8), 8, 1, 2048, _llama_seconds(8192, 430), LLAMA,
        sharded=True,
    ),
    SetUp(
        "Llama 3 405 B", LLAMA_405B, 8192, "h100", (16, 128, 8), 8, 1, 2048, _llama_seconds(16384, 400), LLAMA,
        sharded=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a set-up: seconds of a step, bytes of the fullest rank, and the seconds that it took."""

    step: float
    memory: int
    took: float
    best: str = ""


def predict(set_up: SetUp, finds_best: bool = False) -> Prediction:
    """Price a model, and choose cuts and recompute for the mesh that was published."""
    from pipegraph.cost.hardware import Hardware
    from pipegraph.cost.training_state import TrainingState
    from pipegraph.graph.capture import capture_rows
    from pipegraph.graph.sources import load
    from pipegraph.graph.sources.huggingface import tp_plan_of
    from pipegraph.planner.joint_plan.choices import JointCandidate, Layout
    from pipegraph.planner.joint_plan.layout_costs import LayoutCosts, tensor_shares
    from pipegraph.planner.joint_plan.search import JointSearch
    from pipegraph.planner.plan_options import PlanOptions
    from pipegraph.planner.recompute_options import RecomputeOptions
    from pipegraph.planner.step_prediction import rank_memory
    from pipegraph.workflows.batch import loss_and_target

    start = time.perf_counter()
    hardware = Hardware.load(set_up.hardware)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(set_up.config))
        source = load(f"hf:{file}", weights=False, batch=set_up.rows, seq=set_up.tokens)
    options = PlanOptions(hardware=hardware, memory_bytes=hardware.memory_bytes, training=TrainingState("bf16-master"))
    single, double = (
        RecomputeOptions.price(
            capture_rows(source, rows), replace(options, loss=loss_and_target(replace(source, batch=rows)))
        )
        for rows in (set_up.rows, 2 * set_up.rows)
    )
    single, double = single.only(double.recompute), double.only(single.recompute)
    shares = tensor_shares(single.costs[0].priced.chain, set_up.plan or tp_plan_of(source.model), divides_tokens=True)
    costs = LayoutCosts(hardware, set_up.rows, single, double, shares, options.factors)
    pp, copies, tp = set_up.mesh
    layout = Layout(pp, 1, copies, tp) if set_up.sharded else Layout(pp, copies, 1, tp, zero1=copies > 1)
    schedule = "interleaved-1f1b" if set_up.chunks > 1 else "1f1b"
    microbatches = set_up.global_batch // (copies * set_up.rows)
    candidate = JointCandidate(layout, schedule, set_up.chunks, set_up.rows, microbatches)
    search = JointSearch(costs, set_up.devices, set_up.global_batch, hardware.memory_bytes, zero1=not set_up.sharded)
    choice = search.search(candidate)
    took = time.perf_counter() - start
    if choice is None:
        return Prediction(float("inf"), 0, took)
    staged = choice.costs.stages(choice.solution.cuts)
    ranks = rank_memory(staged, choice.solution.schedule, candidate.factors(costs.factors))
    passes = (2 * rank.optimizer_state + rank.gradients + rank.parameters for rank in ranks)
    step = choice.step + max(size / hardware.bytes_per_second(size) for size in passes)
    best = ""
    if finds_best:
        fastest = search.run().best
        candidate = fastest.candidate
        best = f"{fastest.step:.2f} s: {candidate.layout}, {candidate.schedule}, {candidate.rows} rows"
    return Prediction(step, choice.peak, took, best)


def main(
    model: Annotated[str, typer.Option(help="A part of a model's name.")] = "",
    best: Annotated[bool, typer.Option(help="Search the planner's own best plan, too.")] = False,
) -> None:
    """Compare published steps with the planner's."""
    table = Table("model", "devices", "pp × copies × tp", "published", "predicted", "error", "GiB", "planned in")
    for set_up in [member for member in SET_UPS if model in member.name]:
        prediction = predict(set_up, best)
        table.add_row(
            set_up.name,
            f"{set_up.devices} {set_up.hardware}",
            " × ".join(map(str, set_up.mesh)),
            f"{set_up.seconds:.2f} s",
            f"{prediction.step:.2f} s",
            f"{prediction.step / set_up.seconds - 1:+.1%}",
            f"{prediction.memory / 2**30:.0f}",
            f"{prediction.took:.0f} s",
        )
        if prediction.best:
            print(f"{set_up.name}, best: {prediction.best}")
    Console(width=140).print(table)
    for source in dict.fromkeys(set_up.source for set_up in SET_UPS):
        print(source)


if __name__ == "__main__":
    typer.run(main)
