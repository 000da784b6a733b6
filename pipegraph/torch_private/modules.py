"""Modules: their dictionaries, their hooks, and the weights of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decompositions

from pipegraph.torch_private.export import replaced


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether ``state_dict()`` has a buffer; the public way, to make one, calls hooks of the model."""
    return buffer not in module._non_persistent_buffers_set


def can_reset_parameters(module: torch.nn.Module) -> bool:
    """Return whether a module initialises what it holds. ``nn.MultiheadAttention`` has no public method for it."""
    return hasattr(module, "reset_parameters") or hasattr(module, "_reset_parameters")


def reset_parameters(module: Any) -> None:
    """Initialise what a module holds, by the method that `can_reset_parameters` finds."""
    module.reset_parameters() if hasattr(module, "reset_parameters") else module._reset_parameters()


def initialise_of_transformers(model: Any, module: torch.nn.Module) -> None:
    """Initialise one module as a model of transformers does. What is public does so for all modules, and then once."""
    model._init_weights(module)


@contextmanager
def recurrent_layers_without_steps() -> Iterator[None]:
    """Let an LSTM, GRU or RNN on fake tensors make results of the right shapes, and no step.

    torch takes one after the other, in Python, which fixes their number. A graph has such a layer as one operation.
    """

    def sequence(inputs: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """A state for each step, ``[step, batch, state]``, with a gradient for whatever has one."""
        return torch.nn.functional.linear(inputs, weight.narrow(0, 0, state.shape[-1])) + state

    def lstm(original: Callable[..., Any], inputs: Any, states: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, cells = (sequence(inputs, weights[0], state) for state in states)
        return outputs, (outputs[-1], cells[-1])

    def rnn(original: Callable[..., Any], inputs: Any, state: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = sequence(inputs, weights[0], state)
        return outputs, outputs[-1]

    with replaced(decompositions, "one_layer_lstm", lstm), replaced(decompositions, "one_layer_rnn", rnn):
        yield


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether calling a module does more than its ``forward``.

    The dictionaries of hooks are private. The public interface only adds and removes hooks.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def backward_hooks_of(module: nn.Module) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of the backward of a module, with the methods that register them. Torch has no public list of them."""
    method = "register_full_backward_hook" if module._is_full_backward_hook else "register_backward_hook"
    pre_hooks = [("register_full_backward_pre_hook", hook) for hook in module._backward_pre_hooks.values()]
    return pre_hooks + [(method, hook) for hook in module._backward_hooks.values()]


# Modules

_ALL_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


_HOOKS = tuple(name for name in _ALL_HOOKS if "state_dict" not in name)


def tensor_dicts(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return a module's own parameters and buffers. `setattr` refuses to put a plain tensor in a parameter's place."""
    return module._parameters, module._buffers  # type: ignore[return-value]


def children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name. `named_children` leaves out None, and a child that comes again."""
    return module._modules


def hook_dicts(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks on a module's calls by kind and number. There is no public way to ask for them."""
    namespace = vars(module)
    return {name: namespace[name] for name in _HOOKS if namespace.get(name)}


def hook_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of a module's hooks, which no other hook of the process ever has."""
    return tuple(number for hooks in hook_dicts(module).values() for number in hooks)


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module other than tensors, children and hooks. Those are in private attributes.

    The state of torch's composable functions, such as `fully_shard`, is left out too, and also has private names.
    """
    places = {"_parameters", "_buffers", "_modules", *_ALL_HOOKS}
    items = vars(module).items()
    return {name: item for name, item in items if name not in places and not name.startswith("__composable_api_")}


def rnn_weight_lists(module: nn.Module) -> dict[str, Any]:
    """Return the copies of its weights that an RNN keeps, by attribute. They have private names."""
    names = ("_flat_weights", "_flat_weight_refs")
    return {name: item for name, item in vars(module).items() if name in names}


def renew_rnn_weights(module: nn.Module) -> None:
    """Let an RNN compute with the weights that it holds now, which it would notice only at some calls."""
    names: list[str] = module._flat_weights_names  # type: ignore[assignment]
    module._flat_weights = [getattr(module, name, None) for name in names]  # type: ignore[assignment]
