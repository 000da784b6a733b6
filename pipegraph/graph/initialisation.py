"""How a model initialises its parameters: seen while it is built, or asked of its modules."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipegraph.graph.adapters import zero_parameters
from pipegraph.graph.nodes import number_of
from pipegraph.torch_private.modules import can_reset_parameters, initialise_of_transformers, reset_parameters
from pipegraph.torch_private.tensors import storage_identity

_MARK = "_pipegraph_initialisation"


@dataclass(frozen=True)
class Initialisation:
    """A call of a function of ``torch.nn.init`` with a parameter.

    Attributes:
        function: its name, such as ``normal_``.
        arguments: those other than the parameter that are not the function's defaults.
        is_usual: whether the module of torch that holds the parameter does this in any case.
        zero_row: the row that is set to zero after the call, such as that of an embedding for padding; None if no
            row is.
    """

    function: str
    arguments: tuple[tuple[str, Any], ...] = ()
    is_usual: bool = False
    zero_row: int | None = None

    @classmethod
    def from_call(cls, function: str, **arguments: Any) -> Initialisation:
        """Return the call with these arguments, or a simpler one that does the same."""
        if function == "constant_" and arguments.get("val") in (0, 1):
            return cls("ones_" if arguments["val"] else "zeros_")
        defaults = inspect.signature(getattr(nn.init, function)).parameters
        non_defaults = ((name, value) for name, value in arguments.items() if value != defaults[name].default)
        return cls(function, tuple(non_defaults))

    @property
    def constant(self) -> float | None:
        """The number that every element is; None if they are random."""
        constants = {"zeros_": 0.0, "ones_": 1.0}
        return constants.get(self.function, dict(self.arguments).get("val"))

    def scaled(self, factor: float) -> Initialisation | None:
        """The initialisation with all values multiplied by ``factor``; None if no function gives them."""
        scaled = self._scaled_values(factor)
        return None if scaled is None else replace(scaled, zero_row=self.zero_row)

    def _scaled_values(self, factor: float) -> Initialisation | None:
        arguments = dict(self.arguments)
        if self.constant is not None:
            return Initialisation.from_call("constant_", val=self.constant * factor)
        if self.function == "normal_":
            mean, std = arguments.get("mean", 0.0) * factor, arguments.get("std", 1.0) * abs(factor)
            return Initialisation.from_call("normal_", mean=mean, std=std)
        if self.function == "uniform_":
            ends = sorted((arguments.get("a", 0.0) * factor, arguments.get("b", 1.0) * factor))
            return Initialisation.from_call("uniform_", a=ends[0], b=ends[1])
        return None


@contextmanager
def initialisation_recorded() -> Iterator[Callable[[nn.Module], None]]:
    """Record how the parameters that are made inside are initialised.

    Yields:
        a function that marks the parameters of a model, for `initialisation_of`.
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.mark


def initialisation_of(model: nn.Module) -> dict[int, Initialisation]:
    """Return how the parameters of a model are initialised, by their ids; those of which nothing is known are left out.

    What was recorded when the model was built comes first. Else its modules are asked: they initialise copies without
    memory, by a ``reset_parameters`` of their own or by ``_init_weights`` of a transformers model. A parameter of a
    class outside torch whose elements are all one number is taken to be made so.
    """
    owners = Counter(id(param) for module in model.modules() for param in module.parameters(recurse=False))
    marked = {id(param): vars(param)[_MARK] for param in model.parameters() if _MARK in vars(param)}
    usual: dict[int, Initialisation] = {}
    by_module: dict[int, Initialisation] = {}
    with torch.random.fork_rng(devices=[]):
        for module in reversed(list(model.modules())):
            if _is_of_torch(module) and can_reset_parameters(module):
                usual |= _initialised(module, reset_parameters)
            if len(marked) < len(owners):
                by_module |= _module_initialisation(model, module)
    initialisations: dict[int, Initialisation] = {}
    zeros = zero_parameters(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            key = id(parameter)
            by_adapter = Initialisation("zeros_") if key in zeros else None
            values = marked.get(key) or by_adapter or by_module.get(key)
            if values is None and not _is_of_torch(module):
                values = _constant(parameter)
            if values is not None:
                is_usual = values == usual.get(key) and owners[key] == 1
                initialisations.setdefault(key, replace(values, is_usual=is_usual))
    return initialisations


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether stages make a module by its constructor, as far as its class says."""
    is_whole = isinstance(module, nn.MultiheadAttention) or not any(True for _ in module.children())
    return is_whole and type(module).__module__.startswith("torch.nn.")


def _constant(parameter: nn.Parameter) -> Initialisation | None:
    """That of a parameter whose elements are all one number."""
    if parameter.is_meta or not parameter.numel() or parameter.is_complex():
        return None
    first = parameter.detach().flatten()[0]
    is_constant = bool(torch.isfinite(first)) and bool((parameter.detach() == first).all())
    return Initialisation.from_call("constant_", val=number_of(first)) if is_constant else None


def guess_of(tensor: Tensor) -> Initialisation:
    """What stands in for the initialisation of a parameter of which it is not known.

    It has the mean and the standard deviation of the values that the parameter has now, each as far as it means
    something: a mean that chance alone explains is 0. A parameter on the meta device has no values; 0.02 is taken then,
    as most models of language have it. Numbers of a dtype in which torch draws none are 0.
    """
    if not (tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)):
        return Initialisation.from_call("zeros_")
    values = None if tensor.is_meta else tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
    if values is None or not values.numel() or not bool(torch.isfinite(values).all()):
        return Initialisation.from_call("normal_", std=0.02)
    mean = 0.0 if values.is_complex() else values.mean().item()
    std = (values - mean).abs().square().mean().sqrt().item()
    if abs(mean) < 3 * std / math.sqrt(values.numel()):
        mean = 0.0
    return Initialisation.from_call("normal_", mean=float(f"{mean:.3g}"), std=float(f"{std:.3g}"))


def _module_initialisation(model: nn.Module, module: nn.Module) -> dict[int, Initialisation]:
    """What a module's own function does, and what the model does to it afterwards, by the parameters' ids."""
    initialisations = _initialised(module, reset_parameters) if can_reset_parameters(module) else {}
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        initialisations |= _initialised(module, partial(initialise_of_transformers, model))
    return initialisations


def _initialised(module: nn.Module, function: Callable[[Any], Any]) -> dict[int, Initialisation]:
    """What a function does to the parameters of a module: to a copy without memory, so that the module stays as it is.

    Nothing is known if it raises an error, because it takes something else or reads values.
    """
    recorder = _Recorder()
    twins = {id(param): nn.Parameter(_on_meta(param), param.requires_grad) for param in module.parameters()}
    memo: dict[int, Any] = {**twins, **{id(buffer): _on_meta(buffer) for buffer in module.buffers()}}
    try:
        twin = copy.deepcopy(module, memo)
        with torch.no_grad(), recorder:
            function(twin)
    except Exception:  # a user's class, which may not be copied, or a function on fake tensors
        return {}
    return {key: call for key, param in twins.items() if (call := recorder.lookup(param)) is not None}


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


# Functions whose result has the values of their argument.
_COPIES = {"to", "clone", "detach", "contiguous", "float", "half", "bfloat16", "double", "type"}
_SCALE = {"mul", "__mul__", "__rmul__", "mul_", "__imul__"}
_DIVIDE = {"div", "__truediv__", "true_divide", "div_", "__itruediv__"}


class _Recorder(TorchFunctionMode):
    """Notes, for the memory of every tensor that is made or written inside, what its values are."""

    def __init__(self) -> None:
        super().__init__()
        self._initialisations: dict[int, Initialisation | None] = {}
        self._row_lengths: dict[int, int] = {}  # of matrices with a row of zeros

    def mark(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            call = self.lookup(parameter)
            if call is not None:
                setattr(parameter, _MARK, call)

    def lookup(self, tensor: Tensor) -> Initialisation | None:
        key = storage_identity(tensor)
        values = self._initialisations.get(key)
        if values is None or values.zero_row is None or tensor.shape[1:] == (self._row_lengths[key],):
            return values
        return None  # another part was set to zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        name = getattr(func, "__name__", "")
        first = args[0] if args else keywords.get("tensor")
        if getattr(func, "__module__", "") == "torch.nn.init":
            if isinstance(first, Tensor):
                bound = inspect.signature(func).bind(*args, **keywords).arguments
                self._write(first, _call_of(name, bound))
        elif isinstance(first, Tensor) and (name in ("__setitem__", "__imul__", "__itruediv__") or _is_in_place(name)):
            self._write(first, self._written(name, first, args[1:], keywords))
        elif name == "__get__" and isinstance(first, Tensor) and first.is_meta:
            call = _init_call()  # some functions do nothing on the meta device, once they have asked for it
            if call is not None:
                self._write(first, call)
        elif isinstance(result, Tensor) and not any(
            isinstance(arg, Tensor) and storage_identity(arg) == storage_identity(result) for arg in args
        ):
            self._initialisations[storage_identity(result)] = self._new_values(name, args, keywords)
        return result

    def _write(self, tensor: Tensor, values: Initialisation | None) -> None:
        """Note the values of a tensor. A part that is set to zero is the row of an embedding for padding."""
        key, covers_storage = storage_identity(tensor), _covers_storage(tensor)
        parameter_values = self._initialisations.get(key)
        if not covers_storage and parameter_values is not None and values is not None and values.constant == 0:
            row = _row(tensor)
            values = replace(parameter_values, zero_row=row) if parameter_values.zero_row in (None, row) else None
            self._row_lengths[key] = len(tensor) if row >= 0 else -1
        elif not covers_storage:
            values = None
        self._initialisations[key] = values

    def _written(self, name: str, tensor: Tensor, args: Any, kwargs: Any) -> Initialisation | None:
        """What an operation in place leaves in a tensor."""
        call = _init_call()
        if call is not None:
            return call
        if name in _SCALE | _DIVIDE:
            return self._scaled(name, (tensor, *args))
        if name == "zero_":
            return Initialisation.from_call("zeros_")
        if name == "copy_" and args and isinstance(args[0], Tensor):
            return self.lookup(args[0]) if args[0].shape == tensor.shape else None
        if name == "__setitem__":
            value = args[1] if len(args) > 1 else None
            is_zero = isinstance(value, (int, float)) and value == 0
            return Initialisation.from_call("zeros_") if is_zero and args[0] in (slice(None), Ellipsis) else None
        if name in ("requires_grad_", "detach_", "share_memory_"):
            return self.lookup(tensor)
        functions = {"normal_": ("mean", "std"), "uniform_": ("a", "b"), "fill_": ("val",)}
        if name not in functions:
            return None
        values = dict(zip(functions[name], args, strict=False))
        values |= {{"from": "a", "to": "b", "value": "val"}.get(key, key): value for key, value in kwargs.items()}
        values.pop("generator", None)
        if not all(isinstance(value, (int, float)) for value in values.values()):
            return None
        return Initialisation.from_call(name if name != "fill_" else "constant_", **values)

    def _new_values(self, name: str, args: Any, kwargs: Any) -> Initialisation | None:
        """What a new tensor holds."""
        kind = name.removesuffix("_like").removeprefix("new_")
        if kind in ("zeros", "ones"):
            return Initialisation.from_call(f"{kind}_")
        if kind == "full":
            value = kwargs.get("fill_value", args[-1] if args else None)
            return Initialisation.from_call("constant_", val=value) if isinstance(value, (int, float)) else None
        if kind == "tensor":
            value = args[0] if args else None
            return Initialisation.from_call("constant_", val=value) if isinstance(value, (int, float)) else None
        if kind in ("randn", "rand"):
            return Initialisation.from_call("normal_" if kind == "randn" else "uniform_")
        if name in _COPIES and args:
            return self.lookup(args[0])
        return self._scaled(name, args) if name in _SCALE | _DIVIDE else None

    def _scaled(self, name: str, args: Any) -> Initialisation | None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        numbers = [arg for arg in args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        call = self.lookup(tensors[0]) if len(tensors) == 1 and len(numbers) == 1 else None
        if call is None or (name in _DIVIDE and (numbers[0] == 0 or args[0] is not tensors[0])):
            return None
        return call.scaled(1 / numbers[0] if name in _DIVIDE else numbers[0])


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _row(tensor: Tensor) -> int:
    """The index of a row in the matrix whose storage has it; −1 for any other part."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or not len(tensor) or tensor.storage_offset() % len(tensor):
        return -1
    return tensor.storage_offset() // len(tensor)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _init_call() -> Initialisation | None:
    """The call of a function of ``torch.nn.init`` around this one, the outermost one."""
    frame: FrameType | None = inspect.currentframe()
    caller: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename == nn.init.__file__ and not frame.f_code.co_name.startswith("_"):
            caller = frame
        frame = frame.f_back
    if caller is None:
        return None
    names = inspect.signature(getattr(nn.init, caller.f_code.co_name)).parameters
    return _call_of(caller.f_code.co_name, {name: caller.f_locals[name] for name in names if name in caller.f_locals})


def _call_of(function: str, bound: Mapping[str, Any]) -> Initialisation | None:
    arguments = {name: value for name, value in bound.items() if name not in ("tensor", "generator")}
    plain = all(isinstance(value, (bool, int, float, str)) for value in arguments.values())
    finite = all(math.isfinite(value) for value in arguments.values() if isinstance(value, float))
    return Initialisation.from_call(function, **arguments) if plain and finite else None
