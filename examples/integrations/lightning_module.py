"""A Lightning Trainer with a pipeline. Run it again to resume it.

python lightning_module.py OUT, or torchrun --nproc-per-node 2 lightning_module.py OUT; with 4, there are two
data-parallel ranks.
"""

import sys
from pathlib import Path

import lightning
import torch
from accelerated import DATA, pipeline
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import pipegraph
from pipegraph.integrations.lightning import PipelineModule, PipelineStrategy


class Classifier(PipelineModule):
    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = self.pipeline_step(inputs, target=labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_index: int) -> None:
        inputs, labels = batch
        self.log("validation_loss", self.pipeline_loss(inputs, target=labels))
        accuracy = (self(inputs).argmax(-1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def trainer(pipe: pipegraph.Pipeline, out: Path, epochs: int) -> lightning.Trainer:
    return lightning.Trainer(
        strategy=PipelineStrategy(pipe),
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(out / "checkpoints", save_last=True)],
        logger=CSVLogger(out, "logs"),
        enable_progress_bar=False,
    )


if __name__ == "__main__":
    out = Path(sys.argv[1])
    pipe = pipeline(out / "package")
    training, evaluation = (DataLoader(DATA, batch_size=8 // pipe.dp_size) for _ in range(2))
    last = out / "checkpoints/last.ckpt"
    checkpoint = last if last.exists() else None
    trainer(pipe, out, epochs=6).fit(Classifier(pipe), training, evaluation, ckpt_path=checkpoint)
