"""C++ kernels: the kernels of a graph are one library, and what a machine can run is tried once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512, VecISA

from pipegraph.kernels.compilers import compile_graphs
from pipegraph.torch_private import cpp_inductor
from pipegraph.torch_private.cpp_inductor import Kernel, joined_source, load_kernels, remembered_instruction_sets
from pipegraph.torch_private.fake_tensors import fake_tensors
from pipegraph.torch_private.tracing import trace

SCALED = """
#include <torch/csrc/inductor/cpp_prefix.h>
static float factor(float x) {{ return {factor} * x; }}
extern "C" void kernel(const float* x, float* y)
{{
    for (int i = 0; i < 4; i++) y[i] = factor(x[i]);
}}
"""
TYPES = ("const float*", "float*")


def test_the_kernels_of_a_graph_are_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def kernels_around_a_product(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.relu((x.sin() + 1) @ y).cos()]

    x, y = torch.rand(8, 16), torch.rand(16, 8)
    with fake_tensors():
        module = trace(kernels_around_a_product, (torch.empty(8, 16), torch.empty(16, 8)), None)
    (run,) = compile_graphs([module])
    assert not isinstance(run, Exception), run
    torch.testing.assert_close(run([x, y]), kernels_around_a_product(x, y))
    sources = [file.read_text() for file in tmp_path.glob("*/*.main.cpp")]
    assert [source.count("void  kernel") for source in sources if "kernel_1" in source] == [2]
    assert len(list(tmp_path.glob("*/*.main.so"))) == 1


def test_a_graph_without_kernels_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with fake_tensors():
        module = trace(lambda x: [x @ x], (torch.empty(2, 2),), None)
    (run,) = compile_graphs([module])
    assert not isinstance(run, Exception), run
    assert run([torch.ones(2, 2)])[0].eq(2).all()
    assert not list(tmp_path.glob("*/*.main.cpp"))


def test_a_library_has_eight_kernels_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def library(kernels: Sequence[Kernel]) -> list[Callable[[], Kernel]]:
        counts.append(len(kernels))
        return [partial(Kernel, kernel.argument_types, kernel.source) for kernel in kernels]

    monkeypatch.setattr(cpp_inductor, "_load_library", library)
    kernels = [Kernel(TYPES, str(index)) for index in range(17)]
    assert [load() for load in load_kernels(kernels)] == kernels
    assert counts == [8, 8, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_joined_kernels_may_define_the_same_names(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: threads)
    kernels = [Kernel(TYPES, SCALED.format(factor=factor)) for factor in (2, 3)]
    x, results = torch.arange(4.0), [torch.empty(4), torch.empty(4)]
    functions = [load() for load in load_kernels(kernels)]
    for function, result in zip(functions, results, strict=True):
        function(x, result)
    torch.testing.assert_close(results, [2 * x, 3 * x])


def test_kernels_that_do_not_compile_together_compile_alone() -> None:
    source = SCALED.format(factor=5).replace("extern", "#define factor 7\nextern").replace("factor(x", "factor * (x")
    kernels = [Kernel(TYPES, source), Kernel(TYPES, SCALED.format(factor=3))]
    x, results = torch.arange(4.0), [torch.empty(4), torch.empty(4)]
    for load, result in zip(load_kernels(kernels), results, strict=True):
        load()(x, result)
    torch.testing.assert_close(results, [7 * x, 3 * x])


def test_a_kernel_that_does_not_compile_says_so() -> None:
    kernels = [Kernel(TYPES, SCALED.format(factor="unknown")), Kernel(TYPES, SCALED.format(factor=3))]
    broken, working_loader = load_kernels(kernels)
    with pytest.raises(Exception, match="unknown"):
        broken()
    result = torch.empty(4)
    working_loader()(torch.ones(4), result)
    assert result.eq(3).all()


def test_what_joined_sources_include_stands_before_the_first() -> None:
    sources = ['#include <a.h>\n  # include "b.h"\nint one;\n', "#include <a.h>\nint two;\n"]
    lines = [line for line in joined_source(sources).splitlines() if line]
    assert lines[:2] == ["#include <a.h>", '# include "b.h"']
    assert not any("include" in line for line in lines[2:])
    assert lines.index("#define kernel kernel_1") > lines.index("int one;")


def test_a_set_of_instructions_is_tried_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    answers = iter([False, True, False])
    monkeypatch.setattr(VecISA, "check_build", lambda instructions, code: next(answers))
    instructions = VecAVX2()
    with remembered_instruction_sets():
        assert [instructions.check_build("one") for _ in range(4)] == [False, True, True, True]
        assert not instructions.check_build("another")
        monkeypatch.setattr("platform.node", lambda: "another machine")
        with pytest.raises(StopIteration):
            instructions.check_build("one")
    with pytest.raises(StopIteration):
        instructions.check_build("one")


@pytest.mark.parametrize("runs", [True, False])
def test_sets_of_instructions_after_the_one_that_is_used_are_not_tried(
    runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tried = []

    def check_build(instructions: VecISA, code: str) -> bool:
        tried.append(str(instructions))
        return runs

    monkeypatch.setattr(VecISA, "check_build", check_build)
    with remembered_instruction_sets():
        assert VecAVX512().check_build("one") == runs
        assert VecAVX2().check_build("one") == runs
    assert tried == (["avx512"] if runs else ["avx512", "avx2"])
