"""The result of capture: one flat graph of ATen operations, the modules it came from and the state they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pipegraph.errors import one_line
from pipegraph.graph.batch_report import BatchReport
from pipegraph.graph.initialisation import Initialisation
from pipegraph.graph.nodes import path_of
from pipegraph.graph.symbolic_size import SizeLimits
from pipegraph.notebook import draw
from pipegraph.recompute import DEFAULT, Recompute
from pipegraph.torch_private.export import call_name
from pipegraph.units import format_count, format_number_of


@dataclass(frozen=True)
class StateEntry:
    """A parameter, buffer or constant of the model.

    Attributes:
        fqn: its name, as in ``model.state_dict()``.
        kind: ``parameter``, ``buffer``, or ``constant`` for a plain tensor that the model's code holds.
        shape, dtype: of the tensor.
        requires_grad: False for frozen parameters, buffers and constants.
        persistent: whether ``state_dict()`` has it.
        canonical: the first name of the tensor; tied weights share it.
        initialisation: how the model initialises it; None if that is not known.
        follows_model: whether a constant is made in the dtype of the model, ``x.new_tensor([1.0, 2.0])``.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    canonical: str
    initialisation: Initialisation | None = None
    follows_model: bool = False

    @classmethod
    def constant(cls, fqn: str, tensor: torch.Tensor) -> StateEntry:
        """The entry of a plain tensor that the model's code holds."""
        return cls(fqn, "constant", tuple(tensor.shape), tensor.dtype, False, False, fqn)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class GradientHook:
    """A hook of gradients, as text that needs torch alone.

    Attributes:
        owner: the FQN of the parameter or the module that has it.
        method: that registers it: ``register_hook`` and the like.
        name: of the function; empty for a lambda.
        text: of the function.
        tensors: the tensors in the text: name there → FQN, of a parameter or buffer of the model or of a constant.
        libraries: the names of libraries in the text: ``torch``, ``F``, ``nn`` or ``math``.
        line: of the function, in the model's source.
    """

    owner: str
    method: str
    name: str
    text: str
    tensors: Mapping[str, str]
    libraries: frozenset[str]
    line: str

    @property
    def is_of_module(self) -> bool:
        """Whether it is one of the backward of a module."""
        return "backward" in self.method


@dataclass(frozen=True)
class ModuleEntry:
    """A module of the captured model: its name there, its class, its mode, and the line on which its class begins.

    Attributes:
        modes: whether it is in training mode after ``model.train()``, and after ``model.eval()``.
    """

    fqn: str
    class_name: str
    training: bool
    source: str = ""
    modes: tuple[bool, bool] = (True, False)
    module: nn.Module = field(repr=False, default_factory=nn.Module)


class LineStep(NamedTuple):
    """A function went from one line of a file to the next that it ran: from its first line, or to 0 at its end."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class ForwardFunction:
    """A function that does what the ``forward`` of a module does, which hands it the module.

    Attributes:
        function: of the model's source.
        parameter: the parameter that has the module.
        owner: the object whose method it is; None for a function.
    """

    function: FunctionType
    parameter: str
    owner: object = field(repr=False)


@dataclass(frozen=True)
class ExecutedLines:
    """The lines of a model's source that ran while it was captured, in all modes.

    Attributes:
        modules: FQN of a module → the steps of its methods.
        functions: file and first line of any other function → its steps.
        none_variables: FQN of a module → name and line → whether that variable of a method was None whenever the line
            had run.
        forwards: FQN of a module whose ``forward`` hands it to another function → that function.
        constants: file and first line of a function → its arguments that were None, or the same truth, in all calls.
    """

    modules: Mapping[str, frozenset[LineStep]]
    functions: Mapping[tuple[str, int], frozenset[LineStep]]
    none_variables: Mapping[str, Mapping[tuple[str, int], bool]] = field(default_factory=dict)
    forwards: Mapping[str, ForwardFunction] = field(default_factory=dict)
    constants: Mapping[tuple[str, int], Mapping[str, bool | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """Operations ``start`` … ``stop`` − 1 of ``Captured.nodes``, led by a call of the module ``fqn``."""

    fqn: str
    start: int
    stop: int


@dataclass(frozen=True)
class OtherSize:
    """A size of inputs that ``torch.export`` fixes and the model may not fix: the length of a Python loop.

    Attributes:
        name: of the size.
        places: the dimensions that have it: ``tokens.shape[1]``.
        size: in the example.
        lowest: the smallest size with which the model does the same.
        captured_size: in the example of ``captured``.
        captured: the model, captured with that size.
    """

    name: str
    places: tuple[str, ...]
    size: int
    lowest: int
    captured_size: int
    captured: Captured


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as one flat graph.

    The graph holds ``placeholder`` nodes (the model's inputs, flattened), ``get_attr`` nodes (state, by FQN),
    ``call_function`` nodes (ATen operations in the order the model ran them) and one ``output`` node. The metadata of a
    node:

    ========================  ==========================================================================================
    ``val``                   a fake tensor with its shape and dtype, or a tuple of them
    ``kind``                  of state: ``parameter``, ``buffer`` or ``constant``
    ``value``                 of a constant of one element that the model's code makes: the number
    ``path``                  the module calls it ran in, outermost first, as (call, FQN) pairs
    ``regions``               the ``no_grad`` and ``autocast`` blocks around it, outermost first, as (kind, settings)
    ``other_dtype``           the dtype of ``val`` if the model is converted to another dtype; missing if not known
    ``relative_dtype``        whether the operation was given a dtype that follows the model's
    ``requires_grad``         whether a gradient flows through it; ``cut_off``: only a ``no_grad`` block keeps one away
    ``in_every_mode``         whether it drops values in evaluation mode too
    ``branch``                of an operation that only one mode runs: its `BranchPart`
    ``writes``                of an in-place operation: the name of the node that made the memory
    ``stack_trace``           the lines of source that made it
    ``pipe_splits``           the lines of ``torch.distributed.pipelining.pipe_split()`` that the model ran before it
    ``checkpointed``          the module calls that returned it and that the model runs under ``torch.utils.checkpoint``
    ``functions``             the calls of functions of the model's source that it ran in, outermost first
    ``argument_of``           the module calls that took it as an argument; ``result_of``: that returned it
    ========================  ==========================================================================================

    Attributes:
        model_name: class name of the model.
        args, kwargs, outputs: the model's own nesting, with names of graph values (or constants) as leaves.
        evaluation_outputs: what it returns in evaluation mode, if that is not ``outputs``; else None.
        constants: inputs that are not tensors, fixed at capture: name → value.
        state: every parameter, buffer and constant by FQN, in the order of ``state_dict()``.
        tensors: the tensor of each FQN (a parameter may be on the meta device).
        modules: every module by FQN; a module registered twice is under each of its names.
        sizes: the sizes of inputs that vary, and what the graph takes for granted of them.
        training: mode in which the graph was captured.
        not_trained: why the stages refuse training mode, with the line; empty if they do not.
        segments: the chain of repeated layers and their neighbours.
        other_sizes: the fixed sizes with which it was captured again. Source that is the same for both captures is
            right for every size.
        device_branch: what the model does differently on another kind of device than here, with the lines; empty if it
            does the same. The stages do what it does here.
        batch: the roles of the inputs, and what is known of the rows of a batch.
        hooks: of the gradients of parameters, and of the backward of layers.
        lines: the lines of source that ran; None if the model does not run without memory.
    """

    graph: fx.Graph = field(repr=False)
    model_name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    constants: dict[str, Any]
    state: dict[str, StateEntry] = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(repr=False)
    modules: dict[str, ModuleEntry] = field(repr=False)
    sizes: SizeLimits
    training: bool = True
    not_trained: str = ""
    evaluation_outputs: Any = None
    segments: tuple[Segment, ...] = ()
    other_sizes: tuple[OtherSize, ...] = field(default=(), repr=False)
    device_branch: str = ""
    batch: BatchReport = field(default=BatchReport(), repr=False)
    hooks: tuple[GradientHook, ...] = field(default=(), repr=False)
    lines: ExecutedLines | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        weights = (entry for entry in self.state.values() if entry.kind == "parameter" and entry.fqn == entry.canonical)
        parts = [
            format_number_of("segment", len(self.segments)),
            format_count(sum(entry.numel for entry in weights), "parameters"),
            f"sizes {', '.join(self.sizes.captured)}" if self.sizes.captured else "all sizes fixed",
        ]
        return one_line(f"Captured({self.model_name}: {', '.join(parts)})")

    def _repr_html_(self) -> str | None:
        return draw("captured_html", self)

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operations, in the order in which the model ran them; markers left out."""
        return tuple(node for node in self.graph.nodes if node.op == "call_function" and node.target is not split_point)

    @cached_property
    def operations_of(self) -> Mapping[str, int]:
        """Return how many operations each call of a module ran, inner calls included."""
        return Counter(call for node in self.nodes for call, _ in path_of(node))

    @property
    def pipe_splits(self) -> list[tuple[int, str]]:
        """The model's calls of ``torch.distributed.pipelining.pipe_split()``: the position in ``nodes`` of what runs
        after each, and its line of source."""
        splits: dict[int, tuple[int, str]] = {}
        for position, node in enumerate(self.nodes):
            for number, line in enumerate(node.meta.get(PIPE_SPLITS, ())):
                splits.setdefault(number, (position, line))
        return list(splits.values())

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The modules that the model runs under ``torch.utils.checkpoint``, in the order in which it ran them."""
        calls = ((node, call_name(call), fqn) for node in self.nodes for call, fqn in path_of(node))
        return tuple(dict.fromkeys(fqn for node, call, fqn in calls if call in node.meta.get(CHECKPOINTED, ())))

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The model's tensor inputs."""
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def returned(self) -> tuple[fx.Node, ...]:
        """The tensors that the model returns, in order, each once; then those that evaluation mode alone returns."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        return tuple(dict.fromkeys(output.all_input_nodes))

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names of one tensor, each in the order of ``state_dict()``."""
        return tuple(tuple(names) for names in self.names_of.values() if len(names) > 1)

    @cached_property
    def names_of(self) -> Mapping[str, Sequence[str]]:
        """The first name of each tensor, which is the target of its node → all its names, in the same order."""
        names: dict[str, list[str]] = {}
        for entry in self.state.values():
            names.setdefault(entry.canonical, []).append(entry.fqn)
        return names


def own_recompute(captured: Captured) -> Recompute:
    """Return what the model itself computes again: the modules that it runs under ``torch.utils.checkpoint``.

    If these are all that it has in a list, one pattern stands for them.
    """
    rules: dict[str, str] = {}
    for name in captured.checkpointed:
        container, _, number = name.rpartition(".")
        siblings = [
            module_name for module_name in captured.modules if module_name.rpartition(".")[0] == container and container
        ]
        is_whole = number.isdecimal() and {*siblings} <= {*captured.checkpointed}
        rules[f"{container}.*" if is_whole else name] = "block"
    return Recompute.parse(rules or DEFAULT)


def split_point(fqn: str, side: str) -> None:
    """Mark the beginning of a stage on a graph. Computes nothing."""


PIPE_SPLITS = "pipe_splits"
"""Key of a node's metadata: the lines of ``pipe_split()`` that the model ran before it."""

CHECKPOINTED = "checkpointed"
"""Key of a node's metadata: the module calls that returned it under ``torch.utils.checkpoint``."""

VALUE = "value"
"""Key of a node's metadata: the number in a constant of one element that the model's code makes at each call, or the
numbers of a short list of indices."""

STRUCTURE = "structure"
"""Key of the metadata of an ``output`` node: how what the model returns is nested."""

EVALUATION_OUTPUTS = "evaluation_outputs"
"""Key of the metadata of an ``output`` node: what the model returns in evaluation mode, if that is not what it returns
in training mode; the leaves are positions among the node's values."""

BRANCH = "branch"
"""Key of a node's metadata: the `BranchPart` that it is, if one mode runs it and the other does not."""


class BranchPart(NamedTuple):
    """The place of an operation in ``if self.training: … else: …``.

    Attributes:
        number: of the branch.
        training: whether training mode runs it, or evaluation mode; None if it joins results of both.
    """

    number: int
    training: bool | None


def by_mode(training: torch.Tensor, evaluation: torch.Tensor) -> torch.Tensor:
    """Mark the value of a branch: the first in training mode, the second in evaluation mode."""
    return training


def model_dtype(dtype: torch.dtype, other_dtype: torch.dtype) -> torch.dtype:
    """Mark a dtype that is ``dtype`` in the captured model, and ``other_dtype`` in the model in the other dtype."""
    return dtype


def model_number(dtype: torch.dtype, other_dtype: torch.dtype, limit: str) -> float:
    """Mark a number that ``torch.finfo`` says of the model's dtype: ``min`` or ``eps``."""
    return float(getattr(torch.finfo(dtype), limit))


def in_training(node: fx.Node) -> fx.Node:
    """The value that a node has in training mode: of a joined one, that of the branch."""
    while node.target is by_mode:
        value = node.args[0]
        assert isinstance(value, fx.Node)
        node = value
    return node


def runs_in_training(node: fx.Node) -> bool:
    """Return whether training mode runs an operation."""
    part = node.meta.get(BRANCH)
    return part is None or part.training is not False


def plain_containers(tree: Any) -> Any:
    """Turn a nesting into lists, tuples and dicts only: a dataclass or ``ModelOutput`` becomes a dict."""
    if isinstance(tree, Mapping):
        return {str(key): plain_containers(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(map(plain_containers, tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return {entry.name: plain_containers(getattr(tree, entry.name)) for entry in fields(tree)}
    return tree
