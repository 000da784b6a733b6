"""Trace a model as if its weights were in memory, without them, and leave it as it was."""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipegraph.graph.model_structure import is_layer_of_torch
from pipegraph.torch_private.fake_tensors import fake_mode_of, new_fake_mode
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import memory_of, version_of

# ---- tensor identity -------------------------------------------------------------------------------------------------
# Parameters and buffers that a model reads through a list, a dict or a closure, and not as attributes of a module.
#
# While a model is traced other tensors stand for them in the modules. Whatever holds the tensor itself would give its
# values at capture to every stage, without a gradient.


class ReadFromModules(TorchFunctionMode):
    """Lets each function of torch have what stands in the modules for the parameters and buffers of a model.

    Args:
        model: with its own parameters and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, tuple[Tensor, nn.Module, str]] = {}
        for module in model.modules():
            for tensors in (module.named_parameters, module.named_buffers):
                for name, tensor in tensors(recurse=False, remove_duplicate=False):
                    self._owners.setdefault(id(tensor), (tensor, module, name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._items(args), **{name: self._item(value) for name, value in (kwargs or {}).items()})

    def _items(self, values: Any) -> Any:
        return [self._item(value) for value in values]

    def _item(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            owner = self._owners.get(id(value))
            return value if owner is None else getattr(owner[1], owner[2])
        if type(value) in (list, tuple):
            return type(value)(self._items(value))
        return value


# ---- isolation -------------------------------------------------------------------------------------------------------


MOMENTUM_OF_ALL: Final = float.fromhex("0x1.23456789abcdep-4")
"""The momentum with which a batch norm is traced that has none."""


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what happens inside to the attributes of modules: a cache would be left with fake tensors.

    Tensors that are attributes get their values back. Parameters and buffers do not: ``torch.export`` and
    `fake_parameters` put fake tensors in their place.
    """
    mutables = [container for module in model.modules() for container in _containers(vars(module))]
    copies = [(container, type(container)(container)) for container in mutables]
    ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {id(tensor): tensor for container in mutables for tensor in _tensors(container) if id(tensor) not in ids}
    try:
        with _values_restored(tensors.values()):
            yield
    finally:
        for container, contents in copies:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)


@contextmanager
def torch_state_restored() -> Iterator[None]:
    """Undo what a model does to torch's generator and to whether gradients are on, such as a seed in its forward."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        yield


def buffers_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Undo what a run of the model inside writes into its buffers: a batch norm counts its batches.

    Buffers are no fake tensors then, because models read their values.
    """
    return _values_restored(model.buffers())


@contextmanager
def not_logged(logger: str, beginning: str) -> Iterator[None]:
    """Leave out messages of a logger that begin like this: torch logs what it also raises."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logging.getLogger(logger).addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_other)


def refusals_not_logged() -> AbstractContextManager[None]:
    """Leave out what torch logs when an operation does not take fake tensors: sizes and dtypes are tried."""
    return not_logged("torch._subclasses.fake_tensor", "failed while attempting to run meta")


@contextmanager
def _values_restored(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    # A tensor that was made in inference mode is not written outside of it.
    copies = [(source, source.detach().clone(), version_of(source)) for source in tensors if not source.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values, version in copies:
                if version_of(tensor) != version:
                    tensor.copy_(values)


def _containers(container: Any) -> Iterator[Any]:
    """A dict, list or set, and those inside it; a module's hooks are in ordered dicts."""
    waiting, visited = [container], set[int]()
    while waiting:
        current = waiting.pop()
        if type(current) in (dict, OrderedDict, list, set) and id(current) not in visited:
            visited.add(id(current))
            yield current
            waiting.extend(current.values() if isinstance(current, dict) else current)


def _tensors(container: Any) -> list[torch.Tensor]:
    values = container.values() if isinstance(container, dict) else container
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


@contextmanager
def fake_parameters(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Put fake tensors in the place of the model's parameters while it is exported, and give fake inputs.

    Tracing on the meta device itself would lose the values of tensors made in ``forward`` (``torch.tensor([1, 2],
    device=x.device)``) and break code that asks for the kind of device; a fake tensor says "cpu" (or the device it
    stands for) and holds nothing. The modules get their own parameters back, also after an error, and tied
    parameters stay tied. A batch norm of torch with ``momentum=None`` has `MOMENTUM_OF_ALL`; stages make it again.

    With ``dtype`` the model is traced as it is after ``model.to(dtype)``, on inputs of that dtype: parameters, buffers
    and inputs of floating point have it. With ``device`` it is traced as if all of them were there.
    """
    mode = new_fake_mode()
    averaging: list[Any] = batch_norms_over_all(model)
    stood_for = _device(args, kwargs)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        where = device or (stood_for if tensor.device.type == "meta" else tensor.device)
        with mode:
            fake_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=fake_dtype, device=where)
            return twin.requires_grad_(tensor.requires_grad)

    fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    twins: dict[Any, torch.Tensor] = {}
    replaced: list[tuple[nn.Module, str, torch.Tensor]] = []
    reading = ReadFromModules(model)
    try:
        for module in averaging:
            module.momentum = MOMENTUM_OF_ALL
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                key = memory_of(parameter)  # of tied weights one
                if key not in twins:
                    twins[key] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                replaced.append((module, name, parameter))
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.device.type == "meta" or device is not None:
                    replaced.append((module, name, buffer))
                    twins[memory_of(buffer)] = fake(buffer)
                elif dtype is not None and buffer.is_floating_point():
                    replaced.append((module, name, buffer))
                    twins[memory_of(buffer)] = buffer.to(dtype)
        # setattr and not _parameters[name]: an nn.LSTM keeps its weights in a second list, which follows setattr only.
        for module, name, tensor in replaced:
            setattr(module, name, twins[memory_of(tensor)])
        with reading, not_compiled():
            yield fake_args, fake_kwargs
    finally:
        for module, name, tensor in replaced:
            setattr(module, name, tensor)
        for module in averaging:
            module.momentum = None


@contextmanager
def not_compiled() -> Iterator[None]:
    """Let what a model has under ``torch.compile`` run as Python: compiled, it ends the process in a trace."""
    with torch.compiler.set_stance("force_eager"):
        yield


def batch_norms_over_all(model: nn.Module) -> list[nn.Module]:
    """The batch norms that average over all batches: they divide by their number, which no trace knows."""
    layers = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    batch_norms = (module for module in model.modules() if isinstance(module, layers) and module.momentum is None)
    return [module for module in batch_norms if is_layer_of_torch(type(module))]


def active_fake_mode(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
    """The mode of a model's fake parameters and inputs: inside, new tensors have no memory either."""
    tensors = (*pytree.tree_leaves((args, kwargs)), *model.parameters(), *model.buffers())
    modes = (fake_mode_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
    return next((mode for mode in modes if mode is not None), nullcontext())


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device that parameters on meta stand for: that of the first real input."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            return leaf.device
    return torch.device("cpu")


@contextmanager
def generators_restored() -> Iterator[Callable[[], bool]]:
    """Put Python's and NumPy's own random number generators back as they were.

    Yields:
        whether a number was drawn of them.
    """
    previous_states = _states()
    try:
        yield lambda: _states() != previous_states
    finally:
        random.setstate(previous_states[0])
        if previous_states[1] is not None:
            sys.modules["numpy"].random.set_state(previous_states[1])


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    if not isinstance(state, tuple):  # of another kind of generator than NumPy's own
        return random.getstate(), None
    name, numbers, *scalars = state
    return random.getstate(), (name, tuple(numbers.tolist()), *scalars)
