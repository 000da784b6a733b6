"""Random loops over numbers, modules, parameters and pieces: a package computes what its model computes."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.codegen.parity import differences, split

pytestmark = pytest.mark.usefixtures("from_graph")

VARIABLES = ("x", "y", "z", "h", "c")
MODEL = """import torch
from torch import nn
from torch.nn import functional as F


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed({seed})
        self.linear = nn.Linear(6, 6)
        self.cell = nn.GRUCell(6, 6)
        self.repeats = {repeats}
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range({repeats}))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(6)) for _ in range({repeats}))
        self.gate = nn.Linear(6, {repeats})

    def forward(self, x):
        rows = torch.stack([x * k for k in range(1, {repeats} + 1)], 1)
        pieces = rows.unbind(1)
        gate = self.gate(x).softmax(-1)
{lines}


model = nn.Sequential(Body(), Body())
"""


def expression(rng: random.Random, variables: list[str], in_loop: bool) -> str:
    a, b = rng.choice(variables), rng.choice(variables)
    forms = [
        f"{a}.sin() + {b}",
        f"{a} * {b}.sigmoid()",
        f"self.linear({a})",
        f"({a} - {b}) * 0.5",
        f"self.cell({a}, {b})",
    ]
    if in_loop:
        forms += [
            *(f"self.layers[i]({a})", f"{a} * self.scales[i]", f"{a} + rows[:, i]", f"{a} * pieces[i] + {b}"),
            *(f"{a} + gate[..., i : i + 1]", f"{a}.roll(i, -1)", f"F.dropout({a}, 0.0, self.training)"),
        ]
    return rng.choice(forms)


def loop(rng: random.Random, variables: list[str], repeats: int, number: int) -> list[str]:
    """The lines of a loop, and of what reads its lists. Adds to the known variables."""
    headers = {
        "for i in range(self.repeats):": "",
        f"for i in reversed(range({repeats})):": "",
        f"for i in range(1, {repeats}):": "",
        "for i, layer in enumerate(self.layers):": "layer({})",
        "for i, piece in enumerate(pieces):": "piece * {}",
    }
    header = rng.choice(list(headers))
    lists = [f"list_{number}_{position}" for position in range(rng.randint(0, 2))]
    lines = [*(f"{name} = []" for name in lists), header]
    for _ in range(rng.randint(1, 4)):
        target = rng.choice(VARIABLES)
        element = headers[header] if rng.random() < 0.3 else ""
        value = element.format(rng.choice(variables)) if element else expression(rng, variables, in_loop=True)
        lines.append(f"    {target} = {value}")
        variables += [target] if target not in variables else []
        if rng.random() < 0.1:
            lines.append(f"    if i == {rng.randint(0, 2)}: {target} = {target} + 1")
    lines += [f"    {name}.append({rng.choice(variables)}{rng.choice(['', ' * 2'])})" for name in lists]
    for name in lists:
        forms = ["torch.stack({0}).sum(0)", "torch.stack({0}[::-1])[0]", "sum({0})", "{0}[0] + {0}[-1]"]
        forms.append(f"torch.stack([*{{0}}[:-1], {rng.choice(variables)}]).sum(0)")
        lines.append(f"{rng.choice(variables)} = {rng.choice(forms).format(name)}")
    return lines


def program(seed: int) -> str:
    rng = random.Random(seed)
    repeats, variables, lines = rng.randint(3, 5), ["x"], list[str]()
    for target in rng.sample(VARIABLES[1:], rng.randint(1, 3)):
        lines.append(f"{target} = {expression(rng, variables, in_loop=False)}")
        variables.append(target)
    for number in range(rng.randint(1, 2)):
        lines += loop(rng, variables, repeats, number)
    lines.append(f"return {' + '.join(rng.sample(variables, min(2, len(variables))))}")
    return MODEL.format(seed=seed, repeats=repeats, lines="\n".join(f"        {line}" for line in lines))


def check(seed: int, folder: Path) -> None:
    path = folder / "model.py"
    path.write_text(program(seed), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"loop_program_{seed}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.model
    inputs = (torch.randn(3, 6),)
    assert differences(split(folder, model, inputs, cut=1), model, inputs) == [], path.read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
def test_a_program_with_loops(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_programs_with_loops(tmp_path: Path) -> None:
    for seed in range(100, 300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(seed, folder)
