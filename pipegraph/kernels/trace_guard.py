"""What a trace depends on: signatures that are compared before each step, and attributes that tracing may change.

Two calls of modules run the same code if their signatures are equal. Signatures are hashable and cautious: an object
that cannot be compared equals itself alone, so a layer that could differ is compiled on its own: slower to start, never
wrong.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.interface import Loss
from pipegraph.kernels.loss import CONTAINERS, Namespace, objects_held_by
from pipegraph.kernels.sharded import check_traceable, is_layout, is_sharded, is_style, layout, local, rebuilt
from pipegraph.kernels.symbolic_sizes import are_equal, dimensions
from pipegraph.torch_private.modules import attributes as torch_attributes
from pipegraph.torch_private.modules import children as torch_children
from pipegraph.torch_private.modules import hook_dicts, hook_numbers, renew_rnn_weights, rnn_weight_lists, tensor_dicts
from pipegraph.torch_private.tensors import add_all, has_hooks

# ---- module state ----------------------------------------------------------------------------------------------------
# The parameters and buffers of modules: in a fixed order, replaced while modules run, and given their gradients.


@dataclass(frozen=True)
class _TensorPlace:
    """The place of a tensor in a module: `tensors` is the module's dict of parameters or of buffers."""

    module: nn.Module
    tensors: dict[str, Tensor | None]
    name: str


class ModuleState:
    """The parameters and buffers of modules, each once, however many names it has."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        places: dict[int, list[_TensorPlace]] = {}
        for module in modules:
            for tensors in tensor_dicts(module):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), []).append(_TensorPlace(module, tensors, name))
        self._places = list(places.values())
        self._recurrent = [module for module in modules if rnn_weight_lists(module)]

    def __len__(self) -> int:
        return len(self._places)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the modules hold now, which may be others than when this was made."""
        return [places[0].tensors[places[0].name] for places in self._places]  # type: ignore[misc]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the modules compute with `tensors`, in the order of `tensors()`.

        A DTensor is replaced by the DTensor around the given local tensor. Raises RuntimeError if the modules
        themselves put other tensors there.
        """
        previous_tensors = self.tensors()
        replacements = [rebuilt(tensor, like) for tensor, like in zip(tensors, previous_tensors, strict=True)]
        weight_lists = [(module, rnn_weight_lists(module)) for module in self._recurrent]
        self._set_tensors(replacements)
        try:
            yield
            for places, tensor in zip(self._places, replacements, strict=True):
                for place in places:
                    if place.tensors.get(place.name) is not tensor:
                        raise RuntimeError(f"its forward sets {type(place.module).__name__}.{place.name}")
        finally:
            self._set_tensors(previous_tensors)
            for module, lists in weight_lists:
                vars(module).update(lists)

    def _set_tensors(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for place in places:
                place.tensors[place.name] = tensor
        for module in self._recurrent:
            renew_rnn_weights(module)


def with_strides(tensor: Tensor, strides: Sequence[Any]) -> Tensor:
    """Return the tensor with the strides that graphs were traced for: a copy if it has others."""
    if are_equal(tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, list(strides), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add gradients to the `.grad` of parameters.

    A parameter's first gradient becomes its `.grad` without a copy, if it has the parameter's dtype and its strides,
    which optimizers and others rely on.

    Args:
        pairs: (parameter, gradient). The gradient of a DTensor is its local tensor, in the parameter's placements. A
            gradient shares its memory with no other tensor, unless it comes twice or is `shared`.
        shared: tensors that others hold too.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    used_ids = set(map(id, shared))
    for parameter, gradient in pairs:
        if parameter.grad is None:
            local_gradient = _laid_out(gradient, local(parameter))
            if not local_gradient.is_sparse:
                local_gradient = local_gradient.to(parameter.dtype)  # of one that is computed with in fewer bits
            if id(local_gradient) in used_ids:
                local_gradient = local_gradient.clone()
            used_ids.add(id(local_gradient))
            parameter.grad = rebuilt(local_gradient, parameter)
        elif (own_sum := gradient_in_place(parameter)) is not None:
            sums.append(own_sum)
            addends.append(gradient)
        else:  # the user put a gradient there, in another layout
            parameter.grad = parameter.grad + rebuilt(gradient, parameter)
    if sums:
        add_all(sums, addends)


def gradient_in_place(parameter: Tensor) -> Tensor | None:
    """Return what this rank holds of a parameter's `.grad`, if a gradient can be added to that."""
    gradient = parameter.grad
    if gradient is None or (is_sharded(parameter) and layout(gradient) != layout(parameter)):
        return None
    return local(gradient)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


# ---- trace guard -----------------------------------------------------------------------------------------------------


ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.Size)


class MadeWhenCalled(RuntimeError):
    """What is traced makes tensors at its first call and keeps them. Once it has made real ones, it can be traced."""


class _Identity:
    """Equal to the signature of the same object alone. Holding the object keeps its id from being reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


@dataclass
class _Numbers:
    """The objects and tensors that one signature has met: an object that comes again is the number that it got."""

    objects: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, int] = field(default_factory=dict)


def tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a graph is made for."""
    local_tensor = local(tensor)
    return (*tensor_kind(tensor), dimensions(local_tensor.shape), dimensions(local_tensor.stride()))


def tensor_kind(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a graph is made for, but its sizes and strides."""
    return (layout(tensor), tensor.dtype, tensor.device, tensor.requires_grad)


def module_signature(module: nn.Module) -> tuple[Any, ...]:
    """Classes, attributes, hooks and modes of a module and its children, and which of its tensors are one."""
    return _of_module(module, _Numbers())


def value_signature(value: Any) -> Any:
    """The signature of an attribute or an argument that is not a tensor."""
    return _of_value(value, _Numbers())


def _of_module(module: nn.Module, numbers: _Numbers) -> tuple[Any, ...]:
    if id(module) in numbers.objects:
        return ("again", numbers.objects[id(module)])
    numbers.objects[id(module)] = len(numbers.objects)
    attributes = tuple((name, _of_value(item, numbers)) for name, item in torch_attributes(module).items())
    # Hooks are numbered among the module's own: no two of the process are registered under one number.
    registered = sorted(hook_numbers(module))
    hooks = tuple(
        (name, tuple((registered.index(number), _of_value(hook, numbers)) for number, hook in hook_dict.items()))
        for name, hook_dict in hook_dicts(module).items()
    )
    tensors = tuple(
        (name, None if tensor is None else numbers.tensors.setdefault(id(tensor), len(numbers.tensors)))
        for tensor_dict in tensor_dicts(module)
        for name, tensor in tensor_dict.items()
    )
    children = tuple(
        (name, None if child is None else _of_module(child, numbers)) for name, child in torch_children(module).items()
    )
    return (type(module), attributes, hooks, tensors, children)


def _of_value(value: Any, numbers: _Numbers) -> Any:
    if isinstance(value, ATOMS) or is_layout(value):
        return (type(value), value)
    if is_style(value):
        return (type(value), *((name, _of_value(item, numbers)) for name, item in vars(value).items()))
    if id(value) in numbers.objects:
        return ("again", numbers.objects[id(value)])
    if type(value) in (tuple, list, set, frozenset) or _is_mapping(value):
        return _of_container(value, numbers)
    if isinstance(value, functools.partial):
        return (functools.partial, *(_of_value(part, numbers) for part in (value.func, value.args, value.keywords)))
    if isinstance(value, types.MethodType):
        return (types.MethodType, value.__func__, _of_value(value.__self__, numbers))
    if isinstance(value, types.FunctionType):
        numbers.objects[id(value)] = len(numbers.objects)  # for a function that calls itself
        cells = tuple(_of_cell(cell, numbers) for cell in value.__closure__ or ())
        return (
            value.__code__,
            cells,
            *(_of_value(defaults, numbers) for defaults in (value.__defaults__, value.__kwdefaults__)),
        )
    return _Identity(value)


def _of_container(value: Any, numbers: _Numbers) -> Any:
    numbers.objects[id(value)] = len(numbers.objects)  # for a container that holds itself
    if _is_mapping(value):
        items: Any = tuple((key, _of_value(item, numbers)) for key, item in value.items())
    else:
        items = (_of_value(item, numbers) for item in value)
        items = tuple(items) if isinstance(value, (tuple, list)) else frozenset(items)
    del numbers.objects[id(value)]  # the container may be temporary, and its id soon another's
    return (type(value), items)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections")


def _of_cell(cell: types.CellType, numbers: _Numbers) -> Any:
    try:
        return _of_value(cell.cell_contents, numbers)
    except ValueError:  # not filled yet
        return "empty"


@contextmanager
def unchanged(objects: Iterable[Any]) -> Iterator[None]:
    """Restore the attributes of objects and the items of containers afterwards, and raise an error if any changed.

    A traced graph would not make the change again, and a tensor that tracing leaves there is a fake tensor. Containers
    in attributes of modules and in containers count too.

    Raises:
        RuntimeError: an attribute or item changed.
        MadeWhenCalled: all that changed are attributes or items that were None or missing, and are tensors now.
    """
    contents: dict[int, _Content] = {}  # by identity of the container
    for owner in objects:
        if isinstance(owner, Namespace):
            copy = {name: owner.values[name] for name in owner.names if name in owner.values}
            contents[id(owner.values)] = _Content("a global", owner.values, copy, owner.names)
        elif type(owner) in CONTAINERS:
            _keep(contents, f"a {type(owner).__name__}", owner)
        elif isinstance(getattr(owner, "__dict__", None), dict):
            # Another object may hold anything, a data set for example: its own attributes are enough.
            _keep(contents, type(owner).__name__, vars(owner), nested=isinstance(owner, nn.Module))
    try:
        yield
        changes = [change for content in contents.values() for change in content.changes()]
    except PipegraphError:
        raise
    except Exception as error:
        for content in contents.values():
            for name in content.new_tensor_names():
                raise MadeWhenCalled(f"its forward makes {name}") from error
        raise
    else:
        new_tensors = [name for content in contents.values() for name in content.new_tensor_names()]
        if new_tensors and len(new_tensors) == len(changes):
            raise MadeWhenCalled(f"its forward makes {new_tensors[0]}")
    finally:
        for content in contents.values():
            content.restore()
    if changes:
        raise RuntimeError(f"its forward sets {changes[0]}")


class _Content(NamedTuple):
    """A container and its items as they were: all, or of a namespace those with the names `only`."""

    name: str
    container: Any
    copy: Any
    only: frozenset[str] | None = None

    def changes(self) -> list[str]:
        """The names of items that are other objects now. An equal number does not count as a change."""
        now, previous = _items(self.container), _items(self.copy)
        keys = self.only if self.only is not None else dict.fromkeys((*now, *previous))
        return [
            _named(self.name, key)
            for key in keys
            if (key in now or key in previous)
            and (key not in now or key not in previous or not _is_unchanged(now[key], previous[key]))
        ]

    def new_tensor_names(self) -> list[str]:
        """The names of items that are tensors now, and were None or missing before."""
        now, previous = _items(self.container), _items(self.copy)
        keys = now if self.only is None else self.only & now.keys()
        return (
            [_named(self.name, key) for key in keys if isinstance(now[key], Tensor) and previous.get(key) is None]
            if isinstance(self.container, dict)
            else []
        )

    def restore(self) -> None:
        """Put the items back if any changed."""
        if not self.changes():
            return
        if self.only is None:
            self.container.clear()
        else:
            for key in self.only & self.container.keys():
                del self.container[key]
        (self.container.extend if isinstance(self.container, list) else self.container.update)(self.copy)


def _keep(contents: dict[int, _Content], name: str, value: Any, nested: bool = True) -> None:
    if type(value) is tuple:
        for item in value:
            _keep(contents, name, item)
    if type(value) in CONTAINERS and id(value) not in contents:
        contents[id(value)] = _Content(name, value, value.copy())
        for key, item in _items(value).items() if nested else ():
            _keep(contents, _named(name, key), item)


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return container
    return dict(enumerate(container)) if isinstance(container, list) else {id(item): item for item in container}


def _named(name: str, key: Any) -> str:
    return f"{name}.{key}" if isinstance(key, str) else name


def _is_unchanged(item: Any, previous: Any) -> bool:
    return item is previous or (type(item) is type(previous) and isinstance(item, ATOMS) and item == previous)


class TraceGuard:
    """Looks at a stage and its loss once per step.

    Attributes:
        objects: what tracing must leave as it is: all modules, and what else the loss reads.
        state: the parameters and buffers of all modules.
        key: what can change and change back: modes, dtypes, shapes, `requires_grad`, and the obstacle.
        obstacle: why stage and loss cannot be traced, or None.
    """

    def __init__(self, stage: nn.Module, loss: Loss | None) -> None:
        self._stage, self._loss = stage, loss
        self._of_modules: Any = None
        self._of_tensors: Any = None
        self.look()

    def look(self) -> str | None:
        """Compare with the last look.

        Returns:
            "modules" if a module is another object, or has other hooks; "tensors" if only parameters, buffers or
            tensors that the loss holds are other objects; else None.
        """
        read = objects_held_by(self._loss)
        loss_modules = (part for root in read if isinstance(root, nn.Module) for part in root.modules())
        modules = list(dict.fromkeys((*self._stage.modules(), *loss_modules)))
        tensors = [tensor for module in modules for kind in tensor_dicts(module) for tensor in kind.values()]
        tensors += [tensor for tensor in read if isinstance(tensor, Tensor)]
        of_modules = tuple(map(id, modules)), tuple(map(hook_numbers, modules))
        of_tensors = tuple(map(id, tensors))
        changed = None
        if of_modules != self._of_modules:
            changed = "modules"
        elif of_tensors != self._of_tensors:
            changed = "tensors"
        if changed is not None:
            self.state = ModuleState(modules)
        self._of_modules, self._of_tensors = of_modules, of_tensors
        self._alive = modules, tensors  # until the next look: no other object gets the identity of one of them
        self.objects = [*modules, *(value for value in read if not isinstance(value, (nn.Module, Tensor)))]
        state = self.state.tensors()
        self.obstacle = _obstacle(modules, state)
        modes = tuple(module.training for module in modules)
        self.key = modes, tuple(map(tensor_signature, state)), self.obstacle
        return changed


def _obstacle(modules: Sequence[nn.Module], state: Sequence[Tensor]) -> str | None:
    try:
        check_traceable(modules, state)
        for tensor in state:
            _check_plain(tensor)
    except RuntimeError as error:
        return str(error)
    return None


def _check_plain(tensor: Tensor) -> None:
    """Raise RuntimeError if a tensor has another class or a hook.

    Graphs hold plain tensors, and only autograd calls hooks of parameters.
    """
    if type(local(tensor)) not in (Tensor, nn.Parameter, nn.Buffer):
        raise RuntimeError(f"a parameter or buffer is a {type(tensor).__name__}")
    if has_hooks(tensor):
        raise RuntimeError(f"a parameter of shape {list(tensor.shape)} has a hook")
