"""Batches that are not plain rows: time first, patch streams, images with text. Results equal the unsplit model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import BatchError
from tests.messages import refused
from tests.slow import cases

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-v"]


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0) for _ in range(2)))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.fixture(scope="module")
def time_first(tmp_path_factory: pytest.TempPathFactory) -> pipegraph.Package:
    captured = pipegraph.capture(encoder(), (torch.randn(8, 2, 16),), batch_dims={"input": 1})
    return pipegraph.write_package(pipegraph.plan(captured, points=["1"]), tmp_path_factory.mktemp("package") / "out")


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_rows_of_a_time_first_model(schedule: str, time_first: pipegraph.Package) -> None:
    model, x, target = encoder(), torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    for microbatches in (1, 2, 4):
        pipe = pipegraph.Pipeline(time_first, schedule, microbatches, loss_fn=mean_square, kernels="eager")
        result = pipe.step(x, target=target, return_outputs=True)
        torch.testing.assert_close(result.outputs, model(x))
        torch.testing.assert_close(result.loss, mean_square(model(x), target))


def test_a_loss_over_the_batch_joins_a_time_first_target(tmp_path: Path) -> None:
    model, x, target = encoder(), torch.randn(6, 6, 16), torch.randn(6, 6, 16)
    captured = pipegraph.capture(model, (x,), batch_dims={"input": 1})
    package = pipegraph.write_package(pipegraph.plan(captured, points=["1"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, "gpipe", 3, loss_fn=mean_square, loss_over="batch", kernels="eager")
    torch.testing.assert_close(pipe.step(x, target=target).loss, mean_square(model(x), target))


def test_a_time_first_model_without_a_declaration_runs_one_microbatch(tmp_path: Path) -> None:
    model, x = encoder(), torch.randn(8, 6, 16)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (x,)), points=["1"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, "1f1b", 2, kernels="eager")
    with refused(BatchError, "scaled_dot_product_attention", advice="microbatches=1") as caught:
        pipe.eval(x)
    assert all(option in caught.value.advice for option in ('batch_dims={"input": 1}', "--batch-dim input=1"))
    torch.testing.assert_close(pipe.eval(x, microbatches=1), model(x))
    first, _ = pipe.eval([x[:, :4], x[:, 4:]])  # each item of a list is a batch
    torch.testing.assert_close(first, model(x[:, :4]))


class PatchStream(nn.Module):
    """Text with images whose patches are one flat stream, as Qwen-VL takes it: a grid says how many each image has."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.patch = nn.Embedding(20, width), nn.Linear(12, width)
        self.mid, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, ids: Tensor, patches: Tensor, grid: Tensor) -> Tensor:
        image = (ids == 0).flatten()
        place = (image.long().cumsum(0) - 1).clamp(min=0) % patches.shape[0]
        scale = grid.prod(1).sum() / patches.shape[0]
        images = self.patch(patches)[place].view(*ids.shape, -1) * scale
        x = torch.where((ids == 0)[..., None], images, self.embed(ids))
        return self.head(torch.tanh(self.mid(x)))


@pytest.mark.parametrize("schedule", SCHEDULES[:3])
def test_a_patch_stream_as_lists(schedule: str, tmp_path: Path) -> None:
    """3, 1, 4 and 2 patches in four microbatches; the rows are a tensor of the whole batch."""
    torch.manual_seed(0)
    model, counts = PatchStream(), (3, 1, 4, 2)
    ids = torch.randint(1, 20, (8, 5))
    ids[:, 1] = 0
    patches = [torch.randn(count, 12) for count in counts]
    grids = [torch.tensor([[1, count]] * 2) for count in counts]
    roles = {"patches": "list", "grid": "list"}
    captured = pipegraph.capture(model, (ids[:2], patches[2], grids[2]), batch_dims=roles)
    package = pipegraph.write_package(pipegraph.plan(captured, points=["mid"]), tmp_path / "out")
    assert package.manifest.batch.mixing == ()
    target = torch.randn(8, 5, 5)
    pipe = pipegraph.Pipeline(package, schedule, 4, loss_fn=mean_square, kernels="eager")
    result = pipe.step(ids, patches, grids, target=target, return_outputs=True)
    expected = torch.cat([model(*item) for item in zip(ids.split(2), patches, grids, strict=True)])
    torch.testing.assert_close(result.outputs, expected)
    loss = mean_square(expected, target)
    torch.testing.assert_close(result.loss, loss)
    loss.backward()
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


@pytest.mark.parametrize("microbatches", cases([2], slow=[2]))
def test_one_image_for_each_row_of_text(microbatches: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=2, num_key_value_heads=1),
        image_token_id=60,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    ids = torch.randint(2, 50, (2 * microbatches, 12))
    ids[:, 1:5] = 60
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    images = torch.randn(2 * microbatches, 3, 8, 8)
    example = {"input_ids": ids[:2], "pixel_values": images[:2], "attention_mask": torch.ones_like(ids[:2])}
    captured = pipegraph.capture(model, kwargs={**example, "use_cache": False})
    assert {role.dim for role in captured.batch.roles.values()} == {0}
    plan = pipegraph.plan(captured, points=["model.language_model.layers.1"])
    package = pipegraph.write_package(plan, tmp_path / "out")
    pipe = pipegraph.Pipeline(package, "gpipe", microbatches, kernels="eager")
    batch = {"input_ids": ids, "pixel_values": images, "attention_mask": mask, "use_cache": False}
    logits, expected = pipe.eval(**batch)["logits"], model(**batch)["logits"]
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_model_output_is_an_argument(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, encoded: dict[str, Tensor]) -> Tensor:
            return self.second(torch.tanh(self.first(encoded["last_hidden_state"])))

    model, x = Reader(), torch.randn(6, 4)
    captured = pipegraph.capture(model, kwargs={"encoded": outputs.BaseModelOutput(last_hidden_state=x[:2])})
    package = pipegraph.write_package(pipegraph.plan(captured, points=["second"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, "gpipe", 3, kernels="autograd")
    encoded = outputs.BaseModelOutput(last_hidden_state=x)
    torch.testing.assert_close(pipe.eval(encoded=encoded), model(encoded))
