"""The min-cut partitioner of AOTAutograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from pipegraph.torch_private.operators import is_collective


def graph_so_far() -> fx.Graph | None:
    """Return the graph that `trace` has made until now, or None if nothing is traced. Public torch gives a graph only
    once it is done."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    graph: fx.Graph | None = None if mode is None else mode.tracer.graph
    return graph


@contextmanager
def outside_traces() -> Iterator[None]:
    """Let no `trace` that runs record what is done inside. Modes are left by a private function alone."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Do equal computations once, as AOTAutograd does before it partitions a graph.

    Random ones stay, and so do collectives: two that are equal here may differ on a rank with a smaller shard, which
    would then wait for the other for ever. Each gets its number as one more argument for as long as this looks.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    for number, node in enumerate(filter(is_collective, graph.nodes)):
        node.args = (*node.args, number)
    simplified: fx.Graph = fx_graph_cse(graph)
    for node in filter(is_collective, simplified.nodes):
        node.args = node.args[:-1]
    return simplified


def min_cut(module: fx.GraphModule, outputs: int) -> set[str]:
    """Return the names of the values that torch's partitioner would keep from forward to backward.

    There is no public partitioner. Its graphs are not used: they are divided here.

    Args:
        module: its placeholders are called primals_… and tangents_….
        outputs: how many of its outputs, the first ones, are the forward's.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, _ = min_cut_rematerialization_partition(module, (), num_fwd_outputs=outputs)
    (output,) = forward.graph.find_nodes(op="output")
    return {node.name for node in output.args[0][outputs:] if isinstance(node, fx.Node)}
