"""A class whose source is not the captured graph is written again in the next plainer form, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.classes import block_classes
from pipegraph.codegen.forward import roll_loops
from pipegraph.codegen.forward.source_numbers import ModuleNumbers
from pipegraph.codegen.package_writer import write_proved_package
from pipegraph.codegen.proof import Proof
from pipegraph.codegen.syntax.expressions import Slice, Subscript, literal
from pipegraph.codegen.syntax.statements import For
from pipegraph.errors import CaptureError

pytestmark = pytest.mark.usefixtures("from_graph")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), 0.25

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * self.factor + x


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def written(folder: Path) -> tuple[Proof, str]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 8)
    plan = pipegraph.plan(pipegraph.capture(model, (x,)), points=["head"])
    package, proof = write_proved_package(plan, folder)
    pipe = pipegraph.Pipeline(package, microbatches=1, kernels="autograd", loss_fn=lambda output, target: output.sum())
    assert torch.allclose(pipe.eval(x), model(x))
    return proof, (folder / "blocks.py").read_text() + (folder / "stage_0.py").read_text()


def without_last_iteration(original: Callable[..., For]) -> Callable[..., For]:
    def loop_statement(*arguments: Any) -> For:
        loop = original(*arguments)
        return replace(loop, iterable=Subscript(loop.iterable, (Slice(None, literal(-1)),)))

    return loop_statement


def test_nothing_is_written_again_without_a_fault(tmp_path: Path) -> None:
    proof, text = written(tmp_path / "out")
    assert not proof.plainer and not proof.reasons
    assert proof.seconds > 0
    assert "for layer in self.layers" in text and "self.factor" in text


def test_a_wrong_loop_is_written_as_its_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_loops, "loop_statement", without_last_iteration(roll_loops.loop_statement))
    proof, text = written(tmp_path / "out")
    assert len(proof.plainer) == 1 and set(proof.plainer.values()) == {"without loops"}
    assert proof.reasons
    assert "for layer in" not in text and "self.factor" in text


def test_a_wrong_attribute_is_written_as_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(ModuleNumbers):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.used: Mapping[str, Any] = _Doubled()

    class _Doubled(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, literal(0.5))

    monkeypatch.setattr(block_classes, "ModuleNumbers", Doubled)
    proof, text = written(tmp_path / "out")
    assert proof.plainer == {"Layer": "with numbers for attributes"}
    assert "self.factor" not in text and "* 0.25" in text


def test_what_no_form_says_is_refused_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_classes.write_forward

    def without_a_statement(*arguments: Any, **options: Any) -> Any:
        forward = original(*arguments, **options)
        return replace(forward, statements=(*forward.statements[:-2], *forward.statements[-1:]))

    model = nn.Sequential(Two(), nn.Linear(8, 4))
    plan = pipegraph.plan(pipegraph.capture(model, (torch.randn(5, 8),)), points=["1"])
    monkeypatch.setattr(block_classes, "write_forward", without_a_statement)
    with pytest.raises(CaptureError, match=r"Two.*\n?.*Nothing was written") as refused:
        pipegraph.write_package(plan, tmp_path / "out")
    assert refused.value.exit_code == 3
    assert "aten.mul" in str(refused.value) and "test_plainer_forms.py" in str(refused.value)
    assert not (tmp_path / "out").exists()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x * 2.0
        return x.tanh()
