"""A tiny Qwen2 on padded batches with the Trainer of Hugging Face, in a pipeline.

python trainer.py OUT, or torchrun --nproc-per-node 2 trainer.py OUT; with 4, two data-parallel ranks divide parameters.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainingArguments

import pipegraph
from pipegraph.integrations.transformers import PipelineTrainer, causal_lm_loss, count_causal_lm_labels

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip
GENERATOR = torch.Generator().manual_seed(1)
LENGTHS = torch.randint(4, 17, (90,), generator=GENERATOR).tolist()
DATA = [{"input_ids": torch.randint(3, 64, (length,), generator=GENERATOR)} for length in LENGTHS]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def arguments(out: Path, rows: int, steps: int = 50) -> TrainingArguments:
    return TrainingArguments(
        str(out), max_steps=steps, per_device_train_batch_size=rows, per_device_eval_batch_size=rows,
        gradient_accumulation_steps=2, learning_rate=3e-3, logging_steps=1, eval_strategy="steps", eval_steps=10,
        save_steps=20, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip


def pipeline(folder: Path) -> pipegraph.Pipeline:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp_shard")) if RANKS > 1 else None
    if (mesh is None or mesh.get_rank() == 0) and not folder.exists():
        torch.manual_seed(0)
        inputs = {name: tensor for name, tensor in collate(DATA[:4]).items() if name != "labels"}
        captured = pipegraph.capture(Qwen2ForCausalLM(CONFIG), kwargs=inputs)
        pipegraph.write_package(pipegraph.plan(captured, points=["model.layers.2"]), folder)
    if mesh is not None:
        dist.barrier()
    loss = {"loss_fn": causal_lm_loss, "loss_weight": count_causal_lm_labels}
    return pipegraph.Pipeline(folder, "1f1b", 2, mesh=mesh, kernels="eager", **loss)


if __name__ == "__main__":
    pipe = pipeline((out := Path(sys.argv[1])) / "package")
    options = {"train_dataset": DATA[:80], "eval_dataset": DATA[80:], "data_collator": collate, "config": CONFIG}
    trainer = PipelineTrainer(pipe, arguments(out / "runs", rows=4 // pipe.dp_size), **options)
    trainer.train(resume_from_checkpoint=any((out / "runs").glob("checkpoint-*")))
    trainer.save_model(out / "trained")
