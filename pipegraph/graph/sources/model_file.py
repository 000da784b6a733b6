"""A model from a Python file, with the inputs of one microbatch."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from pipegraph.arguments import require_path
from pipegraph.errors import OutputError, SourceError, nearest
from pipegraph.graph.initialisation import initialisation_recorded
from pipegraph.graph.sources.model_source import ModelSource, TrainingFunctions, parameters_on_meta


def load_file(model: str, weights: bool) -> ModelSource:
    """Run the file and take its model and example inputs; without ``weights`` parameters land on the meta device.

    Torch's generator has the seed 0 before: the processes of a run, which load the file each, have the same example.
    """
    path, attribute = model_file(model), _split_name(model)[1]
    torch.manual_seed(0)
    with initialisation_recorded() as mark, nullcontext() if weights else parameters_on_meta():
        module = _import_file(path)
        built = _build(module, path, attribute)
        mark(built)
    args, kwargs = _example_inputs(module, path)
    _check_no_other_arguments(module, built, kwargs, path)
    return ModelSource(
        name=path.name if attribute is None else f"{path.name}:{attribute}",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        model=built,
        args=args,
        kwargs=kwargs,
        loss_fn=getattr(module, "loss_fn", None),
        example_target=_call_if_function(getattr(module, "example_target", None), path, "example_target"),
        dynamic_shapes=getattr(module, "dynamic_shapes", None),
        batch_dims=getattr(module, "batch_dims", None),
        tp_plan=_tp_plan(module, path),
        rebuild=lambda: load_file(model, weights).model,
        training=TrainingFunctions(
            **{field.name: getattr(module, field.name, None) for field in fields(TrainingFunctions)}
        ),
    )


def model_file(model: str) -> Path:
    """Return the path of ``file.py`` or ``file.py:name``. Raises SourceError if there is no such file."""
    path, name = _split_name(model)
    if not model or name == "":
        raise SourceError(
            f"MODEL is {model!r}, which names no {'model in the file' if model else 'file'}.",
            "a path to a .py file that defines build_model, with or without :NAME after it.",
        )
    require_path(path, "MODEL is a file", error=SourceError)
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        files = [str(folder / entry.name) for entry in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        hint = nearest(str(path), files) or (f" Python files there: {', '.join(files)}." if files else "")
        problem = f"{path} is a folder, and MODEL a file" if path.is_dir() else f"No model file {path}"
        alternative = f", or hf:{path} if it holds a Hugging Face configuration" if path.is_dir() else ""
        raise SourceError(f"{problem}.{hint}", f"a path to a .py file that defines build_model{alternative}.")
    return path


def _tp_plan(module: ModuleType, path: Path) -> dict[str, str]:
    plan = getattr(module, "tp_plan", None) or {}
    if not isinstance(plan, dict) or not all(isinstance(text, str) for pair in plan.items() for text in pair):
        raise SourceError(
            f"tp_plan in {path} is {plan!r}: it has the name of a style for each pattern of module names.",
            'tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
        )
    return plan


def _split_name(model: str) -> tuple[Path, str | None]:
    """``file.py:name`` → the path and the name; a colon elsewhere belongs to the path."""
    head, colon, name = model.rpartition(":")
    if colon and head.endswith(".py"):
        return Path(head), name
    return Path(model), None


def _import_file(path: Path) -> ModuleType:
    """Run the file as a module; meanwhile its folder can be imported from, as for ``python file.py``."""
    name = f"_pipegraph_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} is not a Python file.", "a path that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _importable(path.parent.resolve()), _errors_named(path, "importing it"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _errors_named(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever the user's file raises into a SourceError that names the file's own line."""
    try:
        yield
    except (SourceError, OutputError):  # what the file prints may have nowhere to go
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            where = f"{path}:{error.lineno}" if error.lineno else str(path)  # of a NUL byte Python says no line
        else:
            frames = traceback.extract_tb(error.__traceback__)
            file_frames = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
            where = f"{path}:{file_frames[-1].lineno}" if file_frames else str(path)
        advice = f"python {path}" if doing == "importing it" else f"{doing} in Python, without arguments"
        raise SourceError(
            f"{where}: {doing} raised {type(error).__name__}: {error}", f"{advice}; it should run without error."
        ) from error


def _build(module: ModuleType, path: Path, attribute: str | None) -> nn.Module:
    if attribute is None:
        attribute = next((name for name in ("build_model", "model") if hasattr(module, name)), None)
        if attribute is None:
            raise SourceError(
                f"{path} defines neither build_model() nor model. It defines: {_defined_names(module)}.",
                f"a zero-argument function build_model that returns the nn.Module, or {path}:NAME.",
            )
    elif not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise SourceError(
            f"{path} has no {attribute}.{nearest(attribute, names)} It defines: {_defined_names(module)}.",
            f"{path}:NAME with the name of a model or of a function that builds one.",
        )
    model = getattr(module, attribute)
    if not isinstance(model, nn.Module):
        model = _call_if_function(model, path, attribute)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{path}: {attribute} gives {type(model).__name__}, not a torch.nn.Module.",
            f"let {attribute} return the model.",
        )
    return model


def _defined_names(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(names[:8]) or "nothing of its own"


def _example_inputs(module: ModuleType, path: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not hasattr(module, "example_inputs"):
        raise SourceError(
            f"{path} defines no example_inputs, so the model cannot be traced.",
            "example_inputs = (tensor,) with the inputs of one microbatch, or a dict for keyword arguments.",
        )
    inputs = _call_if_function(module.example_inputs, path, "example_inputs")
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return inputs[0], dict(inputs[1])
        return inputs, {}
    raise SourceError(
        f"{path}: example_inputs is a {type(inputs).__name__}; it must be a tuple (positional arguments), a dict "
        "(keyword arguments) or a pair of both.",
        "example_inputs = (tensor,).",
    )


def _check_no_other_arguments(module: ModuleType, model: nn.Module, kwargs: Collection[str], path: Path) -> None:
    """Raise SourceError for ``example_kwargs = {"mask": mask}``: the model would be captured without them."""
    names = {name for name in inspect.signature(model.forward).parameters if name != "self"}
    for name, value in vars(module).items():
        is_example = name.startswith("example_") and name not in ("example_inputs", "example_target")
        if is_example and isinstance(value, dict) and names.issuperset(value) and not set(kwargs).issuperset(value):
            raise SourceError(
                f"{path}: {name} holds arguments of {type(model).__name__} ({', '.join(value)}), and nothing reads it: "
                "the model would be captured without them.",
                f"example_inputs = ((tensor,), {name}), a pair of both kinds of arguments.",
            )


def _call_if_function(value: Any, path: Path, name: str) -> Any:
    if callable(value) and not isinstance(value, nn.Module):
        with _errors_named(path, f"{name}()"):
            return value()
    return value
