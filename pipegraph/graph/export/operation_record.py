"""The operations that a model or its program runs, without memory, also if it stood on another kind of device."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from pipegraph.errors import is_user_file
from pipegraph.graph.captured import plain_containers
from pipegraph.graph.custom_functions import apply_by_operator
from pipegraph.graph.export.constant_drop_path import FoldConstantDropPath
from pipegraph.graph.export.isolation import (
    active_fake_mode,
    attributes_restored,
    buffers_restored,
    fake_parameters,
    generators_restored,
    refusals_not_logged,
)
from pipegraph.graph.export.kept_sizes import CALLS
from pipegraph.graph.model_structure import follows_mode, modes_of
from pipegraph.graph.operators import MODE_ARGUMENTS, operator_of_target
from pipegraph.graph.tensor_hooks import NAMESPACE as HOOKS
from pipegraph.graph.tensor_hooks import hooks_left_out
from pipegraph.torch_private.export import autograd_functions_wrapped, exporting
from pipegraph.torch_private.fake_tensors import TorchDispatchMode, values_of
from pipegraph.torch_private.operators import is_mutable, schema_arguments
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import storage_identity

Operations = list[Any]
"""(operator, arguments) of each operation. For a tensor stand its shape, its dtype, and a number that two tensors share
if they are the same parameter or input, or constants of the same values, or are computed in the same way."""


def operations_of_model(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    with_results: bool = False,
) -> Operations:
    """Run a model, which is left as it was.

    Args:
        model: the model.
        mode: whether each module is in training mode.
        args, kwargs: its inputs; only their shapes and dtypes count.
        with_results: whether to list last what the model returns.

    Raises whatever the model raises on tensors without values.
    """
    with _recording(model, mode, args, kwargs, _OperationRecord) as (record, fake_args, fake_kwargs):
        results = model(*fake_args, **fake_kwargs)
    if with_results:
        record.add_results(results)
    return record.operations


def operations_of_program(
    program: ExportedProgram, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Operations:
    """Run what a model was exported to, with the model's parameters.

    The operations are those of `operations_of_model` if the program is the model at the sizes of these inputs.
    """
    with without_memory(model, args, kwargs) as leaves:
        inputs = iter(pytree.tree_leaves(leaves))

        def value(spec: InputSpec) -> Any:
            if spec.kind is InputKind.USER_INPUT:
                return next(inputs)
            name = cast(str, spec.target)
            if spec.kind is InputKind.PARAMETER:
                return model.get_parameter(name)
            return model.get_buffer(name) if spec.kind is InputKind.BUFFER else program.constants[name]

        values = [value(spec) for spec in program.graph_signature.input_specs]
        with _OperationRecord(_names(model, leaves)) as record:
            fx.Interpreter(program.graph_module).run(*values)
    return record.operations


_Record = TypeVar("_Record", bound="_OperationRecord")


@contextmanager
def _recording(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    record_type: Callable[[Sequence[tuple[torch.Tensor, object]]], _Record],
) -> Iterator[tuple[_Record, tuple[Any, ...], dict[str, Any]]]:
    """Record the operations of a model in a mode. Yield the record, and the inputs to run it on."""
    with without_memory(model, args, kwargs) as (fake_args, fake_kwargs):
        for module, training in mode.items():
            module.training = training
        with (
            autograd_functions_wrapped(apply_by_operator),  # as the program has them
            record_type(_names(model, (fake_args, fake_kwargs))) as record,
        ):
            yield record, fake_args, fake_kwargs


@contextmanager
def without_memory(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Let a model, which is left as it was, run on fake tensors: here, or as if it had another device or dtype.

    Yields:
        the inputs to run it on.
    """
    with (
        attributes_restored(model),
        buffers_restored(model),
        generators_restored(),
        fake_parameters(model, args, kwargs, dtype, device) as (fake_args, fake_kwargs),
        exporting(),
        hooks_left_out(),
        refusals_not_logged(),
        warnings.catch_warnings(),
        torch.no_grad(),
        FoldConstantDropPath(),
    ):
        warnings.simplefilter("ignore")  # the model's own were shown when it was exported
        with active_fake_mode(model, fake_args, fake_kwargs):
            yield fake_args, fake_kwargs


class _OperationRecord(TorchDispatchMode):
    """Lists the operations that run, with a description of their arguments.

    Left out are checks, questions such as the device of a tensor, which a dropout of nothing asks in training mode, the
    copy of a constant, which only a program makes, and views of all there is, which Python leaves out where it sees
    that a slice takes all.
    """

    def __init__(self, names: Sequence[tuple[torch.Tensor, object]]) -> None:
        super().__init__()
        self.operations: Operations = []
        # Holds the tensors: an id stays its own.
        self._origins: dict[int, tuple[torch.Tensor, Any]] = {
            id(tensor): (tensor, self._first_origin(name)) for tensor, name in names
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == HOOKS:
            return None
        if func in CALLS:
            with self:
                return CALLS[func](*args, **kwargs)
        described = self._described((args, kwargs))
        result = func(*args, **kwargs)
        if func.namespace == "prim" or operator_of_target(func).check:
            return result
        is_same = func.is_view and args and _form(result) == _form(args[0])
        if is_same or func is torch.ops.aten.lift_fresh_copy.default:
            self._origins[id(result)] = result, self._origin(args[0])
            return result
        if func is torch.ops.aten.slice.Tensor:
            described = _slice(*described[0], **described[1])
        self.operations.append((func, described))
        origin_of = self._result_origins(func, described)
        leaves = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._origins[id(leaf)] = leaf, origin_of(position)
        return result

    def _result_origins(self, func: Any, described: Any) -> Callable[[int], Any]:
        """A function that returns what stands for a result of the last operation, by its position."""
        operation_hash = hash((func, str(described)))
        return lambda position: hash((operation_hash, position))

    def add_results(self, results: Any) -> None:
        """List what a model returns after its operations."""
        self.operations.append(("return", self._described(plain_containers(results))))

    def _described(self, value: Any) -> Any:
        """A description of arguments; written out, because it takes a third of the time that a tree of them takes."""
        if isinstance(value, torch.Tensor):
            return (*_form(value), self._origin(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if isinstance(value, dict):
            return {name: self._described(argument) for name, argument in value.items()}
        return value

    def _first_origin(self, name: object) -> Any:
        """What stands for a parameter, a buffer or an input."""
        return hash(name)

    def _origin(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._origins:
            self._origins[id(tensor)] = tensor, hash(values_of(tensor))
        return self._origins[id(tensor)][1]


class Result(NamedTuple):
    """A result of an operation: the number of the operation, and its position there."""

    operation: int
    position: int


class _LayerRecord(_OperationRecord):
    """Names each tensor by what it is, or by the operation that returned it, and knows where layers begin."""

    def __init__(self, names: Sequence[tuple[torch.Tensor, object]]) -> None:
        super().__init__(names)
        self.starts: dict[str, list[int]] = {}

    def _first_origin(self, name: object) -> Any:
        return name

    def _result_origins(self, func: Any, described: Any) -> Callable[[int], Any]:
        return partial(Result, len(self.operations) - 1)


def operations_by_layer(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layers: Mapping[str, nn.Module],
) -> tuple[Operations, Mapping[str, list[int]]]:
    """Run a model, which is left as it was, and return its operations, the last of which is what it returns.

    For a tensor stand its shape, its dtype, and the name of the parameter or input that it is, or its `Result`.

    Args:
        layers: modules, by name.

    Returns:
        the operations, and where each of the modules began, for each call.

    Raises whatever the model raises on tensors without values.
    """
    names = {id(module): name for name, module in layers.items()}
    with _recording(model, mode, args, kwargs, _LayerRecord) as (record, fake_args, fake_kwargs):

        def begin(module: nn.Module, inputs: Any) -> None:
            if id(module) in names:
                record.starts.setdefault(names[id(module)], []).append(len(record.operations))

        hook = register_module_forward_pre_hook(begin)
        try:
            results = model(*fake_args, **fake_kwargs)
        finally:
            hook.remove()
    record.add_results(results)
    return record.operations, record.starts


class _SwitchedOffRecord(_OperationRecord):
    """Knows which operations are read, and whether anything writes into the memory of what a dropout returns, other
    than into the tensor itself.

    A dropout that is switched off returns its argument: a write into one of the two is a write into the other. A write
    into the tensor itself is seen in what it is computed from; one into a view of it is not.
    """

    def __init__(self, names: Sequence[tuple[torch.Tensor, object]]) -> None:
        super().__init__(names)
        self.is_written = False
        self._returned: dict[object, torch.Tensor] = {}  # holds them: their memory stays theirs
        self._sources: list[set[int]] = []  # of each operation, the operations whose results it reads
        self._producers: dict[int, tuple[torch.Tensor, set[int]]] = {}  # holds them: an id stays its own
        self._effects: set[int] = set()

    def add_returned(self, tensor: torch.Tensor) -> None:
        """Note what a dropout returns."""
        self._returned[storage_identity(tensor)] = tensor

    def live_operations(self, results: Any) -> Operations:
        """The operations that write, draw random numbers, or compute what a model returns, and what it returns."""
        live, waiting = set[int](), [*self._effects, *self._producers_of(results)]
        while waiting:
            number = waiting.pop()
            if number not in live:
                live.add(number)
                waiting += self._sources[number]
        described = self._described(plain_containers(results))
        return [*(self.operations[number] for number in sorted(live)), ("return", described)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in CALLS:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._returned and is_mutable(func):
            for argument, value in zip(schema_arguments(func), args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self.is_written |= self._returned.get(storage_identity(value), value) is not value
        sources, number = self._producers_of((args, kwargs)), len(self.operations)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_listed = len(self.operations) > number
        if is_listed:
            self._sources.append(sources)
            if is_mutable(func) or torch.Tag.nondeterministic_seeded in func.tags:
                self._effects.add(number)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._producers[id(leaf)] = leaf, {number} if is_listed else sources
        return result

    def _producers_of(self, values: Any) -> set[int]:
        """The operations whose results are among some values."""
        return {
            number
            for leaf in pytree.tree_leaves(values)
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._producers
            for number in self._producers[id(leaf)][1]
        }


class OriginRecord(_OperationRecord):
    """Knows how each tensor was computed, also in an earlier run of the model.

    Args:
        model: the model.
        inputs: of its runs.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(_names(model, inputs))
        self._model, self._inputs = model, inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_mutable(func):
            # A real tensor stays itself, and what it has now is not what it had before.
            written = hash((func, str(self._described((args, kwargs or {})))))
            for argument, value in zip(schema_arguments(func), args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                    self._origins[id(value)] = value, written
        return result

    def begin(self) -> None:
        """Begin another run: parameters, buffers and inputs are what they were before the first one."""
        self.operations.clear()
        self._origins |= {id(tensor): (tensor, hash(name)) for tensor, name in _names(self._model, self._inputs)}

    def describe(self, results: Any) -> Any:
        """What a run returned: of each tensor a number that is equal for equal computations."""
        return self._described(plain_containers(results))


def _names(model: nn.Module, inputs: Any) -> list[tuple[torch.Tensor, object]]:
    """The tensors that a model begins with, each with a name."""
    leaves = enumerate(pytree.tree_leaves(inputs))
    named_inputs = [(leaf, ("input", position)) for position, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [*named_inputs, *((tensor, name) for name, tensor in (*model.named_parameters(), *model.named_buffers()))]


def _slice(tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """The arguments of a slice, in one way of several: Python gives the largest number as the end, export leaves it
    out."""
    return tensor, dim, start or 0, sys.maxsize if end is None else end, step


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def same_in_both_modes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether both modes run the same operations on the same arguments, and return the same of what these make;
    False also if a mode cannot be run.

    The model is left as it was.
    """
    try:
        training, evaluation = (operations_of_model(model, mode, args, kwargs, True) for mode in modes_of(model))
    except Exception:  # whatever the model raises on tensors without values
        return False
    return training == evaluation


def lines_on_in_evaluation(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Set[str] | None:
    """The lines whose dropouts and batch norms are on in evaluation mode too, if evaluation mode only switches off the
    others: functions of torch with a flag, and layers of ``torch.nn``.

    The model is run in evaluation mode, and in training mode with the same flags off. Both must run the same operations
    on the same arguments, but for those that nothing reads.

    Returns:
        None if evaluation mode does anything else, if a line has a call that is on and one that is off, or if a mode
        cannot be run. The model is left as it was.
    """
    modes = modes_of(model)
    layers = [module for module in model.modules() if all(map(follows_mode, module.modules()))]
    training = {**modes.training, **{layer: modes.evaluation[layer] for layer in layers}}
    try:
        with generators_restored() as are_used:
            evaluation, flags = _operations_with_flags_off(model, modes.evaluation, args, kwargs, None)
            lines_on = flags.lines_on
            switched_off, _ = _operations_with_flags_off(model, training, args, kwargs, lines_on)
            is_alike = not are_used() and not lines_on & flags.lines_off and switched_off == evaluation
    except Exception:  # whatever the model raises on tensors without values
        return None
    return lines_on if is_alike else None


def _operations_with_flags_off(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lines_on: Set[str] | None,
) -> tuple[Operations, _FlagsOff]:
    """The operations of a model with flags off, without those that nothing reads, and the flags.

    Args:
        lines_on: the lines that keep their flags; None for all lines, as in evaluation mode.

    Raises:
        ValueError: in evaluation mode something writes into what a dropout returns, and so into its argument.
    """
    with (
        _recording(model, mode, args, kwargs, _SwitchedOffRecord) as (record, fake_args, fake_kwargs),
        _FlagsOff(record, lines_on) as flags,
    ):
        results = model(*fake_args, **fake_kwargs)
    if lines_on is None and record.is_written:
        raise ValueError("a write into the result of a dropout writes into its argument")
    return record.live_operations(results), flags


class _FlagsOff(TorchFunctionMode):
    """Switches off the flags with which functions of torch do as in training mode.

    Attributes:
        lines_on, lines_off: the lines whose flags were on, and off.
    """

    def __init__(self, record: _SwitchedOffRecord, kept_lines: Set[str] | None) -> None:
        super().__init__()
        self.lines_on, self.lines_off = set[str](), set[str]()
        self._record, self._kept_lines = record, kept_lines
        self._flags: dict[Any, _Flag | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._flags:
            self._flags[func] = _flag_of(func)
        flag = self._flags[func]
        if flag is None:
            return func(*args, **(kwargs or {}))
        arguments = {**dict(zip(flag.parameters, args, strict=False)), **(kwargs or {})}
        is_on, line = bool(arguments.get(flag.name, flag.default)), _line(inspect.currentframe(), full_path=True)
        (self.lines_on if is_on else self.lines_off).add(line)
        is_training_run = self._kept_lines is not None
        if is_on and (self._kept_lines is None or line in self._kept_lines):
            return func(*args, **(kwargs or {}))
        result = func(**{**arguments, flag.name: type(flag.default)()})
        source = arguments.get("input")
        if source is None or not isinstance(result, torch.Tensor):
            return result
        if storage_identity(result) == storage_identity(source):
            writes = func.__name__.endswith("_") or arguments.get("inplace", False)
            if is_training_run and not writes:  # a dropout returns a copy, and a write changes its result alone
                result = torch.ops.aten.lift_fresh_copy(result)  # which the record does not list
            self._record.add_returned(result)
        return result


class _Flag(NamedTuple):
    """The parameter of a function of torch that says whether it does as in training mode."""

    name: str
    default: bool | float
    parameters: tuple[str, ...]


def _flag_of(func: Any) -> _Flag | None:
    """The flag of a function of ``torch.nn.functional``, or of an operator under its public name."""
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", "") == "torch.nn.functional" and inspect.isfunction(func):
        defaults = {parameter.name: parameter.default for parameter in inspect.signature(func).parameters.values()}
    elif inspect.isbuiltin(func) and (operator := getattr(torch.ops.aten, name, None)) is not None:
        if "default" not in operator.overloads():
            return None
        arguments = schema_arguments(operator.default)
        names = ("input" if argument.name == "self" else argument.name for argument in arguments)
        defaults = {name: argument.default_value for name, argument in zip(names, arguments, strict=True)}
    else:
        return None
    flag = next((flag for flag in MODE_ARGUMENTS if flag in defaults), None)
    if flag is None:
        return None
    off: bool | float = 0.0 if flag == "dropout_p" else False
    return _Flag(flag, defaults[flag] if isinstance(defaults[flag], (bool, float)) else off, tuple(defaults))


def device_branch(
    model: nn.Module, mode: Mapping[nn.Module, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Run a model without memory, as it is and as if it were on the other kind of device: a CPU or a GPU.

    Functions of torch are compared, and not the operations below them, which torch itself chooses by the device.

    Args:
        mode: whether each module is in training mode.
        args, kwargs: its inputs; only their shapes, dtypes and devices count.

    Returns:
        what differs first, with its lines; empty if nothing does, or if the model cannot run there without memory.
    """
    devices = {leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    device_type, other_type = ("cuda", "cpu") if "cuda" in devices else ("cpu", "cuda")
    try:
        calls, other_calls = (calls_of_model(model, mode, args, kwargs, device) for device in (None, other_type))
    except Exception:  # a model that moves its tensors to a device by name, say
        return ""
    for call, two in zip_longest(calls, other_calls):
        if call is None or two is None or call[0] != two[0]:
            return f"{_described(call)} on {device_type}, and {_described(two)} on {other_type}"
    return ""


FunctionCalls = list[tuple[str, str]]
"""(function of torch, line of the model's source) of each call."""


def _described(call: tuple[str, str] | None) -> str:
    return "ends" if call is None else f"calls {call[0]} at {call[1]}" if call[1] else f"calls {call[0]}"


def calls_of_model(
    model: nn.Module,
    mode: Mapping[nn.Module, bool],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str | None = None,
) -> FunctionCalls:
    """Run a model without memory, as `operations_of_model` does, here or as if it were on another kind of device."""
    where = None if device is None else torch.device(device, 0) if device != "cpu" else torch.device(device)
    with without_memory(model, args, kwargs, where) as (fake_args, fake_kwargs):
        for module, training in mode.items():
            module.training = training
        with _FunctionRecord() as record:
            model(*fake_args, **fake_kwargs)
    return record.calls


class _FunctionRecord(TorchFunctionMode):
    """Lists the functions of torch that a model calls, each with its line in the model's source."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: FunctionCalls = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "_set_grad_enabled":
            # Without gradients throughout: autograd makes a node for a parameter, which ends the process where torch
            # was built without the device that the parameter stands for.
            return None
        if name != "__get__":  # an attribute
            self.calls.append((name, _line(inspect.currentframe())))
        return func(*args, **(kwargs or {}))


def _line(frame: FrameType | None, full_path: bool = False) -> str:
    """The innermost line of the model's own source, ``model.py:12``; empty without one."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path if full_path else path.name}:{frame.f_lineno}"
