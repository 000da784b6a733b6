"""Kernels that are traced give what autograd gives, whatever a stage does."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from pipegraph.errors import PipegraphError
from pipegraph.kernels import internals, make, maker
from pipegraph.kernels.blocks import differentiate
from pipegraph.kernels.compiled import compilers
from tests.kernels.stages import Function, assert_as_autograd, linear


class Layer(nn.Module):
    """A residual layer, with dropout where asked for."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(p)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.silu(self.up(self.norm(x)))))


class Layers(nn.Module):
    def __init__(self, count: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(p) for _ in range(count))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


x = torch.randn(4, 8)
tokens = torch.randint(0, 5, (4,))


def _no_grad(stage: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = stage.a(x).sigmoid()
    return stage.b(x) * scale


def _autocast(stage: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = stage.a(x)
    return stage.b(y.float())


def _in_place(stage: Any, x: Tensor) -> Tensor:
    y = stage.a(x)
    y[:, :2] = 0
    y.add_(1)
    y[1:].mul_(x[1:])
    return stage.b(y)


class Doubled(torch.autograd.Function):
    """A gradient that is not the one of what is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def tied() -> nn.Module:
    stage = Function(lambda s, x: s.b(torch.tanh(s.a(x))), **linear("a", "b"))
    stage.b.weight = stage.a.weight
    return stage


def frozen() -> nn.Module:
    stage = Layers()
    stage.layers[1].up.requires_grad_(False)
    stage.head.weight.requires_grad_(False)
    return stage


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "layers": (Layers, (x,)),
    "one layer": (lambda: Layers(1), (x,)),
    "dropout": (lambda: Layers(p=0.5), (x,)),
    "layers that differ": (lambda: Function(lambda s, x: s.b(s.a(x)), a=Layer(0.1), b=Layer(0.7)), (x,)),
    "a layer called again": (lambda: Function(lambda s, x: s.a(s.a(s.a(x))), a=Layer(0.5)), (x,)),
    "tied": (tied, (x,)),
    "frozen": (frozen, (x,)),
    "all frozen": (lambda: Layers().requires_grad_(False), (x,)),
    "integers": (lambda: Function(lambda s, i, x: s.e(i) * s.a(x), e=nn.Embedding(5, 8), **linear("a")), (tokens, x)),
    "an unused input": (lambda: Function(lambda s, x, y: s.a(x), **linear("a")), (x, x)),
    "an unused parameter": (lambda: Function(lambda s, x: s.a(x), **linear("a", "b")), (x,)),
    "an input as output": (lambda: Function(lambda s, x: (x, s.a(x)), **linear("a")), (x,)),
    "an output twice": (lambda: Function(lambda s, x: (y := s.a(x), y), **linear("a")), (x,)),
    "a view of an input": (lambda: Function(lambda s, x: (x.t(), s.a(x)[1:], x[0]), **linear("a")), (x,)),
    "views of one value": (lambda: Function(lambda s, x: s.a(x).chunk(2, -1), **linear("a")), (x,)),
    "a transposed output": (lambda: Function(lambda s, x: s.a(x).t(), **linear("a")), (x,)),
    "an expanded output": (lambda: Function(lambda s, x: s.a(x).sum().expand(3, 2), **linear("a")), (x,)),
    "an integer output": (lambda: Function(lambda s, x: (s.a(x).argmax(-1), s.b(x)), **linear("a", "b")), (x,)),
    "a detached output": (lambda: Function(lambda s, x: (s.a(x), s.a(x).detach()), **linear("a")), (x,)),
    "a parameter as output": (lambda: Function(lambda s, x: (s.a.weight, s.a(x)), **linear("a")), (x,)),
    "a gradient that is the output's": (lambda: Function(lambda s, x: s.p + x), (x,)),
    "no_grad": (lambda: Function(_no_grad, **linear("a", "b")), (x,)),
    "autocast": (lambda: Function(_autocast, **linear("a", "b")), (x,)),
    "writes": (lambda: Function(_in_place, **linear("a", "b")), (x,)),
    "an autograd function": (lambda: Function(lambda s, x: Doubled.apply(s.a(x)), **linear("a")), (x,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), (x,)),
    "batch norm in blocks": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))),
        (x,),
    ),
    "batch norm in evaluation mode": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).eval(), (x,)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2)),
        (torch.randn(2, 2, 8, 8),),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 5, 8),)),
    "an RNN": (lambda: Function(lambda s, x: s.r(x)[0], r=nn.LSTM(8, 4)), (torch.randn(5, 2, 8),)),
    "a constant": (lambda: Function(lambda s, x: s.a(x) * torch.tensor([2.0] * 8), **linear("a")), (x,)),
    "an expanded gradient": (lambda: Function(lambda s, x: s.p.sum() * x.sum() + x), (x,)),
    "an output that is no tensor": (lambda: Function(lambda s, x: (s.a(x), None), **linear("a")), (x,)),
}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    make_stage, inputs = STAGES[name]
    stage = make_stage()
    if name in ("a gradient that is the output's", "an expanded gradient"):
        stage.p = nn.Parameter(torch.randn(4, 8))
    return stage, inputs


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("way", ["I W", "B", "no recomputation", "recomputed blocks", "no input gradients"])
def test_as_autograd(name: str, way: str) -> None:
    stage, inputs = build(name)
    recompute = {"no recomputation": "none", "recomputed blocks": "block"}.get(way, "min-cut")
    wanted = [False] * len(inputs) if way == "no input gradients" else None
    if (name, way) == ("an RNN", "no input gradients"):
        pytest.skip("left to autograd")
    assert_as_autograd(stage, inputs, recompute=recompute, divided=way != "B", wanted=wanted)


def test_equal_layers_are_one_block_and_layers_that_differ_are_not() -> None:
    blocks = [len(kernels_of(name).variants[-1].divided.blocks) for name in BLOCKS]
    assert dict(zip(BLOCKS, blocks, strict=True)) == BLOCKS


def test_the_gradient_of_a_convolutions_weight_waits_for_w() -> None:
    derivative = kernels_of("convolutions").variants[-1].divided
    backward = derivative.backward(derivative.full_mask)
    for part, wanted in ((backward.input, [True, False]), (backward.weight, [False, True])):
        assert part is not None
        masks = [list(node.args[-1][:2]) for node in part.module.graph.nodes if "convolution_back" in str(node.target)]
        assert masks == [wanted] * 2


BLOCKS = {
    "layers": 1,
    "one layer": 0,
    "layers that differ": 0,
    "a layer called again": 1,
    "batch norm in blocks": 1,
    "frozen": 1,
}


def kernels_of(name: str) -> Any:
    stage, inputs = build(name)
    return assert_as_autograd(stage, inputs)


def test_a_stage_of_more_layers_has_no_more_kernels() -> None:
    counts = []
    for layers in (3, 12):
        kernels = assert_as_autograd(Layers(layers), (x,))
        (variant,) = kernels.variants
        programs = variant._programs.values()
        counts.append(len({id(kernel) for program in programs for kernel in program.kernels()}))
    assert counts[0] == counts[1]


def test_the_modes_of_modules_reach_the_kernels_and_are_traced_once() -> None:
    stage = Layers(p=0.5)
    kernels = make("eager", stage, (True,), (True,))
    for _ in range(2):
        stage.eval()
        kernels.begin()
        assert_close(kernels.forward((x,)).outputs[0], stage(x).detach())
        stage.layers[1].dropout.train()
        kernels.begin()
        first, second = (kernels.forward((x,), differentiable=False).outputs[0] for _ in range(2))
        assert not torch.equal(first, second)
    assert len(kernels.variants) == 2


def test_dropout_differs_between_microbatches_and_layers_and_is_the_same_in_backward() -> None:
    stage = nn.Sequential(*(nn.Sequential(nn.Identity(), Scaled(), nn.Dropout(0.5)) for _ in range(2)))
    kernels = make("eager", stage, (True,), (True,))
    ones = torch.ones(64, 8)
    masks = []
    for _ in range(2):
        forward = kernels.forward((ones,))
        mask = forward.outputs[0]
        (gradient,) = kernels.input_backward(forward.saved, (ones,))
        assert_close(gradient, mask)
        masks.append(mask)
    assert not torch.equal(*masks)
    assert 0.1 < (masks[0] != 0).float().mean() < 0.4  # two masks of a half


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_freezing_is_seen() -> None:
    stage = Layers()
    kernels = make("eager", stage, (True,), (True,))
    for trainable in (True, False, True):
        stage.zero_grad()
        stage.head.requires_grad_(trainable)
        kernels.begin()
        kernels.backward(kernels.forward((x,)).saved, (torch.ones(4, 4),))
        assert (stage.head.weight.grad is not None) is trainable
        assert stage.layers[0].up.weight.grad is not None


def test_a_gradient_that_does_not_come() -> None:
    stage = Function(lambda s, x: (s.a(x), s.b(x)), **linear("a", "b"))
    for given in ((True, False), (False, True)):
        for divided in (True, False):
            assert_as_autograd(copy.deepcopy(stage), (x,), given=given, divided=divided)


def test_a_gradient_that_does_not_come_to_a_block() -> None:
    stage = Function(lambda s, x: s.b(s.a(x)[0])[1], a=Two(), b=Two())
    assert_as_autograd(stage, (x,))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def test_the_first_gradient_of_a_parameter_becomes_its_grad_and_owns_its_memory() -> None:
    stage, _ = build("a gradient that is the output's")
    kernels = make("eager", stage, (True,), (True,))
    gradient = torch.ones(4, 8)
    (of_input,) = kernels.input_backward(saved := kernels.forward((x,)).saved, (gradient,))
    kernels.weight_backward(saved)
    stage.p.grad.add_(1)
    assert_close(gradient, torch.ones(4, 8))
    assert_close(of_input, torch.ones(4, 8))


@pytest.mark.parametrize("recompute", ["none", "min-cut", "block"])
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


def test_the_loss_is_a_segment() -> None:
    stage = Layers()
    kernels = make("eager", stage, (True,), (True,), lambda outputs, target: F.cross_entropy(outputs[0], target["y"]))
    target = {"y": torch.tensor([0, 1, 2, 3])}
    forward = kernels.forward((x,), target=target, with_loss=True)
    leaf = x.clone().requires_grad_()
    loss = F.cross_entropy(stage(leaf), target["y"])
    assert_close(forward.loss, loss.detach())
    expected = torch.autograd.grad(loss / 2, [leaf, *stage.parameters()])
    (found,) = kernels.input_backward(forward.saved, (None, torch.tensor(0.5)))
    kernels.weight_backward(forward.saved)
    assert_close([found, *(parameter.grad for parameter in stage.parameters())], list(expected))
    assert kernels.forward((x,)).loss is None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, target: outputs[0], "returned a tensor of shape"),
        (lambda outputs, target: outputs[0].detach().sum(), "without a gradient"),
        (None, "give Pipeline a loss_fn"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(PipegraphError, match=message):
        make("eager", Layers(), (True,), (True,), loss).forward((x,), target=None, with_loss=True)


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    with pytest.raises(PipegraphError, match="output 0 of the stage needs a gradient"):
        make("eager", nn.Linear(8, 3), (False,), (False,)).forward((x,))


@pytest.mark.parametrize("divided", [True, False])
def test_a_stage_that_cannot_be_traced_is_left_to_autograd(divided: bool) -> None:
    stage = Function(lambda s, x: s.a(x) * float(x.sum()), **linear("a"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_as_autograd(stage, (x,), divided=divided, traced=False)
    assert len([each for each in caught if "Function cannot be traced" in str(each.message)]) == 1


def test_a_hook_of_a_parameter_is_called() -> None:
    stage = Layers()
    stage.head.bias.register_hook(lambda gradient: gradient * 2)
    kernels = make("eager", stage, (True,), (True,))
    with pytest.warns(UserWarning, match="has a hook"):
        forward = kernels.forward((x,))
    kernels.backward(forward.saved, (torch.ones(4, 4),))
    assert_close(stage.head.bias.grad, torch.full((4,), 8.0))


def test_autocast_around_a_step() -> None:
    stage = Function(lambda s, x: s.b(s.a(x)), **linear("a", "b"))
    reference = copy.deepcopy(stage)
    kernels, plain = make("eager", stage, (True,), (True,)), make("autograd", reference, (True,), (True,))
    with torch.autocast("cpu", torch.bfloat16):
        first, second = kernels.forward((x,)), plain.forward((x,))
    assert first.outputs[0].dtype == torch.bfloat16
    assert_close(first.outputs, second.outputs)
    gradient = (torch.ones(4, 8, dtype=torch.bfloat16),)
    assert_close(kernels.backward(first.saved, gradient), plain.backward(second.saved, gradient))
    assert_close(stage.a.weight.grad, reference.a.weight.grad)
    assert kernels.forward((x,)).outputs[0].dtype == torch.float32


def test_evaluation_without_gradients() -> None:
    stage = Layers()
    forward = make("eager", stage, (True,), (True,)).forward((x,), differentiable=False)
    assert forward.saved is None
    assert_close(forward.outputs[0], stage(x).detach())


@pytest.mark.parametrize(
    "name",
    ["layers", "dropout", "convolutions", "batch norm", "views of one value", "integers", "an expanded gradient"],
)
def test_inductor(name: str) -> None:
    stage, inputs = build(name)
    if name == "dropout":
        stage.eval()
    assert_as_autograd(stage, inputs, kernels="inductor")


def test_without_a_compiler_for_cpp_graphs_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "compiler_is_missing", lambda: "none found")
    compilers.compiler.cache_clear()
    with pytest.warns(UserWarning, match=r"needs a C\+\+ compiler.*none found"):
        assert_as_autograd(Layers(), (x,), kernels="inductor")
    compilers.compiler.cache_clear()


def test_a_graph_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: Any) -> Any:
        raise AssertionError("not today")

    monkeypatch.setattr(internals, "_compile_graph", fail)
    compilers.compiler.cache_clear()
    with pytest.warns(UserWarning, match="cannot compile a part of a stage.*AssertionError: not today"):
        assert_as_autograd(Layers(), (x,), kernels="inductor")
    compilers.compiler.cache_clear()


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
    with pytest.raises(PipegraphError, match='recompute cannot be "mincut"'):
        make("eager", Layers(), (True,), (True,), recompute="mincut")


class Checkpointed(nn.Module):
    """A layer that the backward computes again, by torch's own way to do that."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_layers_in_a_checkpoint() -> None:
    assert_as_autograd(nn.Sequential(*(Checkpointed(Layer()) for _ in range(3))), (x,))


@pytest.mark.parametrize("layers", [1, 2])
def test_dropout_in_a_checkpoint_has_the_same_mask_in_the_backward(layers: int) -> None:
    stage = nn.Sequential(*(Checkpointed(Layer(0.5)) for _ in range(layers))).double()
    kernels = make("eager", stage, (True,), (True,))
    given, gradient, direction = torch.randn(3, 4, 8, dtype=torch.float64).unbind()

    def at(step: float) -> Any:
        torch.manual_seed(0)
        return kernels.forward((given + step * direction,))

    with pytest.warns(UserWarning, match="random numbers"):
        saved = at(0).saved
    (found,) = kernels.backward(saved, (gradient,))
    slope = sum(sign * (at(sign * 1e-6).outputs[0] * gradient).sum() for sign in (1, -1)) / 2e-6
    assert_close((found * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_a_gradient_has_the_strides_of_its_parameter() -> None:
    stage = Function(lambda s, x: torch.einsum("bi,oi->bo", x @ s.a.weight, s.b.weight), **linear("a", "b"))
    stage.a.weight = nn.Parameter(torch.randn(8, 8).t())
    assert_as_autograd(stage, (x,))
    assert [s.weight.grad.stride() for s in (stage.a, stage.b)] == [s.weight.stride() for s in (stage.a, stage.b)]


def test_a_sparse_gradient() -> None:
    stage = nn.Embedding(5, 8, sparse=True)
    kernels = make("eager", stage, (False,), (True,))
    for _ in range(2):
        kernels.backward(kernels.forward((tokens,)).saved, (torch.ones(4, 8),))
    assert stage.weight.grad.is_sparse
    assert_close(stage.weight.grad.to_dense()[tokens[0]], torch.full((8,), 2.0 * (tokens == tokens[0]).sum()))


class Factor(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.factor


def test_stages_that_are_made_apart_share_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first = assert_as_autograd(nn.Sequential(Factor(), Factor()), (x,))
    monkeypatch.setattr(Factor, "factor", 2.0)
    second = assert_as_autograd(nn.Sequential(Factor(), Factor()), (x,))
    assert first is not second


def test_stages_that_are_made_together_share_blocks() -> None:
    make_stage = maker("eager")
    stages = [make_stage(Layers(), (True,), (True,), None) for _ in range(2)]
    for kernels in stages:
        kernels.forward((x,))
    (left,), (right,) = ([variant.divided.blocks for variant in each.variants] for each in stages)
    assert left == right and len(left) == 1


def test_a_block_that_cannot_be_traced_is_a_part_of_what_is_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: Any, options: Any) -> Any:
        raise RuntimeError("not by itself")

    monkeypatch.setattr(differentiate, "block_of", fail)
    kernels = assert_as_autograd(Layers(), (x,))
    (variant,) = kernels.variants
    assert not variant.divided.blocks


def test_a_closure_that_refers_to_itself() -> None:
    def made() -> Callable[[Any, Tensor], Tensor]:
        def again(stage: Any, x: Tensor, times: int = 2) -> Tensor:
            return again(stage, stage.a(x), times - 1) if times else x

        return again

    stage = nn.Sequential(*(Function(made(), **linear("a")) for _ in range(2)))
    assert len(assert_as_autograd(stage, (x,)).variants[-1].divided.blocks) == 1
