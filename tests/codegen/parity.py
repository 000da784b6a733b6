"""A package against its model: the stages run one after the other, the model as a whole, and what differs is listed."""

from __future__ import annotations

import copy
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.package import Package, Value
from pipegraph.planner.plan import Plan

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5


def plan_of(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, cut: str | int = 2
) -> Plan:
    """Capture and cut: ``cut`` is the number of stages, or points as the command line takes them."""
    captured = pipegraph.capture(model, args, kwargs)
    if isinstance(cut, int):
        return pipegraph.plan(captured, stages=cut, balance="uniform")
    return pipegraph.plan(captured, points=cut.split(","))


def split(
    folder: Path, model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, cut: str | int = 2
) -> Package:
    """Capture, cut and write a model."""
    return write(folder, plan_of(model, args, kwargs, cut))


def write(folder: Path, plan: Plan) -> Package:
    return pipegraph.write_package(plan, folder / "package", overwrite=True)


def source(package: Package) -> str:
    """The code of a package: blocks and stages, docstrings left in."""
    files = ["blocks.py", *(f"{stage.module}.py" for stage in package.manifest.stages)]
    return "\n".join((package.path / file).read_text(encoding="utf-8") for file in files)


def forward_lines(package: Package, stage: int = 0) -> list[str]:
    """The body of a stage's ``forward``, without its indentation."""
    text = (package.path / f"stage_{stage}.py").read_text(encoding="utf-8")
    body = text.split("def forward(")[1].split(":\n", 1)[1]
    return [line.removeprefix(" " * 8) for line in body.splitlines()]


@dataclass(frozen=True)
class Step:
    """One forward and backward. Tied weights are summed over their names; a parameter's gradient may be None."""

    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def differences(
    package: Package,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    train: bool | None = None,
) -> list[str]:
    """Every output, gradient, buffer and name of state in which a package is not its model; [] when it is.

    Both run on one seed. ``train`` sets the mode of both; None leaves the stages as they were loaded and the model as
    it is. The source of the package is formatted and lint-clean, too.
    """
    reference = _run_model(model, args, kwargs or {}, train)
    actual = _run_package(package, args, kwargs or {}, train)
    stages = [package.load_stage(index) for index in range(len(package.manifest.stages))]
    keys = {key for stage in stages for key in stage.state_dict()}
    equal_keys = keys == set(model.state_dict())
    return [
        *([] if equal_keys else [f"state_dict: {sorted(keys ^ set(model.state_dict()))}"]),
        *_differ("output", reference.outputs, actual.outputs),
        *_differ("gradient", reference.gradients, actual.gradients),
        *_differ("buffer", reference.buffers, {name: actual.buffers.get(name) for name in reference.buffers}),
        *untidy(package.path),
    ]


def untidy(folder: Path) -> list[str]:
    """What a formatter and a linter with the project's settings say about generated source; [] is nothing.

    Comments of a model's author (E501) are as long as the author wrote them.
    """
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    config = f"--config={ROOT / 'pyproject.toml'}"
    commands = [
        ["check", "--no-cache", "--quiet", "--ignore=E501", config],
        ["format", "--no-cache", "--diff", "--quiet", config],
    ]
    done = [subprocess.run([ruff, *args, folder], capture_output=True, text=True, check=False) for args in commands]
    return [f"{process.stdout}{process.stderr}" for process in done if process.returncode]


def _run_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool | None) -> Step:
    model, args, kwargs = copy.deepcopy((model, args, kwargs))
    if train is not None:
        model.train(train)
    torch.manual_seed(1)
    outputs = plain(model(*args, **kwargs))
    _backward(outputs)
    names: dict[int, str] = {}
    gradients: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        gradients[names.setdefault(id(parameter), name)] = parameter.grad
    return Step(outputs, gradients, dict(model.named_buffers(remove_duplicate=False)))


def _run_package(package: Package, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool | None) -> Step:
    manifest, at_capture = package.manifest, package.manifest.at_capture()
    args, kwargs = copy.deepcopy((args, kwargs))
    values = dict(_named([*manifest.args], [*args])) | dict(_named(manifest.kwargs, kwargs))
    stages = [package.load_stage(index) for index in range(len(manifest.stages))]
    torch.manual_seed(1)
    for entry, stage in zip(manifest.stages, stages, strict=True):
        if train is not None:
            stage.train(train)
        results = stage(*(values[name] for name in entry.inputs))
        results = (results,) if len(entry.outputs) == 1 else results
        values |= dict(zip(entry.outputs, results, strict=True))
        for name in entry.outputs:
            _check(at_capture.values[name], values[name])
    outputs = _filled(manifest.outputs_in(stages[-1].training), values)
    _backward(outputs)
    gradients: dict[str, Tensor | None] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            name = manifest.stored_name(name)
            total = gradients.get(name)
            are_added = parameter.grad is not None and total is not None
            gradients[name] = total + parameter.grad if are_added else parameter.grad if total is None else total
    buffers = {name: buffer for stage in stages for name, buffer in stage.named_buffers(remove_duplicate=False)}
    return Step(outputs, gradients, buffers)


def _check(value: Value, tensor: Tensor) -> None:
    """The manifest tells the truth about what crosses."""
    actual = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert actual == (value.dtype, value.shape), f"{value.name} is {actual}"
    # torch calls a view that was made under no_grad, of a tensor with a gradient, one that requires a gradient as well.
    flows = tensor.requires_grad and (tensor.is_leaf is False or isinstance(tensor, nn.Parameter))
    assert value.requires_grad == flows or value.producer < 0, f"{value.name} requires_grad"


def _backward(outputs: Any) -> None:
    floats = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if floats:
        # A weighted sum: the gradient of a plain sum is zero after a softmax or a normalisation.
        torch.stack([(leaf.abs() * _weights(leaf)).sum() for leaf in floats]).sum().backward()


def _weights(tensor: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, max(tensor.numel(), 1))[: tensor.numel()].reshape(tensor.shape)


def plain(tree: Any) -> Any:
    """Lists and dicts only, as a manifest has them."""
    if isinstance(tree, dict) or hasattr(tree, "keys"):
        return {str(key): plain(tree[key]) for key in tree}
    if isinstance(tree, (list, tuple)):
        return [plain(part) for part in tree]
    if hasattr(tree, "__dataclass_fields__"):
        return {name: plain(getattr(tree, name)) for name in tree.__dataclass_fields__}
    return tree


def _named(names: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """(name of the value, value) for each leaf of two equal nestings."""
    if isinstance(names, str):
        yield names, values
    elif isinstance(names, dict):
        for key in names:
            yield from _named(names[key], values[key])
    elif names is not None:
        for name, value in zip(names, values, strict=True):
            yield from _named(name, value)


def _filled(names: Any, values: dict[str, Any]) -> Any:
    if isinstance(names, dict):
        return {key: _filled(inner, values) for key, inner in names.items()}
    if isinstance(names, (list, tuple)):
        return [_filled(inner, values) for inner in names]
    return None if names is None else values[names]


def _differ(kind: str, reference: Any, actual: Any, path: str = "") -> Iterator[str]:
    if isinstance(reference, dict) and isinstance(actual, dict) and reference.keys() == actual.keys():
        for key in reference:
            yield from _differ(kind, reference[key], actual[key], f"{path}.{key}".lstrip("."))
    elif isinstance(reference, list) and isinstance(actual, list) and len(reference) == len(actual):
        for index, (reference_part, right) in enumerate(zip(reference, actual, strict=True)):
            yield from _differ(kind, reference_part, right, f"{path}[{index}]")
    elif isinstance(reference, Tensor) and isinstance(actual, Tensor):
        if (reference.shape, reference.dtype) != (actual.shape, actual.dtype):
            yield f"{kind} {path}: {actual.dtype}{list(actual.shape)}, not {reference.dtype}{list(reference.shape)}"
        elif reference.requires_grad != actual.requires_grad:
            yield f"{kind} {path}: requires_grad is {actual.requires_grad}"
        elif not _close(reference.detach(), actual.detach()):
            yield f"{kind} {path}: {actual}, not {reference}"
    elif isinstance(reference, Tensor) or isinstance(actual, Tensor) or reference != actual:
        present = actual if reference is None else reference
        if not (kind == "gradient" and isinstance(present, Tensor) and not present.any()):
            yield f"{kind} {path}: {actual!r}, not {reference!r}"


def _close(reference: Tensor, actual: Tensor) -> bool:
    """Within the tolerance of the largest value; equal infinities and nans, and integers exactly."""
    if not (reference.is_floating_point() or reference.is_complex()):
        return torch.equal(reference, actual)
    finite = reference.isfinite()
    if not torch.equal(finite, actual.isfinite()) or not torch.equal(reference.isnan(), actual.isnan()):
        return False
    if not finite.all() and not torch.equal(reference[reference.isinf()], actual[actual.isinf()]):
        return False
    tolerance = TOLERANCE if reference.dtype != torch.bfloat16 else 2**-6
    largest = max(float(reference[finite].abs().max()), 1e-3) if finite.any() else 1.0
    return bool(((reference[finite] - actual[finite]).abs() <= tolerance * largest).all())


def assert_equal_at_every_size(package: Package, model: nn.Module, *sizes: tuple[int, ...], train: bool = True) -> None:
    """The stages, one after the other, give what the model does."""
    stages = [package.load_stage(index).train(train) for index in range(len(package.manifest.stages))]
    model.train(train)
    for size in sizes:
        x = torch.randn(size)
        values = dict(zip(package.manifest.args, (x,), strict=True))
        for entry, stage in zip(package.manifest.stages, stages, strict=True):
            outputs = stage(*(values[name] for name in entry.inputs))
            values |= dict(zip(entry.outputs, (outputs,) if len(entry.outputs) == 1 else outputs, strict=True))
        expected = model(x)
        assert values[package.manifest.stages[-1].outputs[0]].shape == expected.shape
        torch.testing.assert_close(values[package.manifest.stages[-1].outputs[0]], expected)


def numbers_in_forwards(package: Package) -> set[int]:
    """The integers that are written in the forwards of a package."""
    forwards = re.findall(r"    def forward\(.*?(?=\n\n|\Z)", source(package), re.DOTALL)
    return {int(number) for forward in forwards for number in re.findall(r"(?<![\w.])\d+(?![\w.])", forward)}
