"""Every private interface of Inductor that compiling uses: one function each, with the reason.

All were checked with torch 2.11, 2.13 and 2.15. One that a new torch breaks raises, and what it was to compile runs
uncompiled.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pipegraph.kernels.internals import Run


def inductor_decompositions() -> Mapping[Any, Any]:
    """Return what Inductor wants operations to be made of, before it gets a graph."""
    import_module("torch._inductor.lowering")  # some decompositions need it, and do not import it
    from torch._inductor.decomposition import select_decomp_table

    table: Mapping[Any, Any] = select_decomp_table()
    return table


@cache
def preparing_headers() -> threading.Thread:
    """Have a thread prepare the headers of C++ kernels, once in a process, while graphs are traced.

    Every process that loads a kernel preprocesses them to see whether they are those that were compiled, and waits for
    that: a second. Public torch has no way to begin earlier. Nothing is compiled of the source here.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def prepare() -> None:
        with suppress(Exception), remembered_instruction_sets():  # what fails here fails for the first kernel as well
            CppPythonBindingsCodeCache.load_pybinding_async(["float*"], "")

    thread = threading.Thread(target=prepare, name="pipegraph-headers", daemon=True)
    thread.start()
    return thread


@contextmanager
def remembered_instruction_sets() -> Iterator[None]:
    """Let Inductor believe that this machine can run what it could run before.

    Once in each process it loads a library for each set of instructions, in processes of their own: a second. There is
    no public way to tell it the answer. A file in its cache stands for one that was yes; compiler and flags, the
    machine and what its processor can do are in the file's name.
    """
    from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint

    original = VecISA.check_build

    def check_build(instructions: Any, code: str) -> bool:
        compiler = _get_isa_dry_compile_fingerprint(instructions.build_arch_flags())
        machine = platform.node(), sorted(torch.cpu.get_capabilities().items())
        digest = sha256(repr((compiler, machine, str(instructions), code)).encode()).hexdigest()
        file = Path(cache_folder(), "pipegraph", f"{digest}.runs")
        if file.exists():
            return True
        runs = original(instructions, code)
        if runs:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        return runs

    VecISA.check_build = check_build  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        VecISA.check_build = original  # type: ignore[method-assign]


def wait_for_headers() -> None:
    """Wait until that thread is done, if there is one."""
    if preparing_headers.cache_info().currsize:
        preparing_headers().join()


def compiler_is_missing() -> str | None:
    """Return why Inductor has no C++ compiler to work with, or None if it has one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error)
    return None


_patching = threading.RLock()


@contextmanager
def deferred_waits() -> Iterator[list[Callable[[], None]]]:
    """Collect this thread's waits for compiler processes instead of waiting, so that many graphs compile at once.

    The module that Inductor generates waits as it is imported, and only this method of the class is in between. Other
    threads wait as ever, and so does what runs after an inner use.
    """
    from torch._inductor.async_compile import AsyncCompile

    waits: list[Callable[[], None]] = []
    thread = threading.get_ident()
    with _patching:
        before = AsyncCompile.wait
        original = getattr(before, "original", before)

        def wait(pool: Any, scope: Any) -> None:
            if threading.get_ident() == thread:
                waits.append(partial(original, pool, scope))
            else:
                original(pool, scope)

        wait.original = original  # type: ignore[attr-defined]
        AsyncCompile.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield waits
        finally:
            AsyncCompile.wait = before  # type: ignore[method-assign]


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
        with config.patch(fx_graph_cache=False):
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


def _compiled(module: fx.GraphModule, examples: list[Any]) -> Run:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((each.fake_mode for each in values if isinstance(each, FakeTensor)), None) or FakeTensorMode()
    with ExitStack() as stack:
        stack.enter_context(_with_environment(mode))
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(_with_joint_passes())
        # Inductor's cache tells graphs apart by their operations and inputs, and here the strides of outputs count too.
        tag = f"{torch.compiler.config.cache_key_tag} pipegraph {_mark_outputs(module)}"
        stack.enter_context(torch.compiler.config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        compiled: Run = compile_fx_inner(module, examples, is_inference=True)
    return compiled


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

    before = mode.shape_env
    mode.shape_env = ShapeEnv() if before is None else before
    try:
        yield
    finally:
        mode.shape_env = before


@contextmanager
def _with_joint_passes() -> Iterator[None]:
    """Let Inductor simplify a graph first, as AOTAutograd has it do, if the graph is not in the cache.

    The passes take as long as all else that a graph from the cache takes. What is simplified there is looked up as it
    was before. Only this function of the module lies between looking up and compiling.
    """
    from torch._inductor import compile_fx

    thread = threading.get_ident()
    with _patching:
        before = compile_fx.fx_codegen_and_compile

        def simplify_and_compile(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                module = compile_fx._recursive_joint_graph_passes(module)
                _mark_outputs(module)
            return before(module, *args, **kwargs)

        compile_fx.fx_codegen_and_compile = simplify_and_compile  # type: ignore[assignment]
        try:
            yield
        finally:
            compile_fx.fx_codegen_and_compile = before
