"""What stands for a method of torch while a model is traced is nested, of one thread, and put back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.fx.proxy import TracerBase

import pipegraph
from pipegraph.graph.custom_functions import applied_function
from pipegraph.torch_private.export import autograd_functions_wrapped, module_calls_wrapped

METHODS = (
    (torch.autograd.Function, "apply"),
    (_ModuleStackTracer, "call_module"),
    (TracerBase, "_filter_traceback_frames"),
    (nn.Module, "register_parameter"),
)


def of_torch() -> list[Any]:
    return [vars(owner)[name] for owner, name in METHODS]


def apply_as_ever(function: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return apply(*args, **kwargs)


def recorder(applied: list[type]) -> Callable[..., Any]:
    def record(function: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        applied.append(function)
        return apply(*args, **kwargs)

    return record


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 3


class Captures(nn.Module):
    """Captures another model within its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with autograd_functions_wrapped(apply_as_ever), pytest.raises(ValueError, match="inner"):
            raise ValueError("inner")
        return Double.apply(self.linear(x))  # type: ignore[no-any-return]


def test_torch_is_as_it_was_after_an_error() -> None:
    original_methods = of_torch()
    with (
        pytest.raises(ValueError, match="stop"),
        autograd_functions_wrapped(apply_as_ever),
        module_calls_wrapped(lambda *args: None),
    ):
        raise ValueError("stop")
    assert of_torch() == original_methods


def test_a_function_whose_apply_was_taken_before_is_seen_once() -> None:
    functions: list[type] = []
    taken, forward = Double.apply, vars(Double)["forward"]
    with autograd_functions_wrapped(recorder(functions)):
        taken(torch.ones(1))
        Double.apply(torch.ones(1))
    assert functions == [Double, Double]
    assert vars(Double)["forward"] is forward


def test_replacements_nest() -> None:
    original_methods, outer, inner = of_torch(), [], []
    with autograd_functions_wrapped(recorder(outer)):
        with autograd_functions_wrapped(recorder(inner)):
            Double.apply(torch.ones(1))
        Double.apply(torch.ones(1))
    Double.apply(torch.ones(1))
    assert (outer, inner) == ([Double, Double], [Double])
    assert of_torch() == original_methods


def test_a_capture_within_which_methods_are_replaced_still_sees_what_follows() -> None:
    original_methods, forward = of_torch(), vars(Double)["forward"]
    captured = pipegraph.capture(Captures(), (torch.ones(2, 4),))
    assert captured.nodes[0].meta["path"][-1][1] == "linear"
    applied = applied_function(captured.nodes[1].target)
    assert applied is not None and applied.function is Double
    assert vars(Double)["forward"] is forward
    assert of_torch() == original_methods


def test_other_threads_keep_torchs_own() -> None:
    functions: list[type] = []
    with autograd_functions_wrapped(recorder(functions)):
        thread = threading.Thread(target=lambda: Double.apply(torch.ones(1)))
        thread.start()
        thread.join()
    assert functions == []


def test_captures_in_two_threads_follow_each_other() -> None:
    original_methods = of_torch()
    operations: dict[int, list[str]] = {}

    def capture(index: int) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(index + 1)))
        operations[index] = [node.meta["path"][0][1] for node in pipegraph.capture(model, (torch.ones(2, 4),)).nodes]

    threads = [threading.Thread(target=capture, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert operations == {0: ["0"], 1: ["0", "1"]}
    assert of_torch() == original_methods
