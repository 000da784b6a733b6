"""Places of arguments and results in calls of modules, for every way in which Python passes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import pipegraph
from pipegraph.graph.calls import argument_place, result_place
from pipegraph.graph.nodes import path_of


@dataclass
class Result:
    second: Tensor
    first: Tensor
    empty: None = None


class Inner(nn.Module):
    """Reads its second argument first, and makes its second result first."""

    def forward(self, x: Tensor, *parts: Any, skip: Tensor, pair: Any = None, **named_parts: Tensor) -> Any:
        b = skip.sin()
        a = x.cos() + b
        for part in (*parts, *(pair or ()), *named_parts.values()):
            a = a * part
        return a, None, b


class AsDataclass(Inner):
    def forward(self, *args: Any, **kwargs: Any) -> Result:
        first, _, second = super().forward(*args, **kwargs)
        return Result(second, first)


class AsNest(Inner):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, empty, second = super().forward(*args, **kwargs)
        return {"both": (first, [second])}, empty


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Tensor) -> Any:
        return self.inner(x.exp(), skip=x.tanh())

    def forward(self, x: Tensor) -> Tensor:
        output = self.call(x)
        leaves = pytree.tree_leaves(vars(output) if isinstance(output, Result) else output)
        return torch.stack([leaf for leaf in leaves if leaf is not None])


class WithEverything(Outer):
    def call(self, x: Tensor) -> Any:
        return self.inner(x.exp(), x.sinh(), pair=(x.log(), x.neg()), skip=x.tanh(), other=x.sqrt())


class Twice(Outer):
    def call(self, x: Tensor) -> Any:
        first = self.inner(x.exp(), skip=x.tanh())
        return first, self.inner(x.sqrt(), skip=first[0])


def call_places(model: nn.Module, name: str = "inner") -> tuple[dict[str, Any], dict[str, Any]]:
    """What a module's call was handed, operation → (order, name), and what it returned, → (order, index, count)."""
    captured = pipegraph.capture(model, (torch.rand(3) + 1,))
    calls = {path for node in captured.nodes for path, _ in path_of(node)}
    (call,) = [path for path in calls if path.endswith(name)]
    argument_places = {_operation(node): place for node in captured.nodes if (place := argument_place(node, call))}
    result_places = {_operation(node): place for node in captured.nodes if (place := result_place(node, call))}
    return (
        {name: (place.order, place.name) for name, place in argument_places.items()},
        {name: (place.order, place.index, place.count) for name, place in result_places.items()},
    )


def _operation(node: fx.Node) -> str:
    return node.target._opname  # type: ignore[union-attr]


def test_arguments_have_the_names_and_the_order_of_the_signature() -> None:
    argument_places, result_places = call_places(WithEverything(Inner()))
    assert argument_places == {
        "exp": (0, "x"),
        "sinh": (1, None),
        "tanh": (2, "skip"),
        "log": (3, None),
        "neg": (4, None),
        "sqrt": (5, "other"),
    }
    assert result_places == {"mul": (0, 0, 3), "sin": (1, 2, 3)}


@pytest.mark.parametrize(
    ("inner", "given"),
    [
        (Inner, {"add": (0, 0, 3), "sin": (1, 2, 3)}),
        (AsDataclass, {"sin": (0, None, 1), "add": (1, None, 1)}),
        (AsNest, {"add": (0, None, 2), "sin": (1, None, 2)}),
    ],
)
def test_results_have_the_order_in_which_they_are_returned(inner: type[nn.Module], given: dict[str, Any]) -> None:
    assert call_places(Outer(inner()))[1] == given


def test_two_calls_of_one_module_are_told_apart() -> None:
    assert call_places(Twice(Inner()), "inner")[0] == {"exp": (0, "x"), "tanh": (1, "skip")}
    assert call_places(Twice(Inner()), "inner@1")[0] == {"sqrt": (0, "x"), "add": (1, "skip")}


def test_a_cast_that_does_nothing_hands_its_place_on() -> None:
    class Casting(Outer):
        def call(self, x: Tensor) -> Any:
            return self.inner(x.exp().to(torch.float32), skip=x.tanh().contiguous())

    assert call_places(Casting(Inner()))[0]["exp"] == (0, "x")


def test_no_module_is_left_changed() -> None:
    model = Outer(Inner())
    state_before = nn.Module.__call__, model.inner.forward, dict(vars(model.inner))
    call_places(model)
    assert (nn.Module.__call__, model.inner.forward, dict(vars(model.inner))) == state_before
