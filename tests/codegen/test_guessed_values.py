"""Parameters of which it is not known how the model initialises them: named, guessed from their values, never memory
that nobody wrote."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import pipegraph
from pipegraph.graph.initialisation import Initialisation, guess_of
from pipegraph.graph.sources import load
from pipegraph.package import Package


@contextmanager
def memory_filled() -> Iterator[None]:
    """Let torch fill memory that nobody wrote: with NaN, or the largest number."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def fresh(package: Package) -> dict[str, Tensor]:
    """The state of all stages without weights, without the warning that some of it is guessed."""
    with warnings.catch_warnings(), memory_filled():
        warnings.simplefilter("ignore", UserWarning)
        stages = [package.load_stage(index, weights=False) for index in range(len(package.manifest.stages))]
    return {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}


class Hyper(nn.Module):
    """Gives parameters to modules of torch, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(5))
        self.weight = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 64))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(self.z).view(8, 8)) + self.shared.weight[0]


class Numbers(nn.Module):
    """Parameters of odd dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64) * 3)
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)
        self.steps = nn.ParameterList([nn.Parameter(torch.arange(8.0).log1p()) for _ in range(2)])
        self.register_buffer("table", torch.arange(8.0).cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.phase.real * self.steps[0] + self.steps[1] * self.table


class Hooked(nn.Module):
    """A module of torch that is written as a separate class because it has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.inner.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


@pytest.mark.parametrize("make", [Hyper, Numbers, Hooked, lambda: weight_norm(nn.Linear(8, 8))])
def test_every_tensor_of_a_fresh_stage_was_written(make: type[nn.Module], tmp_path: Path) -> None:
    model = nn.Sequential(make(), nn.Linear(8, 8))
    plan = pipegraph.plan(pipegraph.capture(model, (torch.randn(4, 8),)), stages=1, balance="uniform")
    package = pipegraph.write_package(plan, tmp_path)
    fresh_state, state = fresh(package), model.state_dict()
    assert fresh_state.keys() == state.keys()
    for name, values in fresh_state.items():
        assert not values.isnan().any() and values.abs().max() < 1e3, name


def test_a_linear_layer_of_a_parameter_is_a_linear_layer(tmp_path: Path) -> None:
    plan = pipegraph.plan(pipegraph.capture(Hyper(), (torch.randn(4, 8),)), stages=1, balance="uniform")
    package = pipegraph.write_package(plan, tmp_path)
    source = "".join((package.path / file).read_text() for file in ("blocks.py", "stage_0.py"))
    assert "nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 64))" in source
    assert fresh(package)["weight.0.weight"].abs().max() <= 1 / math.sqrt(5)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, 8) * 0.1 + 1)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x + self.positions[: x.shape[0]])
        return output


def test_a_guess_has_the_mean_and_deviation_of_the_values_and_a_warning(tmp_path: Path) -> None:
    plan = pipegraph.plan(pipegraph.capture(Positions(), (torch.randn(4, 8),)), points=["layers.1"])
    with pytest.warns(UserWarning, match=r"How Positions initialises positions is not known.*Try: correct GUESSES"):
        package = pipegraph.write_package(plan, tmp_path, weights=False)
    with pytest.warns(UserWarning, match=r"positions of Stage0 start from guesses.*move them to INITIALISATION"):
        positions = package.load_stage(0, weights=False).state_dict()["positions"]
    assert positions.std().item() == pytest.approx(0.1, rel=0.2)
    assert positions.mean().item() == pytest.approx(1, rel=0.05)
    package.load_stage(1, weights=False)  # which has no guess, and warns of none


def test_an_entry_that_is_moved_is_no_guess(tmp_path: Path) -> None:
    plan = pipegraph.plan(pipegraph.capture(Positions(), (torch.randn(4, 8),)), points=["layers.1"])
    package = pipegraph.write_package(plan, tmp_path)
    file = package.path / "weights.py"
    text = file.read_text()
    assert "INITIALISATION = {}" in text
    file.write_text(text.replace("INITIALISATION = {}", 'INITIALISATION = {"positions": nn.init.ones_}'))
    assert package.load_stage(0, weights=False).state_dict()["positions"].eq(1).all()


def test_a_model_that_is_built_here_has_no_guess_where_its_making_says_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn.utils.parametrizations import weight_norm\n\n\n"
        "def build_model():\n    return weight_norm(nn.Linear(8, 8))\n\n\nexample_inputs = (torch.randn(4, 8),)\n"
    )
    source = load(str(tmp_path / "model.py"))
    plan = pipegraph.plan(pipegraph.capture(source.model, source.args), stages=1, balance="uniform")
    package = pipegraph.write_package(plan, tmp_path / "package", source=source)
    text = (package.path / "weights.py").read_text()
    initialisations, guesses = text.split("GUESSES = {")
    assert '"parametrizations.weight.original1": partial(nn.init.kaiming_uniform_' in initialisations
    assert "original1" not in guesses
    norms = source.model.state_dict()["parametrizations.weight.original0"]
    fresh_norms = fresh(package)["parametrizations.weight.original0"]
    assert fresh_norms.mean().item() == pytest.approx(norms.mean().item(), rel=0.3)


def test_guesses() -> None:
    torch.manual_seed(0)
    assert guess_of(torch.empty(4, device="meta")) == Initialisation("normal_", (("std", 0.02),))
    assert guess_of(torch.tensor([0.0, math.inf])) == Initialisation("normal_", (("std", 0.02),))
    assert guess_of(torch.tensor([-1.0, 1.0])) == Initialisation("normal_")
    assert guess_of(torch.arange(101.0)) == Initialisation("normal_", (("mean", 50.0), ("std", 29.2)))
    assert guess_of(torch.tensor([1j, -1.0])) == Initialisation("normal_")
    assert guess_of(torch.arange(3)) == Initialisation("zeros_")
    assert guess_of(torch.ones(3).to(torch.float8_e4m3fn)) == Initialisation("zeros_")
