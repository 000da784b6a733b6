"""A training loop of accelerate with a pipeline.

python accelerated.py OUT, or torchrun --nproc-per-node 2 accelerated.py OUT; with 4, there are two data-parallel ranks.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import pipegraph
from pipegraph.integrations.accelerate import PipelineAccelerator

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
GENERATOR = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(32, 16, generator=GENERATOR), torch.randint(10, (32,), generator=GENERATOR))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10))


def pipeline(folder: Path) -> pipegraph.Pipeline:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp_replicate")) if RANKS > 1 else None
    if (mesh is None or mesh.get_rank() == 0) and not folder.exists():
        captured = pipegraph.capture(build_model(), (torch.randn(4, 16),))
        pipegraph.write_package(pipegraph.plan(captured, points=["2"]), folder)
    if mesh is not None:
        dist.barrier()
    return pipegraph.Pipeline(folder, "1f1b", 2, nn.functional.cross_entropy, mesh=mesh, kernels="eager")


if __name__ == "__main__":
    pipe = pipeline(Path(sys.argv[1]))
    accelerator = PipelineAccelerator(pipe, cpu=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(DATA, batch_size=8 // pipe.dp_size)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    for inputs, labels in loader:
        result = pipe.step(inputs, target=labels)
        norm = accelerator.clip_grad_norm_(pipe.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {result.loss:.6f}, norm {norm:.6f}")
    pipe.eval()
    predictions = [pipe.broadcast_outputs(pipe.eval(inputs)).argmax(-1) for inputs, _ in loader]
    gathered = torch.cat([accelerator.gather_for_metrics(part) for part in predictions])
    accelerator.print(f"predicted {gathered.tolist()}")
