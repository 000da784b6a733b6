"""Stages that are converted to bfloat16 have the dtypes that the converted model has, where the source writes in place
or makes tensors in the dtype of another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.parity import split

NUMBERS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


def in_place_item(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = torch.linspace(0, 1, 4)
    return y


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "x += table": lambda x: x.__iadd__(torch.linspace(0, 1, 8)),
    "x *= table": lambda x: x.__imul__(torch.linspace(0, 1, 8)),
    "x.sub_": lambda x: x.sub_(torch.arange(8.0)),
    "x.div_": lambda x: x.div_(torch.linspace(1, 2, 8)),
    "x.addcmul_": lambda x: x.addcmul_(torch.linspace(0, 1, 8), torch.linspace(1, 2, 8)),
    "x.pow_": lambda x: x.abs().pow_(torch.linspace(1, 2, 8)),
    "x[:, 0] = table": in_place_item,
    "x + table": lambda x: x + torch.linspace(0, 1, 8),
    "new_tensor": lambda x: x + x.new_tensor(NUMBERS),
    "new_tensor of one": lambda x: x * x.new_tensor(0.1),
    "tensor(dtype=x.dtype)": lambda x: x + torch.tensor(NUMBERS, dtype=x.dtype),
    "tensor": lambda x: x + torch.tensor(NUMBERS),
    "new_full": lambda x: x + x.new_full((8,), 0.1),
    "arange(dtype=x.dtype)": lambda x: x + torch.arange(8, dtype=x.dtype),
    "as_tensor.to(x)": lambda x: x + torch.as_tensor(NUMBERS).to(x),
}


class Model(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(self.last(torch.tanh(self.first(x))))


@pytest.mark.parametrize("kind", KINDS)
def test_converted_stages_are_the_converted_model(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(KINDS[kind]), torch.linspace(-1, 1, 32).reshape(4, 8)
    package = split(tmp_path, model, (x,), cut="last")
    first, last = (package.load_stage(index).bfloat16() for index in (0, 1))
    output, expected = last(first(x.bfloat16())), model.bfloat16()(x.bfloat16())
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
