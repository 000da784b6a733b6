"""The functions to which a ``forward`` hands its module: they do what it does.

def forward(self, *args):
    return ALL_EXPERTS[self.config.experts](self, *args)      of experts of transformers
    return self.processor(self, *args)                        of attention of diffusers
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple

from torch import nn

from pipegraph.graph.captured import ForwardFunction

_SELF = "self"


class HandedModule(NamedTuple):
    """A module that a function has from the ``forward`` of this module.

    Attributes:
        module: the module.
        parameter: the parameter that has it.
        is_forward: whether the ``forward`` returns what the function does.
    """

    module: nn.Module
    parameter: str
    is_forward: bool


def handed_module(frame: FrameType) -> HandedModule | None:
    """Return the module that a ``forward`` hands to the function of a frame, if that does what the ``forward`` does, or
    is called by such a function."""
    code, caller = frame.f_code, frame.f_back
    if caller is None:
        return None
    values = frame.f_locals
    parameters = code.co_varnames[: code.co_argcount][:2]
    for parameter in parameters:
        module = values.get(parameter)
        if not isinstance(module, nn.Module):
            continue
        if _is_forward(caller, module):
            is_returned = caller.f_lineno in _lines_of_returned_calls(caller.f_code)
            return HandedModule(module, parameter, True) if is_returned else None
        outer = handed_module(caller) if parameter == parameters[0] else None
        if outer is not None and outer.module is module:
            return HandedModule(module, parameter, False)
    return None


def forward_function(frame: FrameType, parameter: str) -> ForwardFunction | None:
    """Return the function of a frame, with the parameter that has the module; None if it cannot be found."""
    code = frame.f_code
    has_owner = code.co_varnames[0] != parameter
    owner = frame.f_locals[code.co_varnames[0]] if has_owner else None
    member = inspect.getattr_static(type(owner), code.co_name, None) if has_owner else None
    function = member if has_owner else frame.f_globals.get(code.co_name)
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return None
    return ForwardFunction(function, parameter, owner)


def _is_forward(frame: FrameType, module: nn.Module) -> bool:
    """Return whether a frame is that of the ``forward`` of a module."""
    code = frame.f_code
    if code.co_name != "forward" or code.co_varnames[:1] != (_SELF,) or frame.f_locals.get(_SELF) is not module:
        return False
    forward = type(module).forward
    return any(getattr(function, "__code__", None) is code for function in (forward, inspect.unwrap(forward)))


@cache
def _lines_of_returned_calls(code: CodeType) -> frozenset[int]:
    """The lines of the statements ``return function(…, self, …)`` of a function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return frozenset()
    lines = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Return(ast.Call(args=arguments)):
                if any(isinstance(argument, ast.Name) and argument.id == _SELF for argument in arguments):
                    first = code.co_firstlineno - 1
                    lines |= set(range(first + node.lineno, first + (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)
