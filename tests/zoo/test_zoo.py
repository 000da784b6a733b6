"""Every model of the zoo, split in three and trained for one step: outputs, loss and gradients are the model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.parity import untidy
from tests.zoo.visit import NAMES, STAGES, visit

# Bloom's GELU has a backward of its own, which is the derivative of its forward: nothing is lost.
_KNOWN = "ignore:GeLUFunction of transformers.models.bloom"


@pytest.mark.filterwarnings(_KNOWN)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_three_stages_is_a_step_of_the_model(name: str, tmp_path: Path) -> None:
    visited = visit(name, tmp_path)
    assert visited.verification.training and visited.verification.equal, str(visited.verification)
    assert len(visited.package.manifest.stages) == STAGES
    assert untidy(visited.package.path) == []
