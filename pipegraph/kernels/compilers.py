"""How graphs become kernels: run as they are, or compiled by Inductor; and which operations they are made of."""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pipegraph.kernels.blocks.differentiate import TraceOptions
from pipegraph.kernels.cpu.aten_kernels import without_cpu_pools
from pipegraph.kernels.graphs.division import convolution_backward, separate_gradients
from pipegraph.kernels.graphs.regions import Regions
from pipegraph.kernels.program import Compiler
from pipegraph.progress import track
from pipegraph.recompute import Recompute
from pipegraph.torch_private.cpp_inductor import (
    compiled_together,
    compiler_is_missing,
    preparing_headers,
    wait_for_headers,
)
from pipegraph.torch_private.inductor import cache_folder, compile_graph, inductor_decompositions
from pipegraph.torch_private.tracing import TORCH_LOCK, Run, boxed


@functools.cache
def compiler(name: str) -> Compiler:
    """Return the compiler "inductor" or "eager", one for all stages of this process."""
    if name == "inductor":
        missing = compiler_is_missing()
        if missing is None:
            return Compiler(_inductor)
        warnings.warn(
            f'Inductor needs a C++ compiler; the stages run uncompiled, as with kernels="eager": {missing}',
            stacklevel=4,
        )
    return Compiler(_eager)


def options(name: str, recompute: Recompute | Regions) -> TraceOptions:
    """Return how graphs for a compiler are made, for stages that share blocks."""
    return TraceOptions(recompute, functools.partial(decompositions, inductor=name == "inductor"))


def decompositions(inductor: bool) -> Mapping[Any, Any]:
    """Return what operations are made of before a graph is divided.

    Inductor wants some taken apart, and is to leave others whole; an operation whose results belong to both I and W is
    two.
    """
    table = without_cpu_pools(inductor_decompositions()) if inductor else {}
    if inductor and not torch.cuda.is_initialized():
        preparing_headers()
    decomposition = table.get(convolution_backward, lambda *args: NotImplemented)
    return {**table, convolution_backward: functools.partial(separate_gradients, decomposition)}


def _eager(modules: Sequence[fx.GraphModule]) -> list[Run]:
    return [boxed(module) for module in modules]


def _inductor(modules: Sequence[fx.GraphModule]) -> list[Run]:
    runs = compile_graphs(modules)
    for index, (module, run) in enumerate(zip(modules, runs, strict=True)):
        if isinstance(run, Exception):
            reason = str(run).strip().partition("\n")[0]
            warnings.warn(
                f"Inductor cannot compile a part of a stage, which runs uncompiled: {type(run).__name__}: {reason}",
                stacklevel=2,
            )
            runs[index] = boxed(module)
    return runs  # type: ignore[return-value]


def compile_graphs(modules: Sequence[fx.GraphModule]) -> list[Run | Exception]:
    """Compile functional graphs of ATen operations with Inductor, all at once. Return the error of one that fails.

    A run that is killed may leave a part of a file in Inductor's cache, which would fail for ever: it is removed, and
    what needs it compiled again.
    """
    start = time.time()
    results = _compile_together(modules)
    again = [
        index
        for index, result in enumerate(results)
        if isinstance(result, Exception) and _remove_damaged_files(result, start)
    ]
    if again:
        for index, result in zip(again, _compile_together([modules[index] for index in again]), strict=True):
            results[index] = result
    return results


def _remove_damaged_files(error: BaseException | None, start: float) -> bool:
    """Remove the files of Inductor's cache that could not be loaded, if they were there at the start. Return whether
    there were any. Another process may have written them again since."""
    folder, removed = Path(cache_folder()).resolve(), False
    while error is not None:
        for name in re.findall(r"/\S+?\.(?:py|so)\b", str(error)):
            file = Path(name).resolve()
            if folder in file.parents and file.exists() and file.stat().st_mtime < start:
                file.unlink(missing_ok=True)
                removed = True
        error = error.__cause__ or error.__context__
    return removed


def _compile_together(modules: Sequence[fx.GraphModule]) -> list[Run | Exception]:
    results: list[Run | Exception] = []
    ends: list[int] = []
    wait_for_headers()
    with TORCH_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler uses deprecated parts of torch
        with compiled_together() as waits:
            for module in track("writing kernels", modules):
                try:
                    results.append(compile_graph(module))
                except Exception as error:
                    results.append(error)
                ends.append(len(waits))
        starts = [0, *ends][: len(ends)]
        for index, (start, end) in enumerate(track("compiling kernels", list(zip(starts, ends, strict=True)))):
            try:
                for wait in waits[start:end]:
                    wait()
            except Exception as error:
                results[index] = error
    return results
