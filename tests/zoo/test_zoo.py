"""Every model of the zoo, split in three and trained for one step: outputs, loss and gradients are the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pipegraph.package import Package
from tests.codegen.parity import untidy
from tests.slow import cases
from tests.zoo.architectures import CONFIGURATIONS
from tests.zoo.visit import NAMES, STAGES, visit

# `make test-all` visits every model. tests/codegen has models of transformers, in test_faithful.py.
_SLOW = [*CONFIGURATIONS, "recurrent cell", "U-Net"]


@pytest.mark.filterwarnings("ignore:.* got no gradient in a step, as in the model")  # the bias of BERT's predictions
@pytest.mark.parametrize("name", cases(NAMES, slow=_SLOW))
def test_a_step_of_three_stages_is_a_step_of_the_model(name: str, tmp_path: Path) -> None:
    visited = visit(name, tmp_path)
    assert visited.verification.training and visited.verification.equal, str(visited.verification)
    assert len(visited.package.manifest.stages) == STAGES
    assert untidy(visited.package.path) == []
    if isinstance(visited.model, PreTrainedModel):
        assert unlike_its_checkpoint(visited.model, visited.package, tmp_path / "checkpoint") == []


def unlike_its_checkpoint(model: PreTrainedModel, package: Package, folder: Path) -> list[str]:
    """The names whose values stages do not find where transformers writes them, whatever it calls them there."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(folder, max_shard_size="20KB")
    stages = [package.load_stage(index, weights=folder) for index in range(STAGES)]
    tensors = {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    return [name for name in expected if not torch.equal(tensors[name], expected[name])]
