"""The loss of the last stage and its metrics: what is refused as one, and what a loss function holds."""

from __future__ import annotations

import logging
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError, is_user_file
from pipegraph.kernels.interface import Loss
from pipegraph.torch_private.fake_tensors import is_fake
from pipegraph.torch_private.modules import attributes as torch_attributes
from pipegraph.torch_private.modules import children

CONTAINERS = (dict, OrderedDict, defaultdict, list, set)
"""The containers that can be changed in place, and put back."""

# A logger caches which levels are on: its content changes with each new level, and no graph depends on it.
_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, types.BuiltinFunctionType, logging.Logger)


class LossValue(NamedTuple):
    """What a loss function returned: a tensor without dimensions, and others by name, which have no gradient."""

    loss: Tensor
    metrics: dict[str, Tensor]


def compute_loss(loss: Loss | None, outputs: tuple[Tensor, ...], target: Any) -> LossValue:
    """Return the loss and its metrics.

    Raises:
        PipegraphError: the loss function is missing, its result is not a loss or has no gradient, or its metrics are
            not a dict of tensors without dimensions.
    """
    if loss is None:
        raise PipegraphError("a loss was asked of a stage that has none.", "Pipeline(…, loss_fn=…).")
    value, metrics = divide_loss(loss(outputs, target))
    needs_gradient = torch.is_grad_enabled() and any(map(requires_grad, outputs))
    if needs_gradient and isinstance(value, Tensor) and not value.requires_grad:
        raise PipegraphError(
            "loss_fn returned a tensor without a gradient, so nothing would be trained.",
            "compute it from the output with tensor operations, without detach() or no_grad.",
        )
    check_loss(value)
    for name, metric in metrics.items():
        _check_metric(name, metric)
    # A metric may be memory that the next microbatch writes to, such as a buffer.
    return LossValue(value, {name: metric.detach().clone() for name, metric in metrics.items()})


@contextmanager
def explained_without_target(target: Any) -> Iterator[None]:
    """A context for a loss function that may need a target: if it fails for the lack of one, PipegraphError says so."""
    try:
        yield
    except (AttributeError, TypeError) as error:  # which Python and torch raise for None, and name its type
        if target is not None or "None" not in str(error):
            raise
        raise PipegraphError(
            f"loss_fn(output, None) raised {type(error).__name__}: {error}\nThe call was given no target.",
            "target=… on the rank of the last stage.",
        ) from error


def divide_loss(returned: Any) -> tuple[Any, dict[Any, Any]]:
    """Divide what a loss function returned into the loss and its metrics. Raises PipegraphError for a wrong form."""
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2:
        raise PipegraphError(
            f"loss_fn(output, target) returned a tuple of {len(returned)} items.",
            "return one number, or (loss, metrics) with a dict of metrics.",
        )
    loss, metrics = returned
    if not isinstance(metrics, dict):
        raise PipegraphError(
            f"loss_fn returned (loss, metrics) with a {_kind(metrics)} for metrics.",
            'a dict of tensors, such as {"accuracy": …}.',
        )
    return loss, metrics


def _kind(value: Any) -> str:
    """The class of a value; of a tensor that stands for one while kernels are traced, the tensor's."""
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def check_loss(value: Any) -> None:
    """Raise PipegraphError unless it is one real number in a tensor."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        return
    if not isinstance(value, Tensor):
        description = f"a {type(value).__name__}" if value is not None else "nothing"
        is_number = isinstance(value, (bool, int, float, complex))
        advice = "return it as a tensor, without .item()" if is_number else "return loss, or (loss, metrics)"
    elif value.dim():
        description, advice = f"a tensor of shape {list(value.shape)}", "take its mean"
    else:
        description, advice = "a complex number", "take its real part, or its absolute value"
    raise PipegraphError(
        f"loss_fn(output, target) returned {description}; a step needs a tensor of one number.", f"{advice}."
    )


def _check_metric(name: Any, metric: Any) -> None:
    if not isinstance(name, str):
        raise PipegraphError(f"loss_fn returned a metric under the name {name!r}.", f"a text, such as {str(name)!r}.")
    if not isinstance(metric, Tensor):
        raise PipegraphError(
            f"loss_fn returned the metric {name!r} as a {type(metric).__name__}; a number in Python would not change "
            f"between steps.",
            "return it as a tensor, without .item().",
        )
    if metric.dim() != 0:
        raise PipegraphError(
            f"loss_fn returned the metric {name!r} as a tensor of shape {list(metric.shape)}; a metric is one number.",
            "take its mean.",
        )


def check_gradients(outputs: tuple[Any, ...], has_gradient: tuple[bool, ...]) -> None:
    """Raise PipegraphError if an output needs a gradient and `has_gradient` says that none arrives."""
    for position, (output, arrives) in enumerate(zip(outputs, has_gradient, strict=False)):
        if not arrives and requires_grad(output):
            raise PipegraphError(
                f"output {position} of the stage needs a gradient, and pipeline.json says that none comes back "
                f"(requires_grad false): what made it would not be trained. Its parameters may have been frozen when "
                f"the model was split.",
                "freeze them, or split the model again with them trainable.",
            )


def check_memory(tensors: Iterable[Any]) -> None:
    """Raise PipegraphError if a result is a fake tensor."""
    if any(isinstance(tensor, Tensor) and is_fake(tensor) for tensor in tensors):
        raise PipegraphError(
            "the stage or loss_fn reads a tensor that it made when it was called first, which was to trace it: there "
            "are no numbers in it.",
            "make that tensor before the first step, or kernels='autograd'.",
        )


def requires_grad(output: Any) -> bool:
    """Return whether a gradient can reach an output."""
    return isinstance(output, Tensor) and output.requires_grad


class Namespace(NamedTuple):
    """The names of a file that code reads."""

    values: dict[str, Any]
    names: frozenset[str]


def objects_held_by(loss: Loss | None) -> list[Any]:
    """Return the modules, tensors, containers, namespaces and other objects that a loss function reads.

    Followed are closures, globals, default arguments, `functools.partial`, the items of containers, the attributes of
    modules, and of other objects, their classes and the user's files those attributes whose names appear in the code
    that reads them. An object of torch's, such as a `GradScaler`, counts with its tensors.
    """
    names: set[str] = set()
    while True:  # code that comes later may name an attribute of an object that came before
        name_count = len(names)
        objects = _objects(loss, names)
        if len(names) == name_count:
            break
    files = {id(values): values for candidate in objects if (values := _namespace(candidate)) is not None}
    objects_read = [candidate for candidate in objects if not isinstance(candidate, types.ModuleType)]
    return [*objects_read, *(Namespace(values, frozenset(names)) for values in files.values())]


def _namespace(value: Any) -> dict[str, Any] | None:
    if isinstance(value, types.FunctionType):
        return None if str(value.__module__).startswith("torch.") else value.__globals__
    return vars(value) if isinstance(value, types.ModuleType) else None


def _objects(loss: Loss | None, names: set[str]) -> list[Any]:
    """Return the objects that a loss reads, if its code has these names. Adds further names of its code to `names`."""
    objects: dict[int, Any] = {}
    waiting: list[Any] = [loss]
    while waiting:
        value = waiting.pop()
        if id(value) in objects or isinstance(value, _LEAVES) or not _is_users(value):
            continue
        objects[id(value)] = value
        if type(value).__module__.startswith("torch.") and not isinstance(value, (nn.Module, Tensor)):
            waiting += [attribute for attribute in vars(value).values() if isinstance(attribute, Tensor)]
        else:
            waiting += _read_by(value, names)
    return list(objects.values())


def _is_users(value: Any) -> bool:
    """Whether an object may hold what the user's code made. Of torch's own objects, those that can hold a tensor."""
    if isinstance(value, types.ModuleType):
        return is_user_file(getattr(value, "__file__", None) or "")
    of_torch = type(value).__module__.startswith("torch.") and not isinstance(value, (nn.Module, Tensor))
    return not of_torch or type(getattr(value, "__dict__", None)) is dict


def _read_by(value: Any, names: set[str]) -> Iterable[Any]:
    """Return what an object holds. `names` are the global names and attributes in all code so far; code adds to it."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if type(value) in CONTAINERS:
        return value.values()
    if isinstance(value, nn.Module):
        return (*children(value).values(), *torch_attributes(value).values())
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, *_read_by(value.__func__, names))
    if isinstance(value, types.FunctionType):
        return _read_by_function(value, names)
    if isinstance(value, Tensor):
        return ()
    if isinstance(value, types.ModuleType):
        return [item for name, item in vars(value).items() if name in names]
    called = (getattr(type(value), name, None) for name in ("__call__", *sorted(names)))
    read = [item for method in called if isinstance(method, types.FunctionType) for item in _read_by(method, names)]
    attributes = getattr(value, "__dict__", {})
    return [*read, *(item for name, item in attributes.items() if name in names)]


def _read_by_function(function: types.FunctionType, names: set[str]) -> list[Any]:
    if str(function.__module__).startswith("torch."):
        return []
    own_names = set(_names_in(function.__code__))
    names |= own_names
    items = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            items.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return items + [item for name, item in function.__globals__.items() if name in own_names]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
