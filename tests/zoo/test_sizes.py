"""Stages of every model of the zoo are the model at other batches, lengths and image sizes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipegraph import Pipeline
from pipegraph.cost.model_output import output_tensors
from pipegraph.package import Manifest
from pipegraph.package.manifest import leaves
from tests.zoo.visit import NAMES, split_in_stages

# Of each kind one; `make test-all` visits every model.
_QUICK = ("OPTForCausalLM", "two towers")
# What a model fixes, images of one size, say, or a cut inside a loop over time steps.
_FIXED = {
    "ViTForImageClassification": {"batch"},
    "one module called twice": {"batch"},
    "mixture of experts": {"batch"},
    "recurrent cell": {"batch"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_stages_are_the_model_at_other_sizes(name: str, tmp_path: Path) -> None:
    source, package = split_in_stages(name, tmp_path)
    captured = package.manifest.captured_sizes
    if name in _FIXED:
        assert captured.keys() == _FIXED[name]
    else:
        assert len(captured) > 1
    pipe = Pipeline(package, microbatches=1, kernels="autograd")
    model = copy.deepcopy(source.model).eval()
    for stage in pipe.stages.values():
        stage.eval()
    # Image sizes are doubled, because a model halves them.
    for sizes in ({"batch": 5}, {"batch": 1}, {name: 2 * size for name, size in captured.items()}):
        args, kwargs = _resized(package.manifest, source.args, source.kwargs, {**captured, **sizes})
        with torch.no_grad():
            expected = output_tensors(model(*args, **kwargs))
            outputs = output_tensors(pipe.eval(*args, **kwargs))
        for key, tensor in expected.items():
            torch.testing.assert_close(outputs[key], tensor)


def _resized(manifest: Manifest, args: Any, kwargs: Any, sizes: dict[str, int]) -> tuple[Any, Any]:
    """The arguments with other sizes: what they hold, repeated."""
    tensors, structure = pytree.tree_flatten((args, kwargs))
    names = leaves((manifest.args, manifest.kwargs))
    resized_tensors = [
        _repeated(leaf, manifest.values[str(name)].shape_at(sizes)) for name, leaf in zip(names, tensors, strict=True)
    ]
    return pytree.tree_unflatten(resized_tensors, structure)


def _repeated(tensor: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    for dim, size in enumerate(shape):
        tensor = torch.cat([tensor] * (1 + size // tensor.shape[dim]), dim).narrow(dim, 0, size)
    return tensor
