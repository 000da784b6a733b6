"""The modules of an ``nn.Sequential`` in generated source: each takes the result of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.torch_modules import module_constructor
from pipegraph.codegen.forward.items import ClassContents, ModuleCall, ModuleLoop, Step
from pipegraph.codegen.names.identifiers import relative
from pipegraph.codegen.syntax.expressions import FunctionCall
from pipegraph.graph.calls import CallValues


def constructors_in_sequence(
    module: nn.Module, called: CallValues, items: Iterable[Step], does_nothing: Callable[[str], bool], is_whole: bool
) -> dict[str, FunctionCall] | None:
    """The constructors of the children of an ``nn.Sequential``, by name; None if its call is more than theirs.

    Args:
        called: the call.
        items: what runs in it.
        does_nothing: whether a module runs no operation in the whole model, so that there is no item of it.
        is_whole: whether the stage has all of the call. Otherwise the children that do not run here are left out.
    """
    fqn, calls = called.tree.fqn, {}
    for item in items:
        if not isinstance(item, ModuleCall) or item.fqn in calls:
            return None
        calls[item.fqn] = item
    passed, constructors = called.reads, {}
    for name, child in module.named_children():
        run = calls.pop(f"{fqn}.{name}", None)
        if run is not None and run.arguments is None and run.reads == passed and len(run.makes) == 1:
            passed = run.makes
        elif run is None and not is_whole:
            continue
        elif run is not None or not does_nothing(f"{fqn}.{name}"):
            return None
        constructor = run.constructor if run is not None else module_constructor(child)
        if constructor is None:
            return None
        constructors[name] = constructor
    return None if calls or passed != called.makes else constructors


def constructors_of_stage(
    module: nn.Module, contents: ClassContents, tree: ModuleTree
) -> dict[str, FunctionCall] | None:
    """The constructors in a stage of a model that is an ``nn.Sequential``, by name.

    None if the model has another class, or if the stage does more than call each module in turn.
    """
    if type(module).forward is not nn.Sequential.forward or tree.state:
        return None
    passed, constructors = contents.inputs, {}
    for item in contents.items:
        if not isinstance(item, (ModuleCall, ModuleLoop)):
            return None
        for run in item.calls if isinstance(item, ModuleLoop) else (item,):
            if run.arguments is not None or len(passed) != 1 or run.reads != passed:
                return None
            constructors[relative(run.fqn, contents.prefix)] = run.constructor
            passed = run.makes
    is_whole = passed == contents.outputs and list(constructors) == list(tree.children)
    return constructors if is_whole and constructors else None
