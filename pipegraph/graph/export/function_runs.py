"""The calls of functions of a model's source, recorded while the model is exported: a package may call them, too."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, Final

import torch
from torch import fx, nn

from pipegraph.graph.calls import OBJECT, RETURNED, FunctionRun, ModuleValue, PlainValue, VariablePlace, function_key
from pipegraph.graph.export.executed_lines import is_of_model
from pipegraph.torch_private.export import traced_node

_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)
_VARIADIC: Final = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_NO_PLAIN_FUNCTION: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class FunctionRecorder:
    """Marks the node of each operation with the calls of functions in which it ran."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[str, str, int]] = Counter()

    def on_call(self, tracer: Any, frame: FrameType, call: str, module: nn.Module) -> Callable[[Any], None] | None:
        """Begin to record a call, if it is one of a function of the model or of a method of the module.

        Args:
            call, module: the call of the module that runs.

        Returns:
            a function that takes the result of the call; None if the call is not recorded.
        """
        code = frame.f_code
        if not is_of_model(code.co_filename) or code.co_flags & _NO_PLAIN_FUNCTION or code.co_name == "forward":
            return None
        values, has_self = frame.f_locals, code.co_varnames[:1] == ("self",)
        if has_self and values.get("self") is not module:
            return None
        owner = inspect.getattr_static(type(module), code.co_name, None)
        is_static = isinstance(owner, staticmethod) and inspect.unwrap(owner.__func__).__code__ is code
        is_method = has_self or is_static
        member = getattr(owner, "__func__", owner) if is_method else frame.f_globals.get(code.co_name)
        function = inspect.unwrap(member) if callable(member) else None
        if not isinstance(function, FunctionType) or function.__code__ is not code:
            return None
        place = call, code.co_filename, code.co_firstlineno
        number = self._numbers[place]
        self._numbers[place] += 1
        key = function_key(*place, number)
        names = code.co_varnames[int(has_self) : code.co_argcount + code.co_kwonlyargcount]
        variadic = code.co_varnames[len(names) + int(has_self) :][: (code.co_flags & _VARIADIC).bit_count()]
        arguments = {name: values[name] for name in names}
        arguments |= {name: values[name] for name in variadic if values[name]}
        for name, value in arguments.items():
            _mark(tracer, key, VariablePlace(code.co_firstlineno, name, (), 0, 0), value)
        forms = tuple((name, _form(value, module)) for name, value in arguments.items())
        caller = frame.f_back
        called_from = (caller.f_code.co_filename, caller.f_lineno) if caller is not None else ("", 0)
        last = next(iter(reversed(tracer.graph.nodes)), None)

        def on_return(result: Any) -> None:
            run = FunctionRun(
                code.co_name,
                code.co_filename,
                code.co_firstlineno,
                called_from,
                call,
                number,
                is_method,
                forms,
                _form(result),
                function,
            )
            for node in _nodes_after(tracer.graph, last):
                node.meta["functions"] = (run, *node.meta.get("functions", ()))
            _mark(tracer, key, VariablePlace(code.co_firstlineno, RETURNED, (), 0, 0), result)

        return on_return


def _nodes_after(graph: fx.Graph, last: fx.Node | None) -> Iterator[fx.Node]:
    for node in reversed(graph.nodes):
        if node is last:
            return
        yield node


def _mark(tracer: Any, key: str, place: VariablePlace, value: Any) -> None:
    """Mark the nodes of the tensors in a value with their places."""
    if isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            _mark(tracer, key, place._replace(path=(*place.path, index)), part)
    elif isinstance(value, torch.Tensor) and (node := traced_node(tracer, value)) is not None:
        places = node.meta.setdefault("variables", {})
        places[key] = (*places.get(key, ()), place)


def _form(value: Any, owner: nn.Module | None = None) -> object:
    """The form of an argument or a result.

    Args:
        owner: the module that runs, inside of which an argument may be a module.
    """
    if isinstance(value, torch.Tensor):
        return ...
    if isinstance(value, nn.Module) and owner is not None:
        name = next((name for name, module in owner.named_modules() if module is value), "")
        return ModuleValue(name) if name else OBJECT
    if type(value) in (tuple, torch.Size):
        return tuple(map(_form, value))
    return PlainValue(value) if type(value) in _PLAIN or isinstance(value, torch.SymInt) else OBJECT
