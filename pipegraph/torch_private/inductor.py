"""Inductor: compiling a graph."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import fx

from pipegraph.torch_private.tracing import TORCH_LOCK, Run


def inductor_decompositions() -> Mapping[Any, Any]:
    """Return what Inductor wants operations to be made of, before it gets a graph."""
    import_module("torch._inductor.lowering")  # some decompositions need it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Any] = select_decomp_table()
    return table


def compile_graph(module: fx.GraphModule) -> Run:
    """Compile a functional graph of ATen operations with Inductor, which gets a copy.

    `torch._inductor.compile`, the public way, wraps each call in AOTAutograd's run-time checks, which cost more than
    some of the kernels. Outputs have the strides that the graph says: other graphs are compiled for them.

    For a graph with symbols Inductor is to choose what suits all sizes, where it would otherwise choose by those at
    hand, on the condition of sizes like these: how a long sum is added up, for example. If it cannot, it may. Its cache
    is not used: with a graph of another trace it returns that trace's conditions. Compiled C++ and Triton is.
    """
    from torch._inductor import config
    from torch.fx.experimental import _config

    examples = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    if any(isinstance(example, torch.SymInt) for example in examples):
        with TORCH_LOCK, config.patch(fx_graph_cache=False):
            try:
                with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                    return _compiled(_copied(module), examples)
            except Exception:  # whatever Inductor raises on a choice that it cannot leave open
                return _compiled(_copied(module), examples)
    return _compiled(_copied(module), examples)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def cache_folder() -> str:
    """Return the folder in which Inductor keeps what it compiled. Public torch has only the variable that sets it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def keep_folders() -> None:
    """Keep Inductor's folders in their place when this process's temporary folder changes.

    By default all are in the temporary folder. An environment variable sets the folder of kernels. Only a function
    gives the folder of compiled headers, which take five seconds.
    """
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_folder()
    default = cache_dir_utils.default_cache_dir()
    for module in cache_dir_utils, runtime_utils:
        module.default_cache_dir = lambda: default  # type: ignore[attr-defined]


def _compiled(module: fx.GraphModule, examples: list[Any]) -> Run:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None) or FakeTensorMode()
    with ExitStack() as stack:
        stack.enter_context(TORCH_LOCK)
        stack.enter_context(_with_environment(mode))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(_with_joint_passes())
        stack.enter_context(_with_layouts_as_traced(examples))
        # Inductor's cache tells graphs apart by their operations and inputs, and here the strides of outputs count too.
        tag = f"{torch.compiler.config.cache_key_tag} pipegraph {_mark_outputs(module)}"
        stack.enter_context(torch.compiler.config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        compiled: Run = compile_fx_inner(module, examples, is_inference=True)
    return compiled


def _with_layouts_as_traced(examples: list[Any]) -> Any:
    """Let convolutions on a CPU compute in the layout in which the graph was traced.

    Inductor would have channels innermost in all of them, public torch has no say in that. But what a graph reads and
    returns, the saved values too, is laid out as it was traced, so that all would be copied, and sums over the pixels
    of a channel would read one here and there.
    """
    from torch._inductor import config

    on_cpu = all(example.device.type == "cpu" for example in examples if isinstance(example, torch.Tensor))
    return config.patch(layout_optimization=config.layout_optimization and not on_cpu)


def _mark_outputs(module: fx.GraphModule) -> list[Any]:
    """Tell Inductor that all outputs are to have the strides that the graph says. Return them."""
    (output,) = module.graph.find_nodes(op="output")
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    values = [node.meta.get("val") for node in output.args[0] if isinstance(node, fx.Node)]
    return [tuple(value.stride()) for value in values if isinstance(value, torch.Tensor)]


@contextmanager
def _with_environment(mode: Any) -> Iterator[None]:
    """Let the mode of a graph without symbols have an environment for them: without one Inductor looks for no graph in
    its cache. While a graph is traced it has none, so that no number that depends on data becomes a symbol."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    previous_environment = mode.shape_env
    mode.shape_env = ShapeEnv() if previous_environment is None else previous_environment
    try:
        yield
    finally:
        mode.shape_env = previous_environment


@contextmanager
def _with_joint_passes() -> Iterator[None]:
    """Let Inductor simplify a graph first, as AOTAutograd has it do, if the graph is not in the cache.

    The passes take as long as all else that a graph from the cache takes. What is simplified there is looked up as it
    was before. Only this function of the module lies between looking up and compiling.
    """
    from torch._inductor import compile_fx

    thread = threading.get_ident()
    original = compile_fx.fx_codegen_and_compile

    def simplify_and_compile(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            module = compile_fx._recursive_joint_graph_passes(module)
            _mark_outputs(module)
        return original(module, *args, **kwargs)

    compile_fx.fx_codegen_and_compile = simplify_and_compile  # type: ignore[assignment]
    try:
        yield
    finally:
        compile_fx.fx_codegen_and_compile = original
