"""Backwards that compute some modules again and others not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from pipegraph.errors import PipegraphError
from pipegraph.kernels import make, makers
from pipegraph.kernels.stage_run import held_tensors
from pipegraph.recompute import Recompute
from tests.kernels.stages import assert_as_autograd
from tests.messages import refused

x = torch.randn(4, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return x + self.mlp(x)


class Stage(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(layers)})
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def saved_widths(recompute: Any, stage: nn.Module | None = None) -> Counter[int]:
    """How many tensors of each width are kept for the backward, without the parameters."""
    stage = stage or Stage()
    saved = make("eager", stage, (True,), (True,), recompute=recompute).forward([x]).saved
    parameters = {parameter.data_ptr() for parameter in stage.parameters()}
    tensors = {tensor.data_ptr(): tensor for tensor in held_tensors(saved) or ()}
    return Counter(tensor.shape[-1] for pointer, tensor in tensors.items() if pointer not in parameters)


WIDE = {"none": 2, "block": 0}  # of an Mlp: what goes into gelu and what comes out of it


@pytest.mark.parametrize("layers", [1, 3])
def test_a_module_inside_another_one_has_a_choice_of_its_own(layers: int) -> None:
    """Whether a layer is traced as a block or, being alone, as a part of the stage."""
    for choice, wide in WIDE.items():
        widths = saved_widths({"layers.*": "block", "*.mlp": choice}, Stage(layers))
        assert widths[32] == wide * layers
        assert widths[16] == 0  # of the mixer
        assert widths[8] == 2 * layers + 1  # into the layer, the mlp and the head
    alone = saved_widths({"layers.*": "block"}, Stage(layers))
    assert saved_widths({"": "none", "layers.*": "block"}, Stage(layers)) == alone == {8: layers + 1}


class Split(nn.Module):
    """A stage of a whole layer, and of one with a cut inside: what is called of that is its Mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Layer(), "1": nn.Module()})
        self.layers["1"].mlp = Mlp()
        self.layers["1"].norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["0"](x)
        return x + self.layers["1"].mlp(self.layers["1"].norm(x))


@pytest.mark.parametrize(
    ("recompute", "wide"), [({"layers.*": "block"}, 0), ({"layers.*": "block", "*.mlp": "none"}, 4), ("none", 4)]
)
def test_what_layers_have_in_common_is_no_block_of_its_own(recompute: Any, wide: int) -> None:
    """Else the layers around it would be kept."""
    widths = saved_widths(recompute, Split())
    assert widths[32] == wide
    assert widths[16] == (recompute == "none")  # of the mixer
    assert_as_autograd(Split(), [x], recompute=recompute)


def test_layers_by_a_slice() -> None:
    full_widths, none = saved_widths("none"), saved_widths({"": "none", "layers.*": "block"})
    sliced_widths = saved_widths({"": "none", "layers[::2]": "block"})
    assert (full_widths[32], sliced_widths[32], none[32]) == (6, 2, 0)


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    "recompute",
    [
        {"layers.*": "block", "*.mlp": "none"},
        {"layers.*": "none", "*.mlp": "block"},
        {"": "none", "layers[1:]": "block", "*.mixer": "min-cut"},
        {"*": "block"},
    ],
)
def test_gradients_do_not_depend_on_it(recompute: Any, layers: int, kernels: str) -> None:
    assert_as_autograd(Stage(layers), [x], recompute=recompute, kernels=kernels)


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_answers_for_each_operation() -> None:
    widths = saved_widths(save_products)
    assert widths[32] == 3  # of each mlp what up returns; gelu is computed again
    assert_as_autograd(Stage(), [x], recompute=save_products)
    mixed = saved_widths({"layers.*": "none", "layers.1": save_products})
    assert mixed[32] == 2 + 1 + 2


def test_a_policy_that_offloads_is_refused() -> None:
    def offload(*_: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD

    with refused(PipegraphError, "recompute", "MUST_CPU_OFFLOAD", "aten.", advice="MUST_SAVE"):
        make("eager", Stage(), (True,), (True,), recompute=offload).forward([x])


def test_equal_choices_share_kernels() -> None:
    def traced(choices: Sequence[Any]) -> int:
        stage_makers = makers("eager", [Recompute.parse(choice) for choice in choices])
        kernels: list[Any] = [make_stage(Stage(), (True,), (True,), None) for make_stage in stage_makers]
        for stage_kernels in kernels:
            stage_kernels.forward([x])
        return len({block for stage in kernels for variant in stage.variants for block in variant.divided.blocks})

    assert traced(["none", "none"]) == 1
    assert traced(["none", "block", "none"]) == 2
    assert traced([{"layers[::2]": "block"}, {"layers[2:]": "block"}]) == 2
