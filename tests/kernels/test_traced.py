"""What traced kernels save, compile, refuse, and leave to autograd."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.errors import ArgumentError, PipegraphError
from pipegraph.kernels import compilers, make
from pipegraph.torch_private.tracing import trace
from tests.kernels.cases import build
from tests.kernels.stages import Function, Layers, assert_as_autograd, linear, x
from tests.messages import refused, warned
from tests.slow import cases


def test_the_first_gradient_of_a_parameter_becomes_its_grad_and_owns_its_memory() -> None:
    stage, _ = build("a gradient that is the output's")
    kernels = make("eager", stage, (True,), (True,))
    gradient = torch.ones(4, 8)
    (of_input,) = kernels.input_backward(saved := kernels.forward((x,)).saved, (gradient,))
    kernels.weight_backward(saved)
    stage.p.grad.add_(1)
    assert_close(gradient, torch.ones(4, 8))
    assert_close(of_input, torch.ones(4, 8))


@pytest.mark.parametrize("recompute", cases(["none", "min-cut", "block"], slow=("none", "min-cut")))
def test_what_is_saved_is_let_go_by_its_last_reader(recompute: str) -> None:
    stage = nn.Sequential(nn.Linear(8, 8), Tracked(), nn.Linear(8, 8))
    kernels = make("eager", stage, (True,), (True,), recompute=recompute)
    first = torch.randn(4, 8)
    forward = kernels.forward((first,))
    saved, storages = (
        forward.saved,
        {name: weakref.ref(t.untyped_storage()) for name, t in forward.saved.values.items()},
    )
    of_input = weakref.ref(first.untyped_storage())
    del forward, first
    kernels.input_backward(saved, (torch.ones(4, 8),))
    gc.collect()
    alive = [name for name, storage in storages.items() if storage() is not None and "primals" not in name]
    assert of_input() is not None  # W reads it
    assert len(alive) <= 1  # the input of the second layer, which W reads
    kernels.weight_backward(saved)
    gc.collect()
    assert of_input() is None
    assert not [name for name in alive if storages[name]() is not None]


class Tracked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(torch.sin(x))


def test_a_stage_without_input_gradients_does_everything_in_w() -> None:
    stage = Layers()
    kernels = make("eager", stage, (False,), (True,))
    saved = kernels.forward((x,)).saved
    assert kernels.input_backward(saved, (torch.ones(4, 4),)) == (None,)
    assert all(parameter.grad is None for parameter in stage.parameters())
    kernels.weight_backward(saved)
    assert all(parameter.grad is not None for parameter in stage.parameters())


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    with refused(PipegraphError, "output 0", "requires_grad false", advice="freeze"):
        make("eager", nn.Linear(8, 3), (False,), (False,)).forward((x,))


@pytest.mark.parametrize("divided", [True, False])
def test_a_stage_that_cannot_be_traced_is_left_to_autograd(divided: bool) -> None:
    stage = Function(lambda s, x: s.a(x) * float(x.sum()), **linear("a"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_as_autograd(stage, (x,), divided=divided, traced=False)
    assert len([warning for warning in caught if "Function cannot be traced" in str(warning.message)]) == 1


def test_evaluation_without_gradients() -> None:
    stage = Layers()
    forward = make("eager", stage, (True,), (True,)).forward((x,), differentiable=False)
    assert forward.saved is None
    assert_close(forward.outputs[0], stage(x).detach())


def test_preparing_compiles_all_that_a_step_needs() -> None:
    stage = Layers()
    kernels = make("eager", stage, (True,), (True,))
    kernels.prepare((torch.zeros(4, 8),), target=None, with_loss=False, differentiable=True, kinds="FIW")
    (variant,) = kernels.variants
    programs = dict(variant._programs)
    saved = kernels.forward((x,)).saved
    kernels.input_backward(saved, (torch.ones(4, 4),))
    kernels.weight_backward(saved)
    assert variant._programs == programs and len(programs) == 3


def test_unknown_recomputation_is_refused() -> None:
    with refused(ArgumentError, '"mincut"', '"min-cut"', advice='"block"'):
        make("eager", Layers(), (True,), (True,), recompute="mincut")


def test_without_a_compiler_for_cpp_graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "compiler_is_missing", lambda: "none found")
    compilers.compiler.cache_clear()
    with warned("C++ compiler", 'kernels="eager"', "none found"):
        assert_as_autograd(Layers(), (x,), kernels="inductor")
    compilers.compiler.cache_clear()


def test_a_graph_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: Any) -> Any:
        raise AssertionError("not today")

    monkeypatch.setattr(compilers, "compile_graph", fail)
    compilers.compiler.cache_clear()
    with warned("cannot compile", "AssertionError: not today"):
        assert_as_autograd(Layers(), (x,), kernels="inductor")
    compilers.compiler.cache_clear()


def test_anomalies_are_detected_by_autograd_and_graphs_run_again_after_it() -> None:
    kernels: Any = make("eager", nn.Linear(8, 8), (True,), (True,))
    with (
        torch.autograd.set_detect_anomaly(True),
        warned("Linear", "left to autograd", "set_detect_anomaly"),
    ):
        kernels.forward((x,))
    assert kernels.variants[-1] is None
    kernels.begin()
    kernels.forward((x,))
    assert kernels.variants[-1] is not None


def test_two_threads_do_not_trace_at_once() -> None:
    """torch's tracer replaces methods of all modules while it traces."""
    inside: list[int] = []
    most: list[int] = []

    def traced(x: Tensor) -> Tensor:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return x * 2

    threads = [threading.Thread(target=trace, args=(traced, (torch.ones(2),), None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]
