"""The ``forward`` of a stage in the text of the model's author, and methods that set attributes of their module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.package import Package
from tests.codegen.parity import differences, forward_lines, source, split

SCALE = 0.5


def normalized(x: Tensor) -> Tensor:
    # by the largest element
    return x / x.abs().amax(-1, keepdim=True).clamp(min=SCALE)


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(super().forward(x))


class Language(nn.Module):
    """The layout of nanoGPT: all modules in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 16
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(20, 8),
                "wpe": nn.Embedding(16, 8),
                "h": nn.ModuleList(Layer(8, 8) for _ in range(3)),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.head = nn.Linear(8, 20)

    def positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.size(1), device=tokens.device)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        _, length = tokens.size()
        assert length <= self.block_size, f"{length} tokens are more than {self.block_size}"
        # Tokens and places
        x = normalized(self.transformer.wte(tokens) + self.transformer.wpe(self.positions(tokens)))
        for layer in self.transformer.h:
            x = layer(x)
        x = self.transformer.ln_f(x)
        return {"logits": self.head(x * SCALE)}


@pytest.fixture
def language() -> Language:
    torch.manual_seed(0)
    return Language()


TOKENS = torch.arange(15).reshape(3, 5)


def test_statements_before_and_after_the_cut_are_the_authors(language: Language, tmp_path: Path) -> None:
    package = split(tmp_path, language, (TOKENS,), cut="transformer.h.1")
    assert forward_lines(package, 0)[:5] == [
        "_, length = tokens.size()",
        'assert length <= self.block_size, f"{length} tokens are more than {self.block_size}"',
        "# Tokens and places",
        "x = normalized(self.transformer.wte(tokens) + self.transformer.wpe(self.positions(tokens)))",
        'return self.transformer["h"][0](x)',
    ]
    assert forward_lines(package, 1)[-2:] == ["x = self.transformer.ln_f(x)", "return self.head(x * 0.5)"]
    text = (package.path / "stage_0.py").read_text()
    assert "    def positions(self, tokens: Tensor) -> Tensor:\n        return torch.arange(tokens.size(1)" in text
    assert "self.block_size = 16\n" in text
    assert text.startswith('"""Stage 0 of 2 of Language.  Stage0: the text of test_text_of_stages.py."""')
    for train in (True, False):
        assert differences(package, language, (TOKENS,), train=train) == []
    first, second = (package.load_stage(index).eval() for index in range(2))
    torch.testing.assert_close(second(first(TOKENS[:2, :3])), language.eval()(TOKENS[:2, :3])["logits"])


class Decoder(nn.Module):
    """The layout of Tacotron 2: the state of the cells is in attributes, which methods read and set."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.project = nn.Linear(8, 4)

    def start(self, memory: Tensor) -> None:
        self.hidden = memory.new_zeros(memory.size(0), 8)
        self.total = torch.zeros_like(self.hidden)

    def decode(self, frame: Tensor) -> Tensor:
        self.hidden = self.cell(frame, self.hidden)
        self.hidden = F.dropout(self.hidden, 0.0, self.training)
        self.total = self.total + self.hidden
        return self.project(self.total)

    def forward(self, memory: Tensor) -> Tensor:
        self.start(memory)
        outputs = []
        for step in range(memory.size(1)):
            outputs += [self.decode(memory[:, step])]
        return torch.stack(outputs, dim=1) + self.total.mean(-1)[:, None, None]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decoder, self.head = nn.Linear(8, 8), Decoder(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.embed(x)))


def recurrent(folder: Path) -> tuple[Recurrent, Package]:
    torch.manual_seed(0)
    model = Recurrent()
    with pytest.warns(UserWarning, match="decoder.hidden"):
        return model, split(folder, model, (torch.randn(3, 5, 8),), cut="head")


def test_attributes_that_a_call_sets_are_deleted_at_its_end(tmp_path: Path) -> None:
    model, package = recurrent(tmp_path)
    assert """
        for step in range(memory.size(1)):
            outputs += [self.decode(memory[:, step])]
        outputs = torch.stack(outputs, dim=1) + self.total.mean(-1)[:, None, None]
        # A stage holds no tensors between calls.
        del self.hidden, self.total
        return outputs

    def start(self, memory: Tensor) -> None:
        self.hidden = memory.new_zeros(memory.size(0), 8)
""" in source(package)
    stage = package.load_stage(0)
    for batch in (torch.randn(3, 5, 8), torch.randn(2, 7, 8)):  # of another number of steps, too
        torch.testing.assert_close(stage(batch), model.decoder(model.embed(batch)))
    assert not hasattr(stage.decoder, "hidden")


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_stages_that_set_attributes_train(kernels: str, tmp_path: Path) -> None:
    model, package = recurrent(tmp_path)
    batch, target = torch.randn(6, 7, 8), torch.randn(6, 7, 4)
    pipe = pipegraph.Pipeline(package, "zb-h1", microbatches=3, loss_fn=F.mse_loss, kernels=kernels)
    pipe.step(batch, target=target)
    F.mse_loss(model(batch), target).backward()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


class Replaceable(nn.Module):
    """Methods that ``forward`` does not call set its layer and its number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(8, 8), 3.0

    def set_input_embeddings(self, layer: nn.Module) -> None:
        self.embed = layer

    def rescale(self, scale: float) -> None:
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).tanh() / self.scale  # by the scale


def test_methods_that_never_ran_set_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(Replaceable(), Replaceable(), nn.Linear(8, 4))
    package = split(tmp_path, model, (torch.randn(3, 5, 8),), cut="1")
    text = source(package)
    assert "        return self.embed(x).tanh() / self.scale  # by the scale\n" in text
    assert "        self.scale = 3.0\n" in text and "        self.embed = nn.Linear(8, 8)\n" in text
    assert differences(package, model, (torch.randn(3, 5, 8),)) == []


class Routed(nn.Module):
    """A table of constants that differs between the modes, and a cast that does nothing in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.linear = seed, nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(x.dtype)
        places = [(index * self.seed) % 8 for index in range(8)] if self.training else [0] * 8
        table = torch.tensor(places, device=x.device)
        routed = x[..., table]
        return x + self.linear(routed) * mask


class Routing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(seed) for seed in (3, 5, 7))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = torch.ones_like(mask).where(mask > 0, 0.5).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def test_a_constant_of_each_mode_stays_in_its_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Routing(), (torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.float64))
    package = split(tmp_path, model, inputs, cut="layers.1,layers.2")
    assert [entry.inputs for entry in package.manifest.stages] == [("x", "mask"), ("mask_1", "x_1"), ("mask_1", "x_2")]
    text = source(package)
    assert text.count("        mask = mask.to(x.dtype)\n") == 1  # one class for the three layers
    assert "nn.Module()" not in text
    for train in (True, False):
        assert differences(package, model, inputs, train=train) == []
