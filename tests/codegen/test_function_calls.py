"""Statements from the graph call the author's functions and methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from tests.codegen.parity import differences, forward_lines, source, split


def weighted(raw: Tensor, depths: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Colors, depth and weights of each ray."""
    weights = torch.softmax(raw[..., 0], dim=-1).clamp(min=floor)
    return (weights[..., None] * raw[..., 1:]).sum(-2), (weights * depths).sum(-1), weights


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], dim: int = -1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn pairs of features."""
    cos, sin = tables
    x1, x2 = x.to(dtype).chunk(2, dim=dim)
    is_wide = x.shape[-1] > 4  # noqa: F841
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=dim).to(x.dtype)


def noisy(x: Tensor, training: bool) -> Tensor:
    """The caller says the mode."""
    if training:
        return x + torch.rand_like(x)
    return x * 1.5


class Field(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.inner(x)))


class Renderer(nn.Module):
    """A loop that a cut opens: each level samples what the level before it saw."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        self.scale = 0.5
        self.fields = nn.ModuleList([Field(width) for _ in range(levels)])

    def refine(self, depths: Tensor, weights: Tensor, power: int) -> Tensor:
        """Other depths where weights are large."""
        moved = depths + self.scale * weights**power
        if self.training:
            moved = moved + torch.rand_like(moved)
        return moved

    def forward(self, rays: Tensor, depths: Tensor) -> dict[str, Tensor]:
        weights = torch.zeros_like(depths)
        colors = []
        for level, field in enumerate(self.fields):
            if level > 0:
                depths = self.refine(depths, weights, level + 1)
            raw = field(rays[:, None, :] * depths[..., None])
            color, depth, weights = weighted(raw, depths, floor=0.01)
            colors.append(color)
        return {"color": torch.stack(colors, dim=1), "depth": depth}


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 8), torch.rand(4, 6)


@pytest.mark.parametrize("training", [True, False])
def test_a_stage_that_a_loop_is_cut_in_calls_functions_and_methods(tmp_path: Path, training: bool) -> None:
    model, batch = Renderer().train(training), example()
    package = split(tmp_path, model, batch, cut="fields.1,fields.2")
    lines = forward_lines(package, 1)
    assert any(line.endswith("weights = weighted(raw, depths, floor=0.01)") for line in lines), lines
    assert "depths = self.refine(depths, weights, 3)" in lines
    assert "        if self.training:" in source(package)
    if not training:  # with noise of its own, training has no second run to compare with
        assert not differences(package, model, batch)


def loss_of(results: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(results["depth"], target)


def test_another_batch_in_microbatches_trains_like_the_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Renderer().eval()
    package = split(tmp_path, model, example(), cut="fields.2")
    rays, depths, target = torch.randn(12, 8), torch.rand(12, 6), torch.randn(12)
    pipe = pipegraph.Pipeline(package, schedule="zb-h1", microbatches=3, loss_fn=loss_of, kernels="eager")
    results = model(rays, depths)
    torch.testing.assert_close(pipe.eval(rays, depths)["depth"], results["depth"])
    loss = loss_of(results, target)
    torch.testing.assert_close(pipe.step(rays, depths, target=target).loss, loss.detach())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: parameter.grad for name, parameter in pipe.named_parameters()}, gradients)


class Processor:
    """What attention runs: no module, as in diffusers."""

    def __call__(self, attention: Attention, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        query, key = attention.query(x), attention.key(x)
        query = rotate(query, tables, dtype=torch.float64)
        key = rotate(key, tables, dtype=torch.float64)
        return F.scaled_dot_product_attention(query, key, attention.value(x))


class Attention(nn.Module):
    def __init__(self, width: int, processor: Processor) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.processor = processor

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.processor(self, x, tables)


class Transformer(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(width, Processor()) for _ in range(depth)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, tables=(cos, sin))
        return x


def test_the_text_of_an_object_that_runs_a_module_is_that_of_its_forward(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, batch = Transformer(), (torch.randn(3, 5, 8), torch.randn(5, 4), torch.randn(5, 4))
    package = split(tmp_path, model, batch, cut="layers.1")
    text = source(package)
    assert "query = rotate(query, tables, dtype=torch.float64)" in text
    assert "def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:" in text
    assert text.count("def rotate(") == 1
    assert "is_wide" not in text
    assert not differences(package, model, batch)


def window(length: int, width: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Positions that are near."""
    at = torch.arange(length, device=device)
    near = (at[:, None] - at[None, :]).abs() < width
    return near.expand(*shape, length, length)


class Windowed(nn.Module):
    """Around calls with sizes, a device and a tuple, statements that a package cannot run."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.owner = object()

    @staticmethod
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by + x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mask = window(length, 3, (batch, 1), x.device) if self.owner is not None else x
        h = self.scaled(self.proj(x), 0.5) if self.owner is not None else x
        scores = (h @ h.mT)[:, None].masked_fill(~mask, -1e4).softmax(-1)
        return (scores @ h[:, None])[:, 0]


def test_sizes_and_devices_are_arguments(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(Windowed(), Windowed())
    package = split(tmp_path, model, (torch.randn(4, 6, 8),), cut="1")
    text = source(package)
    assert "mask = window(x.shape[1], 3, (x.shape[0], 1), x.device)" in text
    assert "h = self.scaled(self.proj(x), 0.5)" in text and "    @staticmethod\n    def scaled(" in text
    x = torch.randn(6, 9, 8)
    pipe = pipegraph.Pipeline(package, microbatches=3, loss_fn=F.mse_loss, kernels="eager")
    torch.testing.assert_close(pipe.eval(x), model(x))


def fill_value(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.masked_fill(x > 0, torch.finfo(dtype).min)


class Filled(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.owner = object()

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        return fill_value(x, x.dtype).softmax(-1) if self.owner is not None else x


def test_a_dtype_that_follows_the_model_is_no_argument(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(Filled(), Filled())
    package = split(tmp_path, model, (torch.randn(4, 8),), cut="1")
    assert "fill_value(" not in source(package)
    model, x = model.bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16)
    pipe = pipegraph.Pipeline(package, microbatches=2, loss_fn=F.mse_loss, kernels="eager", precision="bf16")
    torch.testing.assert_close(pipe.eval(x), model(x))


def dropped(x: Tensor, p: float, training: bool = False) -> Tensor:
    return F.dropout(x.tanh(), p, training) * 2


def shifted(x: Tensor, evaluating: bool) -> Tensor:
    return x * 1.5 + 1 if evaluating else x - torch.rand_like(x)


class TellsMode(nn.Module):
    """Statements that a package cannot run read ``self.owner``, around functions that are told the mode."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.owner = object()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.owner is not None else x
        x = noisy(x, self.training) if self.owner is not None else x
        x = dropped(x, 0.25, training=self.training) if self.owner is not None else x
        x = shifted(x, not self.training) if self.owner is not None else x
        return self.last(x)


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by + 1


class TellsModeOtherwise(TellsMode):
    def forward(self, x: Tensor) -> Tensor:
        is_noisy = self.training
        x = self.first(x) if self.owner is not None else x
        x = noisy(x, is_noisy) if self.owner is not None else x
        x = scaled(x, 0.5 if self.training else 1.5) if self.owner is not None else x
        x = scaled(x, 3.0) if self.owner is not None else x
        return self.last(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_function_is_told_the_mode_of_the_stage(tmp_path: Path, training: bool) -> None:
    torch.manual_seed(3)
    model, batch = TellsMode().train(training), (torch.randn(3, 8),)
    package = split(tmp_path, model, batch, cut="last")
    text = source(package)
    assert "x = noisy(x, self.training)" in text
    assert "x = dropped(x, 0.25, training=self.training)" in text
    assert "shifted(x, not self.training)" in text
    assert not differences(package, model, batch, train=True)
    assert not differences(package, model, batch, train=False)


def test_numbers_that_follow_the_mode_are_written_from_the_graph(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, batch = TellsModeOtherwise(), (torch.randn(3, 8),)
    package = split(tmp_path, model, batch, cut="last")
    text = source(package)
    assert "noisy(" not in text and text.count("scaled(") == 2 and "scaled(x, 3.0)" in text
    assert not differences(package, model, batch, train=False)


class PartlyCut(nn.Module):
    """A cut inside of a method that calls modules."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def both(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) + 1


def test_a_part_of_a_method_is_no_call(tmp_path: Path) -> None:
    model, batch = PartlyCut(), (torch.randn(3, 8),)
    package = split(tmp_path, model, batch, cut="last")
    assert "both(" not in source(package)
    assert not differences(package, model, batch)


def residual(x: Tensor, layer: nn.Module, scale: float = 1.0) -> Tensor:
    """A function that is given a module."""
    return x + scale * layer(x)


class GivenModules(nn.Module):
    """Functions and methods take the modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Field(8) for _ in range(4)])
        self.norms = nn.ModuleDict({name: nn.LayerNorm(8) for name in ("a", "b", "c", "d")})

    def normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        return torch.tanh(norm(x)) * 2.0

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms.values(), strict=True):
            x = residual(x, layer, scale=0.5)
            x = self.normed(x, norm)
        return x


def test_functions_are_given_modules(tmp_path: Path) -> None:
    model, batch = GivenModules(), (torch.randn(3, 5, 8),)
    package = split(tmp_path, model, batch, cut="layers.2")
    text = source(package)
    assert "x = residual(x, self.layers[0], scale=0.5)" in text
    assert 'x = self.normed(x, self.norms["a"])' in text
    assert not differences(package, model, batch)
    assert not differences(package, model, batch, train=False)


class CutWithMask(nn.Module):
    """A static method that the first part of the module calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(8) for _ in range(4)])

    @staticmethod
    def near(positions: Tensor, width: int) -> Tensor:
        return (positions[:, None] - positions[None, :]).abs() < width

    def forward(self, x: Tensor) -> Tensor:
        mask = self.near(torch.arange(x.shape[1], device=x.device), 3)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Masked(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(~mask, -1e4).softmax(-1)
        return x + scores @ self.linear(x)


class AroundCut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = CutWithMask(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def test_a_static_method_of_a_part_is_there_once(tmp_path: Path) -> None:
    model, batch = AroundCut(), (torch.randn(3, 5, 8),)
    package = split(tmp_path, model, batch, cut="model.layers.2")
    text = source(package)
    assert text.count("def near(") == 1
    assert not differences(package, model, batch)


class Chooses(nn.Module):
    """A method whose two modes read other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.other = torch.rand(2, 8)

    def middle(self, h: Tensor) -> Tensor:
        return h.tanh() * (self.table if self.training else self.other)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


def test_a_choice_of_the_mode_inside_of_a_method_leaves_nothing_outside(tmp_path: Path) -> None:
    model, batch = Chooses(), (torch.randn(3, 8),)
    package = split(tmp_path, model, batch, cut="after")
    assert forward_lines(package)[0] == "return self.middle(self.before(x))"
    for train in (True, False):
        assert not differences(package, model, batch, train=train)
