"""A model that does one thing that is not an operation of its graph, in one of several places."""

from __future__ import annotations

import datetime
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CALLS = 0


class Box:
    """A plain object."""

    def __init__(self) -> None:
        self.count = 0


class State(nn.Module):
    """What the kinds change. Each kind is a method, which returns a tensor for the next layer."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count = 0
        self.list: list[int] = []
        self.dict: dict[str, int] = {}
        self.box = Box()
        self.memory = torch.zeros(8)
        self.cache: Tensor | None = None
        self.scratch: Tensor | None = None
        self.generator = torch.Generator()
        self.random = random.Random(0)
        self.register_buffer("total", torch.zeros(()))
        self.next_number = counter()

    def counter(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * self.count

    def warm_up(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * (0.0 if self.count < 1000 else 1.0)

    def appends(self, h: Tensor) -> Tensor:
        self.list.append(1)
        return h * len(self.list)

    def sets_item(self, h: Tensor) -> Tensor:
        self.dict["calls"] = self.dict.get("calls", 0) + 1
        return h * self.dict["calls"]

    def changes_object(self, h: Tensor) -> Tensor:
        self.box.count += 1
        return h * self.box.count

    def counts_in_closure(self, h: Tensor) -> Tensor:
        return h * self.next_number()

    def changes_global(self, h: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return h * CALLS

    def changes_class(self, h: Tensor) -> Tensor:
        State.calls += 1
        return h * State.calls

    def remembers(self, h: Tensor) -> Tensor:
        h = h + self.memory
        self.memory = h.detach().mean(0)
        return h

    def adds_in_place(self, h: Tensor) -> Tensor:
        self.memory += 1
        return h * self.memory

    def draws(self, h: Tensor) -> Tensor:
        return h * self.random.random()

    def reads_clock(self, h: Tensor) -> Tensor:
        return h * (time.perf_counter() % 7)

    def reads_date(self, h: Tensor) -> Tensor:
        return h * datetime.datetime.now().second

    def seeds(self, h: Tensor) -> Tensor:
        torch.manual_seed(0)
        return h + torch.rand(8)

    def seeds_generator(self, h: Tensor) -> Tensor:
        self.generator.manual_seed(0)
        return h + torch.rand(8, generator=self.generator)

    def forks(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return h + torch.rand(8)

    def hooks_tensor(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        return h

    def hooks_node(self, h: Tensor) -> Tensor:
        if h.grad_fn is not None:
            h.grad_fn.register_hook(lambda inputs, outputs: None)
        return h

    def hooks_several(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: None)
        return h

    def hooks_parameter(self, h: Tensor) -> Tensor:
        self.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return h

    def hooks_module(self, h: Tensor) -> Tensor:
        self.linear.register_full_backward_hook(lambda module, inputs, outputs: None)
        return h

    def keeps_gradient(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.retain_grad()
        return h

    def packs(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.half(), lambda tensor: tensor.float()):
            return torch.tanh(h)

    def switches_gradients_off(self, h: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return h

    # What is right.

    def nothing(self, h: Tensor) -> Tensor:
        return h

    def caches(self, h: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.tril(torch.ones(8, 8))
        return h @ self.cache

    def passes_on(self, h: Tensor) -> Tensor:
        self.scratch = h * 2
        return h + self.scratch

    def counts_in_buffer(self, h: Tensor) -> Tensor:
        self.total += 1
        return h * self.total

    def offloads(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(h)

    def switches_gradients(self, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return torch.tanh(h)

    def switches_gradients_on_again(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            mean = h.mean()
            with torch.enable_grad():
                h = torch.tanh(h)
        return h + mean

    def compiles(self, h: Tensor) -> Tensor:
        return _compiled(h)

    def scripts(self, h: Tensor) -> Tensor:
        scripted: Tensor = _scripted(h)
        return scripted


REFUSED = (
    *(
        "counter",
        "warm_up",
        "appends",
        "sets_item",
        "changes_object",
        "counts_in_closure",
        "changes_global",
        "changes_class",
        "remembers",
    ),
    *("adds_in_place", "draws", "reads_clock", "reads_date", "seeds", "seeds_generator", "forks"),
    *("hooks_node", "hooks_several", "hooks_parameter", "hooks_module", "keeps_gradient", "packs"),
    "switches_gradients_off",
)
RIGHT = (
    *("nothing", "caches", "passes_on", "counts_in_buffer", "offloads", "switches_gradients"),
    *("switches_gradients_on_again", "compiles", "scripts", "hooks_tensor"),
)
PLACES = ("forward", "submodule", "helper", "training", "evaluation")


class Model(nn.Module):
    """Calls a method of `State` between two layers.

    Args:
        kind: the name of the method.
        place: what calls it: the model's own forward, the forward of a child, a function, or one mode alone.
    """

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        self.kind, self.place = kind, place
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state = Child(kind) if place == "submodule" else State()

    def forward(self, x: Tensor) -> Tensor:
        x = self.state.linear(self.first(x))
        if self.place == "submodule":
            return self.last(self.state(x))
        do: Callable[[Tensor], Tensor] = getattr(self.state, self.kind)
        if self.place == "helper":
            return self.last(helper(do, x))
        if self.place == "forward" or self.training == (self.place == "training"):
            x = do(x)
        return self.last(x)


class Child(State):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.kind)(x)


def counter() -> Callable[[], int]:
    count = 0

    def next_number() -> int:
        nonlocal count
        count += 1
        return count

    return next_number


def helper(do: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return do(torch.relu(x))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which Inductor's own modules use, too

    @torch.compile
    def _compiled(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    @torch.jit.script
    def _scripted(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2
