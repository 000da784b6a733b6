"""Seconds and memory to plan the largest open models, from their configurations and without weights.

python benchmarks/planner_scale.py [--ranks 16] [--seq 4096] [--search] [--json]
python benchmarks/planner_scale.py --devices 64 --global-batch 512 --hardware h200 [--seq 4096] [--json]

Llama 3.1 with 405 B parameters and DeepSeek-V3 with 671 B are loaded, captured, priced and planned: with
1F1B and nothing recomputed; with --search, over all that `pipegraph plan` compares by default; or with --devices, Llama
alone, over all axes of a cluster. Each model has a separate process, with one thread; after each phase its CPU
seconds and its largest resident memory so far are recorded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json"""

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json, without the quantization of its weights"""

MODELS = {"Llama 405 B": LLAMA_405B, "DeepSeek-V3": DEEPSEEK_V3}


@dataclass(frozen=True)
class Phase:
    """Wall-clock and CPU seconds, and the largest resident memory so far in GB."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_gb: float


@dataclass(frozen=True)
class PlanMeasurement:
    """Phases of planning a model, and its plan: seconds of a step, gap to the bound, bytes of the fullest rank.

    ``looked_at`` are candidates whose cuts were searched for, of ``considered``.
    """

    model: str
    phases: list[Phase]
    segments: int
    considered: int
    looked_at: int
    schedule: str
    step: float
    gap: float
    peak_bytes: int
    stages: list[str]


def measure(
    model: str, ranks: int, seq: int, search: bool, devices: int, global_batch: int, profile: str
) -> PlanMeasurement:
    """Plan a model in this process, which should do nothing else."""
    phases: list[Phase] = []

    @contextmanager
    def phase(name: str) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        phases.append(Phase(name, time.perf_counter() - wall, time.process_time() - cpu, peak))

    with phase("import"):
        import torch

        torch.set_num_threads(1)
        from pipegraph.cost.hardware import Hardware
        from pipegraph.graph.sources import load
        from pipegraph.planner.plan_options import PlanOptions
        from pipegraph.workflows.batch import loss_and_target
    with phase("load"), tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(MODELS[model]))
        source = load(f"hf:{file}", weights=False, batch=1, seq=seq)
    hardware = Hardware.load(profile)
    options = PlanOptions(hardware=hardware, loss=loss_and_target(source))
    if devices:
        options = replace(options, memory_bytes=hardware.memory_bytes)
        plan, considered, looked_at = _plan_cluster(source, options, devices, global_batch, phase)
    else:
        plan, considered, looked_at = _plan_ranks(source, replace(options, ranks=ranks), ranks, search, phase)
    prediction = plan.prediction
    assert prediction is not None and prediction.gap is not None and plan.priced is not None
    mesh = "".join(f" × {name} {length}" for name, length in prediction.mesh.items())
    return PlanMeasurement(
        model,
        phases,
        len(plan.priced.chain.segments),
        considered,
        looked_at,
        f"pp {prediction.ranks}{mesh}, {prediction.schedule}, {prediction.microbatches} microbatches",
        prediction.value,
        prediction.gap,
        prediction.peak,
        plan.describe(),
    )


def _plan_ranks(source: Any, options: Any, ranks: int, search: bool, phase: Any) -> tuple[Any, int, int]:
    """Return the best plan for `ranks`, the number of plans considered, and the number for which cuts were searched."""
    from pipegraph.graph.capture import capture
    from pipegraph.planner.comparison import candidates, compare_plans, price_candidates
    from pipegraph.planner.plan import plan_of

    with phase("capture"):
        captured = capture(source.model, source.args, source.kwargs)
    plans = candidates(ranks) if search else candidates(ranks, ["1f1b"], [4 * ranks], recompute=["none"])
    with phase("price"):
        costs = price_candidates(captured, options, plans)
    with phase("plan"):
        comparison = compare_plans(costs, options, ranks, plans)
        return plan_of(captured, comparison.best), comparison.considered, len(comparison.choices)


def _plan_cluster(source: Any, options: Any, devices: int, global_batch: int, phase: Any) -> tuple[Any, int, int]:
    """Return the best plan for a cluster, likewise."""
    from pipegraph.graph.capture import capture_rows
    from pipegraph.graph.sources.huggingface import tp_plan_of
    from pipegraph.planner.joint_plan.search import joint_plan
    from pipegraph.workflows.batch import loss_and_target

    def captured_rows(rows: int) -> Any:
        with phase(f"capture {rows}"):
            return capture_rows(source, rows), loss_and_target(replace(source, batch=rows))

    with phase("plan, with captures"):
        tp_plan = source.tp_plan or tp_plan_of(source.model)
        comparison, plan = joint_plan(captured_rows, 1, options, devices, global_batch, tp_plan=tp_plan)
    return plan, comparison.considered, comparison.searched


def main(
    ranks: int = 16,
    seq: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 4096,
    search: Annotated[bool, typer.Option(help="Search every schedule and recompute, as pipegraph plan does.")] = False,
    devices: Annotated[int, typer.Option(help="Plan Llama for this number of devices, over all axes.")] = 0,
    global_batch: Annotated[int, typer.Option(help="Rows of a step, over all devices.")] = 512,
    hardware: Annotated[str, typer.Option(help="Whose profile prices them.")] = "h100",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the models, one after the other."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's second thread waits more than it works
    measurements = []
    for model in ["Llama 405 B"] if devices else MODELS:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            measurements.append(process.apply(measure, (model, ranks, seq, search, devices, global_batch, hardware)))
    if as_json:
        print(json.dumps([asdict(report) for report in measurements], indent=1))
        return
    for report in measurements:
        table = Table("phase", "s", "CPU s", "GB so far", title=report.model)
        for phase in report.phases:
            table.add_row(phase.name, f"{phase.seconds:.1f}", f"{phase.cpu_seconds:.1f}", f"{phase.peak_gb:.2f}")
        captures = (
            sum(phase.seconds for phase in report.phases if phase.name.startswith("capture ")) if devices else 0.0
        )
        table.add_row("total", f"{sum(phase.seconds for phase in report.phases) - captures:.1f}")
        Console().print(table)
        print(f"{report.segments} segments, {report.considered} plans, of which {report.looked_at} were looked at;")
        print(f"{report.schedule}: {report.step:.2f} s a step, gap {report.gap:.1%}, ", end="")
        print(f"{report.peak_bytes / 1e9:.0f} GB on the fullest rank", *report.stages, sep="\n  ", end="\n\n")


if __name__ == "__main__":
    typer.run(main)
