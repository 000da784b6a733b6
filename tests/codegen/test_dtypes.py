"""Casts stay as the model's source means them: to one dtype always, or to the dtype of another value."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.package import Package
from tests.codegen.layers import batch
from tests.codegen.parity import differences, source, split

pytestmark = pytest.mark.usefixtures("from_graph")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Norm(nn.Module):
    """A root mean square norm that computes in float32, as those of most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + 1e-6)).to(input_dtype)


class Normed(nn.Module):
    """What comes after a cast that does nothing reads its argument: here the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm() for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


class BranchesOnDtype(Normed):
    """Runs other operations in another dtype, so that its two graphs cannot be compared."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            x = x.relu()
        return super().forward(x)


def stages_in(package: Package, dtype: torch.dtype, x: Tensor) -> Tensor:
    for index in range(len(package.manifest.stages)):
        x = package.load_stage(index).to(dtype)(x)
    return x


@pytest.mark.parametrize("captured_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_compute_as_the_model_in_every_dtype(
    captured_in: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In float16 the square of 300 is infinite, unless it is computed in float32."""
    model = Normed()
    package = split(tmp_path, copy.deepcopy(model).to(captured_in), (batch().to(captured_in),), cut="norms.2")
    if captured_in == torch.bfloat16:
        model = model.bfloat16()
    x = 300 * batch().to(dtype)
    assert torch.equal(stages_in(package, dtype, x), copy.deepcopy(model).to(dtype)(x))


def test_captures_in_two_dtypes_give_the_same_forward(tmp_path: Path) -> None:
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        package = split(tmp_path / str(dtype), Normed().to(dtype), (batch().to(dtype),), cut="norms.2")
        texts.append([line for line in source(package).splitlines() if ".to(" in line or "return" in line])
    assert texts[0] == texts[1]
    assert "        hidden_states_1 = hidden_states.to(torch.float32)" in texts[0]


class Experts(nn.Module):
    """Multiplies the rows of each expert by its matrix, as the layers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.last = nn.Parameter(torch.randn(3, 8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        from transformers.integrations.moe import _grouped_mm

        return self.last(_grouped_mm(x, self.weight.transpose(-2, -1), ends))


@pytest.mark.parametrize("kernels", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_product_for_each_expert_is_the_same_in_two_dtypes(kernels: str, tmp_path: Path) -> None:
    """transformers runs its own operator while float32 is traced, and torch's operator otherwise."""
    pytest.importorskip("transformers")
    texts, ends = [], torch.tensor([2, 2, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        x = batch(6, 8).to(dtype)
        package = split(tmp_path / str(dtype), Experts().to(dtype), (x, ends), cut="last")
        texts.append([line for line in source(package).splitlines() if ".to(" in line or "return" in line])
        pipe = pipegraph.Pipeline(
            package, schedule="zb-h1", microbatches=1, loss_fn=lambda y, _: y.square().mean(), kernels=kernels
        )
        model = Experts().to(dtype)
        model(x, ends).square().mean().backward()
        pipe.step(x, ends, target=x)
        assert not any(report.autograd for report in pipe.kernels_report())
        for stage in pipe.stages.values():
            for name, parameter in stage.named_parameters():
                # Inductor keeps float32 between operations that are fused.
                least = {"rtol": 1.6e-2, "atol": 2e-3} if dtype == torch.bfloat16 else {}
                torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, **least)
        assert package.manifest.requires == ()
    assert texts[0] == texts[1]
    assert texts[0][0].strip() == "return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)"


def test_a_model_that_branches_on_the_dtype_is_the_model_in_its_own(tmp_path: Path) -> None:
    model = BranchesOnDtype()
    assert differences(split(tmp_path, model, (batch(),), cut="norms.2"), model, (batch(),)) == []


class CastsInHalfPrecisionOnly(Normed):
    """Casts to the dtype of its weights only if they have less precision, as the norms of T5 do."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linears[0].weight
        h = x.float() * 2
        if weight.dtype in (torch.float16, torch.bfloat16):
            h = h.to(weight.dtype)
        return super().forward(h)


class ChoosesKernel(Normed):
    """Runs other kernels in bfloat16, one of them on a tensor that it takes twice."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linears[0].weight
        h = x.float().softmax(-1).to(x.dtype)
        h = torch.mm(h, weight) if x.dtype == torch.bfloat16 else torch.matmul(h, weight)
        h = torch.fmax(h, h) if x.dtype == torch.bfloat16 else torch.maximum(h, h)
        return super().forward(h)


@pytest.mark.parametrize("captured_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [CastsInHalfPrecisionOnly, ChoosesKernel])
def test_branches_on_the_dtype_that_change_a_cast_or_a_kernel(
    model: type[Normed], captured_in: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    reference = model().bfloat16()
    package = split(tmp_path, copy.deepcopy(reference).to(captured_in), (batch().to(captured_in),), cut="norms.2")
    for dtype in (torch.float32, torch.bfloat16):
        x = batch().to(dtype)
        assert torch.equal(stages_in(package, dtype, x), copy.deepcopy(reference).to(dtype)(x))


def test_a_slice_of_all_is_kept_for_other_lengths(tmp_path: Path) -> None:
    """Such a slice is in the graph with dynamic sizes, and not in the one with which dtypes are compared."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = Norm(), nn.Linear(8, 8)
            self.register_buffer("table", torch.arange(64.0).unsqueeze(-1))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x + self.table[: x.shape[1]]))

    package = split(tmp_path, Cached(), (torch.randn(2, 5, 8),), cut="norm")
    assert "self.table[: x.shape[1]]" in source(package)
    assert "(hidden_states_1 * (variance + 1e-06).rsqrt()).to(hidden_states.dtype)" in source(package)


class Masked(Normed):
    """Makes a mask and positions in the dtype of its input, from nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linears[0](x)
        visible = torch.arange(x.shape[0]) > 0
        mask = torch.where(visible, torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min)
        positions = torch.arange(x.shape[0]).pow(0.5).to(x.dtype)
        small = torch.full((8,), torch.finfo(x.dtype).eps, dtype=x.dtype)
        return super().forward((x.mean(-1) + mask).softmax(0)[:, None] * x + positions[:, None] + small)


@pytest.mark.parametrize("captured_in", [torch.float32, torch.bfloat16])
def test_what_is_made_from_nothing_has_the_dtype_of_the_model(captured_in: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Masked().bfloat16()
    x = batch().to(captured_in)
    package = split(tmp_path, copy.deepcopy(reference).to(captured_in), (x,), cut="norms.2")
    text = source(package)
    assert "torch.finfo(x.dtype).min" in text and "torch.finfo(x.dtype).eps" in text
    assert "dtype=x.dtype" in text and "e+38" not in text
    for dtype in DTYPES:
        x = batch().to(dtype)
        assert torch.equal(stages_in(package, dtype, x), copy.deepcopy(reference).to(dtype)(x))


def test_every_stage_makes_the_mask_in_its_own_dtype(tmp_path: Path) -> None:
    """A mask is made again in the stages that read it, and follows a value that they have."""

    class Shared(Normed):
        def forward(self, x: Tensor) -> Tensor:
            visible = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
            mask = torch.where(visible, torch.zeros((), dtype=x.dtype), torch.finfo(x.dtype).min)
            for norm, linear in zip(self.norms, self.linears, strict=True):
                x = x + (mask + linear(norm(x)) @ x.T).softmax(-1) @ x
            return x

    model = Shared()
    package = split(tmp_path, model, (batch(),), cut="norms.2")
    second = (package.path / "stage_1.py").read_text()
    assert "torch.finfo(" in second and len(package.manifest.stages[1].inputs) == 1
    for dtype in (torch.float32, torch.bfloat16):
        x = batch().to(dtype)
        assert torch.equal(stages_in(package, dtype, x), copy.deepcopy(model).to(dtype)(x))


class CastsAtTheEnd(Normed):
    """Asks for the dtype of a value that is far away from the last stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().softmax(-1).to(x.dtype)


def test_no_value_crosses_for_its_dtype_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), CastsAtTheEnd(), nn.Linear(8, 8))
    package = split(tmp_path, model, (batch(),), cut="1.norms.1,1.norms.3")
    crossing = [value for value in package.manifest.values.values() if value.producer >= 0]
    assert sorted((value.producer, value.consumers) for value in crossing) == [(0, (1,)), (1, (2,)), (2, ())]
    assert ".to(x" in source(package) and ".dtype)" in source(package)


def test_the_second_export_leaves_the_model_as_it_was() -> None:
    model = Normed()
    model.register_buffer("table", torch.ones(3))
    tensor_ids = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    pipegraph.capture(model, (batch(),))
    assert {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())} == tensor_ids
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


class Codes(nn.Module):
    """Casts its whole numbers to the dtype of a weight, which no other value of the stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, codes: Tensor) -> Tensor:
        return self.second(self.first(nn.functional.one_hot(codes, 4).to(self.first.weight.dtype)))


def test_a_stage_asks_its_modules_for_a_dtype_that_no_value_has(tmp_path: Path) -> None:
    model, codes = Codes(), torch.randint(4, (3, 5))
    package = split(tmp_path, model, (codes,), cut="second")
    assert "next(self.parameters()).dtype" in source(package)
    assert torch.equal(stages_in(package, torch.bfloat16, codes), copy.deepcopy(model).bfloat16()(codes))


class WideResidual(Normed):
    """Adds in float32, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        for norm, linear in zip(self.norms, self.linears, strict=True):
            h = h + linear(norm(h).to(linear.weight.dtype))
        return h


def test_a_residual_in_float32_crosses_stages_in_bfloat16(tmp_path: Path) -> None:
    model = WideResidual()
    package = split(tmp_path, model, (batch(),), cut="norms.2")
    pipe = pipegraph.Pipeline(
        package, microbatches=1, kernels="autograd", parallelize_fn=lambda stage: stage.to(torch.bfloat16)
    )
    x = batch().bfloat16()
    assert torch.equal(pipe.eval(x), model.bfloat16()(x))
