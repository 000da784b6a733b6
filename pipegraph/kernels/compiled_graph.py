"""A graph of operations, and how it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from pipegraph.kernels import internals
from pipegraph.kernels.graphs.joint_graph import constant_of
from pipegraph.kernels.graphs.size_nodes import is_size
from pipegraph.kernels.internals import Run
from pipegraph.kernels.symbolic.symbolic_sizes import Numbers, SymbolicSizes, dimensions


class CompiledGraph:
    """A graph, and once it is compiled how it runs. Its placeholders are the sizes, then the tensors.

    Attributes:
        module: the graph.
        run: None until it is compiled.
    """

    def __init__(self, module: fx.GraphModule, sizes: SymbolicSizes) -> None:
        self.module = module
        self.run: Run | None = None
        self._sizes = sizes
        self._uncompiled: Run | None = None

    def __call__(self, numbers: Numbers, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Run, with these sizes. Empties `inputs`."""
        run = self.run
        if numbers:
            inputs[:0] = numbers  # type: ignore[assignment]
            if not self._sizes.hold(numbers):
                run = self._as_it_is()
        assert run is not None
        return run(inputs)

    def _as_it_is(self) -> Run:
        """The graph uncompiled, which is right for all sizes that it was traced for.

        Compiling I or W may add a condition on sizes that microbatches in flight do not meet, after their F. In the
        next step their sizes have another variant.
        """
        if self._uncompiled is None:
            self._uncompiled = internals.boxed(self.module)
        return self._uncompiled


def graph_key(module: fx.GraphModule, sizes: SymbolicSizes) -> object:
    """Return a key that is equal for equal graphs: operations, their arguments, the inputs' shapes, which constants.

    Graphs with symbols of different traces are never equal: other conditions may hold for their sizes.
    """
    number: dict[fx.Node, int] = {}
    lines: list[object] = [id(sizes.environment)]
    for node in module.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder" and is_size(node):
            lines.append("size")
        elif node.op == "placeholder":
            value = node.meta["val"]
            lines.append((dimensions(value.shape), dimensions(value.stride()), value.dtype, value.device))
        elif node.op == "get_attr":
            lines.append(("constant", id(constant_of(module, node))))
        else:
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{number[each]}")
            lines.append((str(node.target), repr(arguments)))
    return tuple(lines)
