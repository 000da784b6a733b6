"""LoRA for a tiny Qwen2 on padded batches, with the Trainer in a pipeline. Run it again to resume it.

python lora.py OUT, or torchrun --nproc-per-node 2 lora.py OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from trainer import CONFIG, DATA, RANKS, arguments, collate
from transformers import Qwen2ForCausalLM

import pipegraph
from pipegraph.integrations.transformers import PipelineTrainer, causal_lm_loss, count_causal_lm_labels

ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def split(folder: Path) -> None:
    """Split the model with its adapter: the weights of the base model take no memory here."""
    with init_empty_weights(include_buffers=False):
        model = get_peft_model(Qwen2ForCausalLM(CONFIG), ADAPTER)
    inputs = {name: tensor for name, tensor in collate(DATA[:4]).items() if name != "labels"}
    plan = pipegraph.plan(pipegraph.capture(model, kwargs=inputs), points=["base_model.model.model.layers.2"])
    pipegraph.write_package(plan, folder, weights=False)


def main(out: Path) -> None:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp_shard")) if RANKS > 1 else None
    base, package = out / "base", out / "package"
    if (mesh is None or mesh.get_rank() == 0) and not package.exists():
        torch.manual_seed(0)
        Qwen2ForCausalLM(CONFIG).save_pretrained(base)  # as it would be downloaded
        split(package)
    if mesh is not None:
        dist.barrier()
    loss = {"loss_fn": causal_lm_loss, "loss_weight": count_causal_lm_labels}
    pipe = pipegraph.Pipeline(package, "1f1b", 2, mesh=mesh, kernels="eager", weights=base, seed=3, **loss)
    training = arguments(out / "runs", rows=4 // pipe.dp_size, steps=40)
    options = {"train_dataset": DATA[:80], "eval_dataset": DATA[80:], "data_collator": collate, "config": CONFIG}
    trainer = PipelineTrainer(pipe, training, peft_config=ADAPTER, **options)
    trainer.train(resume_from_checkpoint=any((out / "runs").glob("checkpoint-*")))
    trainer.save_model(out / "adapter")
    if mesh is None or mesh.get_rank() == 0:
        adapted = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(base), out / "adapter").eval()
        batch = collate(DATA[80:84])
        print(f"loss of the adapted model: {adapted(**batch).loss:.4f}")
        adapted.merge_and_unload().save_pretrained(out / "merged")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
