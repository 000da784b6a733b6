"""The example's Lightning Trainer trains and validates as that of the whole model, for any number of ranks."""

from __future__ import annotations

import csv
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from pipegraph import Pipeline
from pipegraph.errors import ArgumentError, BatchError
from pipegraph.integrations.gradients import gradients_divided
from pipegraph.integrations.lightning import PipelineModule, PipelineStrategy
from tests.integrations import example_scripts, lightning_ranks
from tests.messages import refused
from tests.runtime import ranks

accelerated = example_scripts.load("accelerated")
example = example_scripts.load("lightning_module")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*num_workers.*"),
]


class Plain(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = accelerated.build_model()

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        outputs = self.model(batch[0])
        self.log("validation_loss", cross_entropy(outputs, batch[1]))
        self.log("accuracy", (outputs.argmax(-1) == batch[1]).float().mean())

    configure_optimizers: Any = None


Plain.configure_optimizers = lambda self: example.Classifier.configure_optimizers(PipeLike(self))


class PipeLike:
    """A module whose parameters are those of its ``pipe``."""

    def __init__(self, module: nn.Module) -> None:
        self.pipe = module


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], float]:
    out = tmp_path_factory.mktemp("plain")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(out, "logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shuffled = DistributedSampler(accelerated.DATA, num_replicas=1, rank=0)  # as Lightning's strategies for ranks
        training = DataLoader(accelerated.DATA, batch_size=8, sampler=shuffled)
        trainer.fit(Plain(), training, DataLoader(accelerated.DATA, batch_size=8))
    return metrics(out)


def metrics(out: Path) -> dict[tuple[str, int], float]:
    """Each logged number by its name and its step, of all runs into a folder."""
    numbers = {}
    for file in sorted((out / "logs").glob("version_*/metrics.csv")):
        with file.open() as lines:
            for row in csv.DictReader(lines):
                names = [name for name in row if row[name] and name not in ("step", "epoch")]
                numbers |= {(name, int(row["step"])): float(row[name]) for name in names}
    return numbers


@pytest.mark.parametrize("count", [1, 2, 4])
def test_it_is_the_trainer_of_the_whole_model(
    count: int, expected: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    example_scripts.run("lightning_module", count, tmp_path)
    assert {name for name, _ in expected} == {"loss", "validation_loss", "accuracy"}
    assert metrics(tmp_path) == pytest.approx(expected, rel=1e-5)


def test_a_killed_run_resumes_in_another_number_of_processes(
    expected: dict[tuple[str, int], float], tmp_path: Path
) -> None:
    example_scripts.run_killed("lightning_module", 2, tmp_path, tmp_path / "checkpoints/last.ckpt/trainer.ckpt")
    shutil.rmtree(tmp_path / "logs")
    example_scripts.run("lightning_module", 1, tmp_path)
    resumed = metrics(tmp_path)
    assert ("validation_loss", 11) in resumed
    assert resumed == pytest.approx({key: expected[key] for key in resumed}, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_was_killed_within_a_save_resumes(expected: dict[tuple[str, int], float], tmp_path: Path) -> None:
    """The pipeline was saved again, and the Trainer's state was not."""
    last = tmp_path / "checkpoints/last.ckpt"
    state = b""
    for epochs in (2, 3, 6):
        loaders = [DataLoader(accelerated.DATA, batch_size=8) for _ in range(2)]
        pipe = accelerated.pipeline(tmp_path / "package")
        if epochs == 6:
            assert len(list((last / "pipeline").iterdir())) == 2
            (last / "trainer.ckpt").write_bytes(state)
            shutil.rmtree(tmp_path / "logs")
        trainer = example.trainer(pipe, tmp_path, epochs)
        trainer.fit(example.Classifier(pipe), *loaders, ckpt_path=last if last.exists() else None)
        state = state or (last / "trainer.ckpt").read_bytes()
    resumed = metrics(tmp_path)
    assert min(step for _, step in resumed) == 4
    assert resumed == pytest.approx({key: expected[key] for key in resumed}, rel=1e-5)


@pytest.fixture
def pipe(tmp_path: Path) -> Pipeline:
    pipeline: Pipeline = accelerated.pipeline(tmp_path / "package")
    return pipeline


def fit(pipe: Pipeline, module: lightning.LightningModule, **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(strategy=PipelineStrategy(pipe), max_steps=1, **quiet, **options)
    trainer.fit(module, DataLoader(accelerated.DATA, batch_size=8))


class TwoOptimizers(PipelineModule):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_index: int) -> None:
        """Nothing is trained."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.pipe.parameters(), lr=1.0) for _ in range(2)]


@pytest.mark.filterwarnings("ignore")
def test_what_a_pipeline_decides_is_refused(pipe: Pipeline, tmp_path: Path) -> None:
    with refused(ArgumentError, "bf16-mixed", advice='precision="bf16"'):
        fit(pipe, example.Classifier(pipe), precision="bf16-mixed")
    with refused(ArgumentError, "Plain", advice="PipelineModule"):
        fit(pipe, Plain())
    with refused(ArgumentError, "2 devices", advice="torchrun"):
        fit(pipe, example.Classifier(pipe), devices=2)
    with refused(ArgumentError, "2 optimizers", advice="one optimizer"):
        fit(pipe, TwoOptimizers(pipe))


def test_data_parallel_ranks_count_once(pipe: Pipeline) -> None:
    """And not each rank of a pipeline, which have equal numbers."""
    results = ranks.run(lightning_ranks.collectives, 4, str(pipe.package.path))
    expected_numbers = {"mean": 1.5, "sum": 3, "max": 2, "min": 1, "gathered": [1, 2]}
    assert results == [expected_numbers | {"all": False, "any": True, "none": False}] * 4


def test_a_refused_batch_leaves_gradients_as_they_were(pipe: Pipeline) -> None:
    inputs, labels = accelerated.DATA[:8]
    pipe.step(inputs, target=labels)
    gradients = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    with pytest.raises(BatchError), gradients_divided(pipe, 2):
        pipe.step(inputs[:, :3], target=labels)
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.filterwarnings("ignore")
def test_the_pipeline_is_of_use_after_it(pipe: Pipeline) -> None:
    fit(pipe, example.Classifier(pipe))
    inputs, labels = accelerated.DATA[:8]
    assert pipe.step(inputs, target=labels).loss is not None
