"""Consecutive operations of a graph as a separate module, to trace and to run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipegraph.graph.captured import Captured, by_mode, in_training, runs_in_training
from pipegraph.graph.custom_functions import callable_of
from pipegraph.graph.index_bounds import index_bound
from pipegraph.kernels.graphs.regions import placed


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Operations of a captured model, in a row.

    Attributes:
        inputs: the values that they read and do not make, in the order in which they are read.
        state: the ``get_attr`` nodes that they read, likewise.
        outputs: the values that are read further on, or returned; for the model's last piece, what the model returns.
        last: whether the model ends here, so that a loss may follow.
    """

    captured: Captured = field(repr=False)
    nodes: tuple[fx.Node, ...] = field(repr=False)
    inputs: tuple[fx.Node, ...]
    state: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    last: bool

    @property
    def input_gradients(self) -> tuple[bool, ...]:
        """For each input, whether its gradient is wanted."""
        return tuple(node.op == "call_function" and bool(node.meta["requires_grad"]) for node in self.inputs)

    @property
    def output_gradients(self) -> tuple[bool, ...]:
        """For each output, whether a gradient comes back for it."""
        return tuple(bool(node.meta["requires_grad"]) for node in self.outputs)

    @cached_property
    def key(self) -> str:
        """A hash that pieces of equal structure share, in every process: operations and their arguments, shapes,
        strides and dtypes of what goes in, which gradients are wanted; no names and no values."""
        number: dict[fx.Node, str] = {}
        lines = []
        for node, needs_gradient in zip(self.inputs, self.input_gradients, strict=True):
            number[node] = f"%{len(number)}"
            lines.append(f"input {_form(node)} {needs_gradient}")
        for node in self.state:
            number[node] = f"%{len(number)}"
            entry = self.captured.state[str(node.target)]
            lines.append(f"{entry.kind} {_form(node)} {entry.requires_grad}")
        for node in self.nodes:
            number[node] = f"%{len(number)}"
            arguments = fx.map_arg((node.args, node.kwargs), lambda argument: _Name(number[in_training(argument)]))
            lines.append(f"{node.target} {arguments} {node.meta['regions']}")
        gradients = zip(self.outputs, self.output_gradients, strict=True)
        lines += [f"output {number[node]} {has_gradient}" for node, has_gradient in gradients]
        lines.append(f"last {self.last}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Name(str):
    """A value's number, printed without quotes."""

    __repr__ = str.__str__


def _form(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"


def subgraph_of(captured: Captured, nodes: Sequence[fx.Node]) -> Subgraph:
    """Return the subgraph of ``nodes``, which follow one another in ``captured.nodes``, as training mode runs them."""
    last = bool(nodes) and nodes[-1] is captured.nodes[-1]
    members = set(nodes)
    operations = [node for node in nodes if node.target is not by_mode and runs_in_training(node)]
    read = [in_training(parent) for node in operations for parent in node.all_input_nodes]
    read_outside = {in_training(node) for node in nodes if any(user not in members for user in node.users)}
    outputs = (
        list(map(in_training, captured.returned)) if last else [node for node in operations if node in read_outside]
    )
    required_nodes = dict.fromkeys([*read, *(outputs if last else ())])
    return Subgraph(
        captured=captured,
        nodes=tuple(operations),
        inputs=tuple(node for node in required_nodes if node not in members and node.op != "get_attr"),
        state=tuple(node for node in required_nodes if node.op == "get_attr"),
        outputs=tuple(outputs),
        last=last,
    )


def fx_graph(subgraph: Subgraph) -> fx.GraphModule:
    """The operations of a piece as a graph whose placeholders are its inputs and state."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in (*subgraph.inputs, *subgraph.state):
        values[node] = graph.placeholder(f"input_{len(values)}")
        values[node].meta = dict(node.meta)
    for node in subgraph.nodes:
        values[node] = graph.node_copy(node, lambda argument: values[in_training(argument)])
        values[node].target = callable_of(node.target)
    graph.output(tuple(values[node] for node in subgraph.outputs))
    return fx.GraphModule(nn.Module(), graph)


class SubgraphModule(nn.Module):
    """Run a subgraph on its own state tensors: ``state``, in the order of ``Subgraph.state``.

    ``no_grad`` and ``autocast`` blocks of the model are entered as the model does; tensors that the model makes on the
    device it was captured on are made on ``device``. ``instead`` maps operations to functions that replace them. In a
    graph traced from this module, the place of an operation is its position in ``Subgraph.nodes``.
    """

    def __init__(
        self,
        subgraph: Subgraph,
        state: Sequence[Tensor],
        device: torch.device | None = None,
        instead: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        for index, (node, tensor) in enumerate(zip(subgraph.state, state, strict=True)):
            entry = subgraph.captured.state[str(node.target)]
            if entry.kind == "parameter":
                self.register_parameter(f"state_{index}", nn.Parameter(tensor, requires_grad=entry.requires_grad))
            else:
                self.register_buffer(f"state_{index}", tensor)
        self._piece = subgraph
        self._device = device
        self._instead = instead or {}
        numbered = groupby(enumerate(subgraph.nodes), key=lambda item: item[1].meta["regions"])
        self._runs = [(key, list(nodes)) for key, nodes in numbered]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[fx.Node, Any] = dict(zip(self._piece.inputs, inputs, strict=True))
        for index, node in enumerate(self._piece.state):
            values[node] = getattr(self, f"state_{index}")
        for regions, nodes in self._runs:
            with _entered(regions):
                for position, node in nodes:
                    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: values[in_training(value)])
                    if self._device is not None and isinstance(kwargs.get("device"), torch.device):
                        kwargs = {**kwargs, "device": self._device}
                    function: Any = self._instead.get(node.target, callable_of(node.target))
                    with placed(position):
                        values[node] = function(*args, **kwargs)
        return tuple(values[node] for node in self._piece.outputs)


@contextmanager
def _entered(regions: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, settings in regions:
            stack.enter_context(torch.set_grad_enabled(*settings) if kind == "grad" else torch.autocast(*settings))
        yield


def empty_like_value(value: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor with the shape, strides and dtype of ``value``; contiguous where elements of ``value`` overlap."""
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
    where = device or value.device
    if overlaps:
        return torch.empty(value.shape, dtype=value.dtype, device=where)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=where)


def random_input(node: fx.Node, device: torch.device, generator: torch.Generator) -> Tensor:
    """A value to run on: normal floats, integers below the bound of what they index."""
    tensor = empty_like_value(node.meta["val"], device)
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))
    bound = 2 if tensor.dtype == torch.bool else index_bound(node) or 2
    return tensor.copy_(torch.randint(bound, tensor.shape, generator=generator, device=device))


def random_state(captured: Captured, node: fx.Node, device: torch.device, generator: torch.Generator) -> Tensor:
    """A parameter as it would be initialised; a buffer or constant keeps its values, if it has any.

    Values are of a size that keeps activations normal: how long some kernels take depends on how many are negative.
    """
    entry, captured_tensor = captured.state[str(node.target)], captured.tensors[str(node.target)]
    tensor = empty_like_value(node.meta["val"], device)
    if entry.kind != "parameter" and captured_tensor.device.type != "meta":
        return tensor.copy_(captured_tensor)
    if not tensor.is_floating_point() or entry.fqn.endswith("bias"):
        return tensor.zero_()
    if tensor.dim() < 2:
        return tensor.fill_(1)
    inputs = max(1, tensor[0].numel())
    return tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device).mul_(inputs**-0.5))
