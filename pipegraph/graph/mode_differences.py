"""The differences between the graphs of a model in two modes, settled so that each is a branch of one ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import fx

from pipegraph.graph.aliasing import written_by
from pipegraph.graph.calls import argument_place, is_within
from pipegraph.graph.nodes import path_of, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.operators import OpOverload

aten = torch.ops.aten

_Path = tuple[tuple[str, str], ...]


class OtherGraphError(Exception):
    """The two graphs differ by more than branches inside one ``forward``.

    Attributes:
        node: the first operation that is in one graph only.
    """

    def __init__(self, node: fx.Node) -> None:
        super().__init__(source_line(node))
        self.node = node


@dataclass(eq=False)
class ModeDifference:
    """Operations of one call that one mode runs and the other does not.

    Attributes:
        anchor: the operation of the training graph before which it lies.
        path: of the call.
        training, evaluation: its operations.
        phis: (value in training mode, value in evaluation mode) that is read after it → each reader, and the
            position among its inputs. A value of evaluation mode that is made in a branch is a node of the other graph.
        runs_in_both: whether both modes run its operations nevertheless, because no branch can hold them.
    """

    anchor: fx.Node
    path: _Path
    training: list[fx.Node]
    evaluation: list[fx.Node]
    phis: dict[tuple[fx.Node, fx.Node], list[tuple[fx.Node, int | None]]] = field(default_factory=dict)
    runs_in_both: bool = False


class ModeDifferences:
    """Differences, and the values that two graphs have in common.

    Args:
        graph: that of training mode.
        is_own: whether the model itself runs an operation, and no layer that follows its mode.
    """

    def __init__(self, graph: fx.Graph, is_own: Callable[[fx.Node], bool]) -> None:
        self._position = {node: number for number, node in enumerate(graph.nodes)}
        self._is_own = is_own
        self._value: dict[fx.Node, fx.Node] = {}  # of evaluation mode → of training mode
        self.differences: list[ModeDifference] = []
        self._difference_of: dict[fx.Node, ModeDifference] = {}
        self._choices: set[ModeDifference] = set()

    def pair(self, twin: fx.Node, node: fx.Node) -> None:
        """Note that a value of evaluation mode is one of training mode."""
        self._value[twin] = node

    def add(self, branch: ModeDifference) -> None:
        self.differences.append(branch)
        self._difference_of |= dict.fromkeys((*branch.training, *branch.evaluation), branch)
        self._value |= {node: node for node in branch.evaluation}

    def compare(self, reader: fx.Node, position: int | None, value: fx.Node, twin: fx.Node) -> None:
        """Note that a reader gets other values in the two modes, if it does."""
        twin_value = self.value_of(twin)
        if self.effective(value) is not self.effective(twin_value):
            self._join(reader, position, value, twin_value)

    def _join(self, reader: fx.Node, position: int | None, value: fx.Node, twin_value: fx.Node) -> None:
        ends = [self._difference_of[node] for node in (value, twin_value) if node in self._difference_of]
        branch = max(ends, key=self.differences.index) if ends else self._choice(reader, value, twin_value)
        branch.phis.setdefault((value, twin_value), []).append((reader, position))

    def _choice(self, reader: fx.Node, value: fx.Node, twin_value: fx.Node) -> ModeDifference:
        """A branch that runs nothing, and chooses between two values that both modes make."""
        path = _choice_path(reader, value, twin_value)
        branch = ModeDifference(_beginning(reader, len(path)), path, [], [])
        self.add(branch)
        self._choices.add(branch)
        return branch

    def value_of(self, twin: fx.Node) -> fx.Node:
        """The value of training mode that one of evaluation mode is; itself if training mode does not make it."""
        if twin not in self._value:
            twin = self.effective(twin)
        if twin not in self._value:
            raise OtherGraphError(twin)
        return self._value[twin]

    def effective(self, node: fx.Node) -> fx.Node:
        """The value of which operations give nothing else in evaluation mode, or the buffer that they write into."""
        buffer = written_value(node)
        if buffer.op == "get_attr":
            return buffer
        while node.op == "call_function" and is_transparent(node) and node not in self._difference_of:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
        return node

    def run_in_both(self, node: fx.Node) -> None:
        """Let both modes run what a value is made from, if a branch makes it.

        Raises:
            OtherGraphError: that writes, or evaluation mode draws random numbers for it.
        """
        branch = self._difference_of.get(node)
        if branch is None:
            return
        sources = _source_operations(node, branch)
        for operation in sources:
            draws = operation in branch.evaluation and not is_transparent(operation) and _draws(operation)
            if self._is_own(operation) and ("writes" in operation.meta or draws):
                raise OtherGraphError(operation)
            del self._difference_of[operation]
        (common_training, training), (common_evaluation, evaluation) = (
            ([member for member in side if member in sources], [member for member in side if member not in sources])
            for side in (branch.training, branch.evaluation)
        )
        branch.training, branch.evaluation = training, evaluation
        common = ModeDifference(branch.anchor, branch.path, common_training, common_evaluation, runs_in_both=True)
        self.differences.insert(self.differences.index(branch), common)

    def settle(self) -> None:
        """Let both modes run what no branch can hold. Raises OtherGraphError for what both cannot run."""
        while any(self._changes(branch) for branch in list(self.differences)):
            pass

    def _changes(self, branch: ModeDifference) -> bool:
        """Fix the first thing that a branch cannot have; return whether there is one."""
        node = self._read_too_far(branch)
        if node is not None:
            self.run_in_both(node)
            return True
        for (value, twin_value), readers in branch.phis.items():
            if not same_form(value, twin_value):
                raise OtherGraphError(twin_value if twin_value in self._difference_of else value)
            foreign = [side for side in (value, twin_value) if self._difference_of.get(side, branch) is not branch]
            outer_values = [side for side in (value, twin_value) if self._difference_of.get(side) is not branch]
            late = any(self._position.get(side, -1) >= self._position[branch.anchor] for side in outer_values)
            if foreign:
                self.run_in_both(foreign[0])
                return True
            if late:
                if branch in self._choices:
                    raise OtherGraphError(value)
                del branch.phis[value, twin_value]
                self.run_in_both(value)
                self.run_in_both(twin_value)
                choice = self._choice(readers[0][0], value, twin_value)
                choice.phis[value, twin_value] = readers
                return True
        return False

    def _read_too_far(self, branch: ModeDifference) -> fx.Node | None:
        """A value that a branch reads from another one, after which it is not known; or that a dropout reads."""
        for node in (*branch.training, *branch.evaluation):
            if "writes" in node.meta and node in branch.evaluation:
                raise OtherGraphError(node)
            for parent in node.all_input_nodes:
                value = parent if node in branch.training else self.value_of(parent)
                source = self._difference_of.get(value, branch)
                if source is not branch and not self._is_joined(value, source, branch):
                    return value
        for node in [] if branch.runs_in_both else branch.training:
            for reader in node.users:
                if is_transparent(reader) and self._difference_of.get(reader) is not branch:
                    return node
        return None

    def _is_joined(self, value: fx.Node, source: ModeDifference, reader: ModeDifference) -> bool:
        """Return whether a value of a branch is known after it, where another branch reads it."""
        is_earlier = self._position[source.anchor] <= self._position[reader.anchor]
        return is_earlier and any(value in phi for phi in source.phis)


def is_transparent(node: fx.Node) -> bool:
    """Return whether an operation may be left out of evaluation mode.

    Such are a dropout that follows the mode, and ``contiguous()`` of an attention: the kernel of a mode may leave
    nothing to rearrange.
    """
    if node.target is aten.contiguous.default:
        source = node.args[0]
        while isinstance(source, fx.Node) and operator_of(source).view is not None:
            source = source.args[0]
        return isinstance(source, fx.Node) and operator_of(source).spelling == "attention"
    return operator_of(node).dropout and not node.meta["in_every_mode"]


def written_value(node: fx.Node) -> fx.Node:
    """The value that a write and the writes before it change, such as a buffer; ``node`` if it is not a write."""
    while "writes" in node.meta:
        node = written_by(node)[0]
    return node


def same_form(node: fx.Node, other_node: fx.Node) -> bool:
    """Return whether two values have the same dtype and sizes."""
    values = node.meta["val"], other_node.meta["val"]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return bool(values[0].dtype == values[1].dtype and tuple(shape_of(node)) == tuple(shape_of(other_node)))


def _source_operations(node: fx.Node, branch: ModeDifference) -> set[fx.Node]:
    """The operations of a branch from which a value is made: whole calls of modules."""
    inside = {*branch.training, *branch.evaluation}
    depth = len(branch.path)
    sources: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in inside and current not in sources:
            sources.add(current)
            call = path_of(current)[depth : depth + 1]
            together = [member for member in inside if call and path_of(member)[depth : depth + 1] == call]
            waiting += [*current.all_input_nodes, *together]
    return sources


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _choice_path(reader: fx.Node, value: fx.Node, twin_value: fx.Node) -> _Path:
    """The innermost call around a reader in which both of two values are known: computed there, an argument of it, or
    state of its module."""
    path = path_of(reader)
    depth = max(_common_depth(path, path_of(node)) for node in (value, twin_value))
    while depth < len(path) and all(_is_known(node, *path[depth]) for node in (value, twin_value)):
        depth += 1
    return path[:depth]


def _is_known(node: fx.Node, call: str, fqn: str) -> bool:
    is_state = node.op == "get_attr" and is_within(str(node.target), fqn)
    return is_state or argument_place(node, call) is not None


def _common_depth(path: Sequence[object], other_path: Sequence[object]) -> int:
    """How many calls two paths have in common."""
    pairs = zip(path, other_path, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _beginning(node: fx.Node, depth: int) -> fx.Node:
    """The first operation of the call, inside ``depth`` others, that an operation ran in; itself if it ran in none."""
    path = path_of(node)[: depth + 1]
    while len(path) > depth and path_of(node.prev)[: depth + 1] == path:
        node = node.prev
    return node
