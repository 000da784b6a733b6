"""A forward or loss that sets attributes is left to autograd, and tracing restores the attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import make
from tests.kernels.stages import assert_as_autograd, step, x
from tests.messages import warned


class Setting(nn.Module):
    """Its forward sets an attribute."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.function = forward
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.a(x))


def cache(stage: Any, x: Tensor) -> Tensor:
    if stage.cached is None:
        stage.cached = torch.full((8,), 2.0)
    return x * stage.cached


def count(stage: Any, x: Tensor) -> Tensor:
    stage.count = stage.count + 1
    return x * stage.count


def keep(stage: Any, x: Tensor) -> Tensor:
    stage.kept.append(x.detach())
    return x * len(stage.kept)


SETTING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a count": (lambda: Setting(count, count=0), "Setting.count"),
    "a buffer": (lambda: Setting(count, count=torch.zeros(())), "Setting.count"),
    "a list": (lambda: Setting(keep, kept=[]), "Setting.kept"),
}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", SETTING)
def test_a_forward_that_sets_attributes_is_left_to_autograd(name: str, layers: int) -> None:
    make_layer, attribute = SETTING[name]
    stage = nn.Sequential(*(make_layer() for _ in range(layers)))
    reference = copy.deepcopy(stage)
    with warned("Sequential", "cannot be traced", attribute):
        assert_as_autograd(stage, (x,), traced=False)
    for _ in range(3):
        reference(x)
    for layer, expected in zip(stage, reference, strict=True):
        assert getattr(layer, "count", None) == getattr(expected, "count", None)
        assert len(getattr(layer, "kept", ())) == len(getattr(expected, "kept", ()))
        assert all(type(value) is not torch._subclasses.FakeTensor for value in getattr(layer, "kept", ()))


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_that_the_first_call_fills_is_filled_before_the_stage_is_traced(
    layers: int, recwarn: pytest.WarningsRecorder
) -> None:
    stage = nn.Sequential(*(Setting(cache, cached=None) for _ in range(layers)))
    kernels: Any = make("eager", stage, (True,), (True,))
    kernels.prepare([x], target=None, with_loss=False, differentiable=True, kinds="FIW")
    assert all(layer.cached is None for layer in stage)
    outputs = [kernels.forward((x,)).outputs[0] for _ in range(2)]
    assert all(type(layer.cached) is Tensor for layer in stage)
    assert_close(outputs, [stage(x).detach()] * 2)
    assert [variant is not None for variant in kernels.variants] == [True]
    assert not recwarn


def test_a_tensor_that_a_closure_keeps_is_left_to_autograd() -> None:
    closure_tensors: list[Tensor] = []

    def forward(stage: Any, x: Tensor) -> Tensor:
        total = x + closure_tensors[0] if closure_tensors else x
        closure_tensors[:] = [x.detach()]
        return total

    kernels = make("eager", Setting(lambda s, x: forward(s, x)), (True,), (True,))
    with pytest.raises(Exception, match=r"FunctionalTensor|FakeTensor"):  # and not a wrong result
        kernels.forward((x,))


def test_a_loss_that_sets_its_own_attributes() -> None:
    class Meter:
        def __init__(self) -> None:
            self.last: Tensor | None = None
            self.calls = 0

        def __call__(self, outputs: Any, target: Any) -> Tensor:
            self.calls += 1
            self.last = outputs[0].sum()
            return self.last

    meter = Meter()
    kernels = make("eager", nn.Linear(8, 8), (True,), (True,), meter)
    with pytest.warns(UserWarning, match=r"sets Meter\."):
        loss = step(kernels)
    assert meter.calls == 1
    assert_close(meter.last, loss, check_stride=False)
