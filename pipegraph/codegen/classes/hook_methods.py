"""The method ``register_hooks`` of a stage: the hooks that the model has on gradients."""

from __future__ import annotations

import re

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.state_access import module_access, parameter_access
from pipegraph.codegen.syntax.expressions import Expression
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH
from pipegraph.graph.captured import Captured, GradientHook
from pipegraph.graph.partition.stages import StageGraph, has_hook

_INDENT = 8


def hook_lines(captured: Captured, stage: StageGraph, tree: ModuleTree) -> tuple[tuple[str, ...], frozenset[str]]:
    """The lines of ``register_hooks``, empty without hooks, and the names of libraries in them.

    A function that is a hook of several parameters is written once.
    """
    lines: list[str] = []
    functions: dict[str, str] = {}
    libraries: set[str] = set()
    for hook in captured.hooks:
        if not has_hook(captured, hook, stage.nodes, stage.state):
            continue
        libraries |= hook.libraries
        register = f"{_owner(captured, stage, tree, hook).text}.{hook.method}"
        name, text = hook.name, _local_text(captured, stage, tree, hook)
        if not name and len(line := f"{register}({text})") <= LINE_LENGTH - _INDENT:
            lines.append(line)
            continue
        if not name:
            parameters, _, body = text.removeprefix("lambda ").partition(": ")
            name, text = "hook", f"def hook({parameters}):\n    return {body}"
        if functions.get(name) != text:
            functions[name] = text
            lines += ["", *text.splitlines(), ""]
        lines.append(f"{register}({name})")
    return tuple(lines), frozenset(libraries)


def _owner(captured: Captured, stage: StageGraph, tree: ModuleTree, hook: GradientHook) -> Expression:
    """The parameter or the layer that has a hook."""
    if hook.is_of_module:
        return module_access(tree, hook.owner)
    names = captured.names_of[captured.state[hook.owner].canonical]
    return parameter_access(tree, next(fqn for fqn in names if fqn in stage.state))


def _local_text(captured: Captured, stage: StageGraph, tree: ModuleTree, hook: GradientHook) -> str:
    """The text of a hook, with the tensors as the stage has them."""

    def tensor(match: re.Match[str]) -> str:
        entry = captured.state[hook.tensors[match[0]]]
        local = next(fqn for fqn in captured.names_of[entry.canonical] if fqn in stage.state)
        return parameter_access(tree, local, entry.kind != "parameter").text

    return re.sub(r"\b_tensor_\d+\b", tensor, hook.text)
