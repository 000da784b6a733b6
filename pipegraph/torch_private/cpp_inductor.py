"""Inductor's compiler of C++: the kernels of a graph are compiled together."""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from pipegraph.torch_private.inductor import cache_folder
from pipegraph.torch_private.tracing import TORCH_LOCK


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
    """Let Inductor use the instruction sets that ran on this machine before, and narrower ones, without a test.

    Once in each process, Inductor loads a library for each instruction set, in separate processes. This takes a second,
    or nine seconds if no library was compiled before. No public interface tells it the answer. A file in its cache says
    that a set runs. The file's name is a digest of the compiler, its flags, the machine and the features of its
    processor. Inductor asks for the widest set first, and uses the first that runs: the sets after it are not tested.
    """
    from torch._inductor.cpu_vec_isa import VecISA, _get_isa_dry_compile_fingerprint

    original = VecISA.check_build
    answers: dict[str, bool] = {}
    """For each instruction set, whether it passed all its tests."""

    def check_build(instructions: Any, code: str) -> bool:
        name = str(instructions)
        if any(runs for wider, runs in answers.items() if wider != name):
            return True
        compiler = _get_isa_dry_compile_fingerprint(instructions.build_arch_flags())
        machine = platform.node(), sorted(torch.cpu.get_capabilities().items())
        digest = sha256(repr((compiler, machine, name, code)).encode()).hexdigest()
        file = Path(cache_folder(), "pipegraph", f"{digest}.runs")
        ran = file.exists()
        runs = ran or original(instructions, code)
        answers[name] = answers.get(name, True) and runs
        if runs and not ran:
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


@dataclass(frozen=True)
class Kernel:
    """A C++ function `kernel`, as Inductor's generated module asks for it."""

    argument_types: Sequence[str]
    source: str


@contextmanager
def compiled_together() -> Iterator[list[Callable[[], None]]]:
    """Collect this thread's waits for compilers instead of waiting, so that many graphs compile at once, and compile
    the C++ kernels of a graph together.

    The module that Inductor generates asks for its kernels and waits for them as it is imported, and only these two
    methods of the class are in between. Other threads wait as ever, and so does what runs after an inner use.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    waits: list[Callable[[], None]] = []
    requested_kernels: dict[int, list[tuple[Kernel, LambdaFuture]]] = {}
    """By the AsyncCompile of a module: its kernels, and what stands for each in the module until it is there."""
    thread = threading.get_ident()
    with TORCH_LOCK:
        previous_methods = AsyncCompile.wait, AsyncCompile.cpp_pybinding
        original_wait = getattr(AsyncCompile.wait, "original", AsyncCompile.wait)
        original_binding = getattr(AsyncCompile.cpp_pybinding, "original", AsyncCompile.cpp_pybinding)

        def cpp_pybinding(pool: Any, argtypes: list[str], source_code: str) -> Any:
            if threading.get_ident() != thread:
                return original_binding(pool, argtypes, source_code)
            future = LambdaFuture(lambda: None)
            requested_kernels.setdefault(id(pool), []).append((Kernel(tuple(argtypes), source_code), future))
            return future

        def wait(pool: Any, scope: dict[str, Any]) -> None:
            if threading.get_ident() != thread:
                original_wait(pool, scope)
                return
            kernels = requested_kernels.pop(id(pool), [])
            for (_, future), function in zip(kernels, load_kernels([kernel for kernel, _ in kernels]), strict=True):
                future.result_fn = function
            waits.append(partial(finish, pool, scope, [future for _, future in kernels]))

        def finish(pool: Any, scope: dict[str, Any], futures: list[LambdaFuture]) -> None:
            for name, value in scope.items():
                if any(value is future for future in futures):
                    scope[name] = value.result()
            original_wait(pool, scope)

        cpp_pybinding.original, wait.original = original_binding, original_wait  # type: ignore[attr-defined]
        AsyncCompile.wait, AsyncCompile.cpp_pybinding = wait, cpp_pybinding  # type: ignore[method-assign, assignment]
        try:
            yield waits
        finally:
            AsyncCompile.wait, AsyncCompile.cpp_pybinding = previous_methods  # type: ignore[method-assign]


def load_kernels(kernels: Sequence[Kernel]) -> list[Callable[[], Any]]:
    """Begin to compile kernels, eight to a library: more, and a large graph would keep one core busy and leave others
    idle. Return for each kernel what waits for it and returns it."""
    return [load for start in range(0, len(kernels), 8) for load in _load_library(kernels[start : start + 8])]


def _load_library(kernels: Sequence[Kernel]) -> list[Callable[[], Any]]:
    """Kernels that do not compile together, since a header uses a name that one of them defines, say, compile alone."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import CppCompileError

    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    if len(kernels) == 1:
        types, source = kernels[0].argument_types, kernels[0].source
        return [CppPythonBindingsCodeCache.load_pybinding_async(types, source, submit_fn=submit)]
    sources: list[str] = []
    loads: list[Callable[[], Any]] = []

    class Joined(CppPythonBindingsCodeCache):
        """A kernel of the library: its source with Python's bindings is collected, and its module is the library's."""

        @classmethod
        def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> Any:
            sources.append(main_code)
            return cls.load_module

        @classmethod
        def load_module(cls) -> Any:
            library = load_library()
            return cls._load_library_inner(library.__file__, library.key)

    def load(kernel: Kernel, load_joined: Callable[[], Any]) -> Any:
        try:
            return load_joined()
        except CppCompileError:
            return CppPythonBindingsCodeCache.load_pybinding(kernel.argument_types, kernel.source)

    for index, kernel in enumerate(kernels):
        joined: Any = type("Joined", (Joined,), {"entry_function": function_name(index)})
        loads.append(partial(load, kernel, joined.load_pybinding_async(kernel.argument_types, kernel.source)))
    first: Any = type("Library", (CppPythonBindingsCodeCache,), {"entry_function": function_name(0)})
    load_library = first.load_async(joined_source(sources), submit_fn=submit)
    return loads


_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$\n?", re.MULTILINE)


def joined_source(sources: Sequence[str]) -> str:
    """Return one source with the functions of all sources, each in its own namespace.

    Include directives come before the first function: no header is read within a namespace. `extern "C"` functions
    with one name are one function even in two namespaces, so a macro adds a number to each name.
    """
    includes = dict.fromkeys(line.strip() for source in sources for line in _INCLUDE.findall(source))
    lines = list(includes)
    for index, source in enumerate(sources):
        lines += [f"#define kernel {function_name(index)}", f"namespace part_{index} {{"]
        lines += [_INCLUDE.sub("", source), "}", "#undef kernel"]
    return "\n".join([*lines, ""])


def function_name(index: int) -> str:
    """The name of the function of a source that was joined to others."""
    return f"kernel_{index}"
