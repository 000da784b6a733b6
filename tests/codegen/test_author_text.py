"""Classes in the text of their author: what is taken from it, what is cut, and what comes from the graph instead."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.codegen.author_text.names import origin_of
from tests.codegen.author_models import (
    AroundHeads,
    Chain,
    Chained,
    Guarded,
    InPlaceBlock,
    LoggingBlock,
    Mixed,
    OuterVariable,
)
from tests.codegen.mixed_models import Appending, Encoded, ViewOfTransposed
from tests.codegen.parity import differences, source, split

INPUTS = (torch.randn(3, 5, 8),)


def blocks_of(folder: Path, model: nn.Module, cut: str = "blocks.1") -> str:
    package = split(folder, model, INPUTS, cut=cut)
    stages = [package.load_stage(index) for index in range(len(package.manifest.stages))]
    for train in (True, False):
        assert differences(package, model, INPUTS, train=train) == []
        x = expected = torch.randn(2, 7, 8)  # of other sizes than the example
        for stage in stages:
            x = stage.train(train)(x)
        torch.testing.assert_close(x, model.train(train)(expected))
    return source(package)


def test_forward_methods_and_functions_are_the_authors(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain())
    assert (
        """
    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(normalized(x))
        x = x + mixed
        total = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if index == 0:
                total = total + expert(x)
            else:
                total = total + self.act(expert(x)) / index
        if self.training:
            total = total + self.noise * total.tanh()
        else:
            total = total * 2
        return x + total
"""
        in text
    )
    assert (
        """
def normalized(x: Tensor) -> Tensor:
    # by the root of the mean square
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
"""
        in text
    )
    assert "\nEPSILON = 1e-05\n" in text
    assert "        self.act = F.gelu\n" in text


def test_branches_that_never_ran_are_cut(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain())
    assert "LOGGER" not in text
    assert (
        """
        q = rotate(q)  # positions
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        # later positions are hidden
        length = x.shape[1]
"""
        in text
    )
    assert "if mask" not in text


def test_properties_methods_and_configurations_are_resolved(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain())
    assert (
        """
    @property
    def head_dim(self) -> int:
        return self.width // self.heads
"""
        in text
    )
    assert "        self.width = 8\n" in text
    assert "    def split_heads(self, x: Tensor) -> Tensor:\n" in text


def test_only_branches_that_went_both_ways_stay(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain(Chained))
    assert (
        """
        y = self.inner(x)
        y = y + x
        for power in range(1, 4):
            if power == 1:
                y = y + 1
            elif power == 2:
                y = y * 0.5
            else:
                y = y.tanh()
        return y
"""
        in text
    )


def test_a_statement_that_no_package_can_run_is_left_out(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain(LoggingBlock))
    assert "    def forward(self, x: Tensor) -> Tensor:\n        return self.inner(x).relu() + x\n" in text
    assert "LOGGER" not in text


def test_a_class_that_needs_more_than_torch_is_written_from_the_graph(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain(OuterVariable))
    assert "self.inner(x)) + x" in text
    assert "LOGGER" not in text
    assert "super().forward" not in text


def test_a_stage_does_not_write_into_what_it_is_given(tmp_path: Path) -> None:
    """The first block of a stage adds in place to its argument, which the sender may still read."""
    text = blocks_of(tmp_path, Chain(InPlaceBlock))
    assert "x += " not in text


def test_statements_of_every_kind_are_cut(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain(Guarded))
    assert (
        """
    def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
        y = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            y = self.drop(y) / self.bound(y)
        # a plain tensor
        y = y * scale
        return y

    @torch.no_grad()
    def bound(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1, keepdim=True) + 1
"""
        in text
    )


def test_numbers_of_heads_are_left_open_for_tensor_parallel_ranks(tmp_path: Path) -> None:
    """What names five sizes is written from the graph; of three sizes the last is left open in the text."""
    text = blocks_of(tmp_path, Chain(AroundHeads))
    assert ".unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)" in text
    assert ".transpose(1, 2).reshape(rows, length, -1)" in text
    assert "        # the residual\n        return x + self.out(self.attention(x))\n" in text


def test_a_function_of_both_kinds_of_classes_is_defined_once(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain(Mixed))
    assert text.count("def rotate(") == 1
    assert "LOGGER" not in text


def test_the_head_names_files_and_their_licenses(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Chain())
    assert "rotate, normalized, Attention, Block: the text of author_models.py." in text
    heads = {
        "# SPDX-License-Identifier: MIT": "MIT",
        "# Licensed under the Apache License, Version 2.0": "Apache License",
        "# Copyright 2022 Some Team.  All rights reserved.\n#\n# Licensed under the Apache License": (
            "Apache License; Copyright 2022 Some Team"
        ),
        '"""Copyright (c) 2023, A. Author"""': "Copyright (c) 2023, A. Author",
    }
    for number, (head, terms) in enumerate(heads.items()):
        file = tmp_path / f"licensed_{number}.py"
        file.write_text(f"{head}\n\nimport torch\n")
        assert origin_of(str(file)) == f"licensed_{number}.py ({terms})"


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_steps_train_on_the_numbers_of_the_model(kernels: str, tmp_path: Path) -> None:
    """Microbatches of other sizes than the example, under a schedule with separate weight gradients."""
    model = Chain()
    package = split(tmp_path, model, INPUTS, cut="blocks.1")
    pipe = pipegraph.Pipeline(package, "zb-h1", microbatches=2, loss_fn=F.mse_loss, kernels=kernels)
    for rows, length in ((4, 6), (6, 3)):
        x, target = torch.randn(rows, length, 8), torch.randn(rows, length, 8)
        model.zero_grad()
        F.mse_loss(model(x), target).backward()
        pipe.step(x, target=target)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
            parameter.grad = None


ODD_SOURCE = """
import torch
import torch.fft as F
from torch import nn

math = 3.0


class Clash(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) * math + F.rfft(x, dim=-1).abs().sum(-1, keepdim=True)


class Reversed(Clash):
    def forward(self, x):
        kind = "a\u202eb"  # from here on a terminal would write from right to left
        return self.inner(x) * len(kind)
"""


def test_names_with_another_meaning_and_unprintable_characters_are_left_out(tmp_path: Path) -> None:
    """`F` is torch.fft in the model's file, and torch.nn.functional in a package."""
    file = tmp_path / "odd_source.py"
    file.write_text(ODD_SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("odd_source", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = nn.Sequential(nn.Linear(8, 8), module.Clash(), module.Reversed(), nn.Linear(8, 8))
    text = blocks_of(tmp_path, model, cut="2")
    assert "torch.fft.rfft(x)" in text
    assert "self.inner(x) * 3.0" in text
    assert "\u202e" not in text


def test_a_dispatch_table_is_replaced_by_the_function_that_ran(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Encoded(), cut="encoder.layers.2")
    assert (
        """
        rows = x.shape[:-1]
        shape = (*rows, -1, self.head_dim)
        # one head has four features
        q = self.query(x).view(shape).transpose(1, 2)
        k = self.key(x).view(shape).transpose(1, 2)
        v = self.value(x).view(shape).transpose(1, 2)
        mixed = scaled(q, k, v, None)[0]
        mixed = mixed.reshape(*rows, -1).contiguous()  # heads side by side
        return self.out(mixed), None
"""
        in text
    )
    assert "ATTENTION_FUNCTIONS" not in text


def test_arguments_that_nothing_reads_are_left_out(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Encoded(), cut="encoder.layers.2")
    assert "        x, _ = self.attention(self.norm(x))\n" in text


def test_a_branch_that_another_dtype_takes_stays(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Encoded(), cut="encoder.layers.2")
    assert "        if x.dtype == torch.float16:\n            x = x.clamp(-60000, 60000)\n" in text


def test_a_class_that_is_cut_keeps_the_statements_on_both_sides(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, Encoded(), cut="encoder.layers.2")
    assert (
        """
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
"""
        in text
    )
    assert (
        """
    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        # a factor for each feature
        hidden = hidden * F.softplus(self.scale.weight)
        hidden = self.norm(hidden)
        return hidden
"""
        in text
    )
    assert "self.encoder = EncoderStart()" in text
    assert "self.encoder = EncoderEnd()" in text
    assert "nn.Module()" not in text


def test_a_list_that_the_graph_fills_is_read_from_the_graph(tmp_path: Path) -> None:
    text = blocks_of(tmp_path, nn.Sequential(nn.Linear(8, 8), Appending(), Appending()), cut="2")
    assert "parts = []" not in text
    assert "        # and the input\n        return joined + x\n" in text


def test_a_statement_that_differs_from_the_graph_is_written_from_it_alone(tmp_path: Path) -> None:
    """The `contiguous` before a view stands in a table, and the graph has one reshape for both."""
    text = blocks_of(tmp_path, nn.Sequential(nn.Linear(8, 8), ViewOfTransposed(), ViewOfTransposed()), cut="2")
    assert "        # halves of the features\n" in text
    assert "        # the residual\n        return h.tanh() + x\n" in text
    assert "h.view(" not in text


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.skip = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        # keeps the variance
        return (h + self.skip(x)) / 2**0.5


def test_the_last_part_of_a_class_keeps_its_return(tmp_path: Path) -> None:
    model = nn.Sequential(Residual(), nn.Linear(8, 8), Residual())
    package = split(tmp_path, model, INPUTS, cut="0.skip")
    assert differences(package, model, INPUTS) == []
    assert """
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        # keeps the variance
        return (h + self.skip(x)) / 2**0.5
""" in source(package)
