"""The ``torch.autograd.Function``s of a model: which of them a graph may look into, and an operator for the others.

``torch.export`` traces through a Function, and what it finds there is differentiated as any other operation. Where the
backward of the Function is another one (a straight-through estimator, a reversed gradient, an injected loss), the graph
has one operator for the call, which no pass looks into:

    model: y = Round.apply(x)  ─▶  graph: apply_Round_0(x)  ─▶  stage: y = Round.apply(x)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from pipegraph.graph.function_trials import UnwritableFunctionError, is_differentiable, is_same, trial_of
from pipegraph.torch_private.export import apply_function
from pipegraph.torch_private.operators import OpOverload
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import storage_identity

NAMESPACE: Final = "pipegraph_functions"
"""The namespace of the operators. It is not that of torch, so that no rule for one of torch's applies."""


@dataclass(frozen=True)
class AppliedFunction:
    """A Function, with the kinds of its arguments and results.

    Attributes:
        function: a subclass of ``torch.autograd.Function``.
        types: of its arguments, as the schema of an operator names them.
        tuples: whether each argument is a tuple.
        results: how many tensors it returns in a tuple; None if it returns a tensor.
        draws: whether it draws random numbers.
    """

    function: type
    types: tuple[str, ...]
    tuples: tuple[bool, ...]
    results: int | None = None
    draws: bool = False

    def apply(self, *args: Any) -> Any:
        """Apply the Function, with its backward. Several results are a list, as operators return them."""
        arguments = [tuple(value) if is_tuple else value for value, is_tuple in zip(args, self.tuples, strict=True)]
        results = apply_function(self.function, *arguments)
        return results if self.results is None else list(results)

    def without_gradient(self, *args: Any) -> Any:
        """Run the forward. No result is in the memory of an argument, which the schema of the operator rules out."""
        with torch.no_grad():
            results = self.apply(*args)
        memory = {storage_identity(value) for value in pytree.tree_leaves(args) if isinstance(value, Tensor)}
        return pytree.tree_map(lambda value: value.clone() if storage_identity(value) in memory else value, results)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_operators: dict[AppliedFunction, OpOverload] = {}
_functions: dict[object, AppliedFunction] = {}
_names: Counter[str] = Counter()


def applied_function(target: object) -> AppliedFunction | None:
    """The Function that an operator applies; None for any other operator."""
    return _functions.get(target)


def applied_functions(nodes: Iterable[fx.Node]) -> list[AppliedFunction]:
    """The Functions that operations apply, each once."""
    return list(dict.fromkeys(_functions[node.target] for node in nodes if node.target in _functions))


def callable_of(target: Any) -> Callable[..., Any]:
    """What computes an operation with its backward: of a Function's operator the Function itself."""
    return _functions[target].apply if target in _functions else target


def operator_of_function(applied: AppliedFunction) -> OpOverload:
    """The operator of a Function, which is defined at the first call."""
    if applied not in _operators:
        function_name = applied.function.__name__
        name = f"apply_{function_name}_{_names[function_name]}"  # no overload: torch crashes when it drops several
        _names[function_name] += 1
        arguments = ", ".join(f"{kind} x{position}" for position, kind in enumerate(applied.types))
        returns = "Tensor" if applied.results is None else "Tensor[]"
        tags = (torch.Tag.nondeterministic_seeded,) if applied.draws else ()
        _library.define(f"{name}({arguments}) -> {returns}", tags=tags)
        _library.impl(name, applied.without_gradient, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", applied.without_gradient, lib=_library)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_backward, lib=_library)
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        _operators[applied], _functions[operator] = operator, applied
    return _operators[applied]


def _no_backward(*_: Any) -> Any:
    raise RuntimeError("a captured graph has no backward")


def apply_by_operator(function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a Function while a model is exported, or compared with what it was exported to.

    What a reentrant ``torch.utils.checkpoint`` checkpoints is run instead: export would record that as a region without
    gradients. What a stage computes again is a matter of ``recompute``.

    Raises:
        UnwritableFunctionError: it needs an operator, and cannot have one.
    """
    if function is CheckpointFunction:
        checkpointed, _, *inputs = args
        return checkpointed(*inputs)
    operator = None
    if function.__module__.split(".")[0] != "torch":
        try:
            operator = _operator_for(function, args, kwargs)
        except UnwritableFunctionError:
            if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in args):
                raise
    if operator is not None:
        results = operator(*args)
        return results if isinstance(results, Tensor) else tuple(results)
    # Hooks of a checkpoint around it: torch.export takes what follows them to be without gradients.
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return apply(*args, **kwargs)


def _operator_for(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
    """The operator that applies a Function; None if its backward is the derivative of its forward.

    Raises:
        UnwritableFunctionError: it cannot have one.
    """
    if not any(map(is_differentiable, args)):
        return None
    trial = trial_of(function, args, kwargs)
    if trial.is_derivative:
        return None
    name, (types, tuples) = function.__qualname__, _kinds(args)
    if kwargs or None in types:
        refused = (type(value).__name__ for value, kind in zip(args, types, strict=True) if kind is None)
        raise UnwritableFunctionError(f"{name} takes {next(refused, 'an argument by its name')}")
    if not trial.returns_tensors:
        raise UnwritableFunctionError(f"{name} returns something other than tensors")
    if trial.writes:
        raise UnwritableFunctionError(f"{name} writes into its arguments")
    if any("apply" in vars(base) for base in function.__mro__ if not base.__module__.startswith("torch.")):
        raise UnwritableFunctionError(f"{name} defines apply itself")
    return operator_of_function(AppliedFunction(function, types, tuples, trial.results, trial.draws))


def apply_written(function: type, written: type, args: tuple[Any, ...]) -> Any:
    """Apply a class that a package has for a Function of the model, by the operator of that.

    Raises:
        UnwritableFunctionError: the class computes something else, or the model does not apply it to such arguments.
    """
    kinds = _kinds(args)
    operators = (key for key in _operators if key.function is function and (key.types, key.tuples) == kinds)
    applied = next(operators, None)
    if applied is None:
        raise UnwritableFunctionError(f"{function.__name__} is applied to other arguments")
    compared = _compared.setdefault(written, {})
    if applied not in compared:
        compared[applied] = is_same(function, written, args)
    if not compared[applied]:
        raise UnwritableFunctionError(f"{function.__name__} has another forward or backward")
    results = _operators[applied](*args)
    return results if applied.results is None else tuple(results)


_compared: weakref.WeakKeyDictionary[type, dict[AppliedFunction, bool]] = weakref.WeakKeyDictionary()


_TYPES: Final = (
    (Tensor, "Tensor"),
    (type(None), "Tensor?"),
    (bool, "bool"),
    ((int, torch.SymInt), "SymInt"),
    (float, "float"),
    (str, "str"),
    (torch.dtype, "ScalarType"),
    (torch.device, "Device"),
)
_LISTS: Final = ((bool, "bool[]"), ((int, torch.SymInt), "SymInt[]"), (float, "float[]"))


def _kinds(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """The types of arguments, and which of them are tuples."""
    return tuple(map(_schema_type, args)), tuple(isinstance(value, tuple) for value in args)


def _schema_type(value: Any) -> Any:
    """The type of an argument in the schema of an operator; None if operators do not take it."""
    if isinstance(value, (tuple, list)):
        return next((name for kind, name in _LISTS if all(isinstance(part, kind) for part in value)), None)
    return next((name for kind, name in _TYPES if isinstance(value, kind)), None)
