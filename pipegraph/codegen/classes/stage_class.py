"""The class of one stage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import fx, nn

from pipegraph.codegen.classes.block_classes import BlockClasses
from pipegraph.codegen.classes.sequences import constructors_of_stage
from pipegraph.codegen.expressions.module_tree import (
    ModuleTree,
    init_statements,
    module_access,
    parameter_access,
    repeated_sequence,
)
from pipegraph.codegen.expressions.operator_call import TRAINING
from pipegraph.codegen.forward.write_forward import write_forward
from pipegraph.codegen.names.identifiers import is_plain, outer_names, relative, unused, variable
from pipegraph.codegen.names.model_names import prose, shape_text, signature
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Expression,
    FunctionCall,
    Name,
    Template,
    call,
    literal,
    method,
    string,
)
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Evaluate, For, If, Raise, Return, Statement
from pipegraph.graph.captured import Captured, GradientHook
from pipegraph.graph.graph_text import stage_modules
from pipegraph.graph.nodes import label_of
from pipegraph.graph.partition.stages import StageGraph, has_hook
from pipegraph.planner.plan import Plan
from pipegraph.units import format_count

# ---- hook methods ----------------------------------------------------------------------------------------------------
# The method ``register_hooks`` of a stage: the hooks that the model has on gradients.


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


# ---- stage class -----------------------------------------------------------------------------------------------------


_TIES_LISTED = 4


def stage_class(plan: Plan, blocks: BlockClasses, stage: StageGraph, names: Mapping[fx.Node, str]) -> ClassSource:
    """``class Stage1``: its modules, and a ``forward`` that calls them.

    Args:
        plan: the stages of the model.
        blocks: the classes of the package, to which those that the stage uses are added.
        stage: the stage.
        names: the names of the values that cross between stages, as in the model's source. The manifest lists them by
            their position, so that only the values of one stage need different names.
    """
    captured = plan.captured
    refused = tuple(_refused_mode(captured))
    written = blocks.stage(stage, _parameters(blocks, stage, names), refused)
    tree, modules, text = written.tree, written.modules.fqns, written.text
    result_names = {node: names[node] for node in stage.outputs}
    results: Sequence[str]
    body: tuple[Statement, ...]
    if text is not None:
        init, body = text.init, (text.source,)
        results = _returned_names(text.source.written, list(result_names.values()))
    else:
        init = tuple(init_statements(tree))
        forward = write_forward(written.contents, tree, written.parameters, blocks.source, result_names)
        results, body = forward.results, (*refused, *forward.statements)
    train = tuple(_kept_modes(captured, modules, tree))
    settings = (
        *_ties(captured, stage, tree),
        *_frozen(captured, stage, tree),
        *_modes(captured, modules, tree, bool(train)),
    )
    hooks, libraries = hook_lines(captured, stage, tree)
    in_turn: Mapping[str, FunctionCall] | None = None
    if not (refused or settings or train or hooks or text):
        in_turn = constructors_of_stage(captured.modules[""].module, written.contents, tree)
    return ClassSource(
        name=f"Stage{stage.index}",
        docstring=_docstring(plan, stage, written.parameters, results),
        base=f"nn.{(tree.container if in_turn is None else nn.Sequential).__name__}",
        children=tuple(map(Argument, repeated_sequence(in_turn))) if in_turn is not None else (),
        init=(*init, *settings) if in_turn is None else (),
        parameters=tuple(written.parameters),
        forward=body if in_turn is None else (),
        train=train,
        hooks=hooks,
        hook_libraries=libraries,
    )


def _returned_names(written: Sequence[Statement], defaults: Sequence[str]) -> list[str]:
    """The names of the values that a ``return`` returns: of variables their own, of expressions the defaults.

    A ``return`` of the author, which is not among the statements that are written from the graph, has an expression.
    """
    returned = written[-1] if written else None
    if not isinstance(returned, Return):
        return [*defaults]
    values = returned.values
    names: list[str] = []
    for value, default in zip(values, defaults, strict=True):
        names.append(unused(value.name if isinstance(value, Name) else default, names))
    return names


def _refused_mode(captured: Captured) -> Iterator[Statement]:
    """``if self.training: raise …`` if the model was captured in evaluation mode alone."""
    if captured.not_trained:
        message = f"{prose(captured.model_name)} was captured in evaluation mode alone: training mode is another graph"
        yield If(TRAINING, (Raise(call("NotImplementedError", string(message))),))


def _parameters(blocks: BlockClasses, stage: StageGraph, names: Mapping[fx.Node, str]) -> list[str]:
    """The parameters of ``forward``. If two would have one name, each gets the name under which a module takes it."""
    count = Counter(names[node] for node in stage.inputs)
    parameters: list[str] = []
    for node in stage.inputs:
        clashes = count[names[node]] > 1 and node.op != "placeholder"
        name = (blocks.source.parameter_name(node, names[node]) if clashes else None) or names[node]
        parameters.append(unused(variable(name, "x"), parameters))
    return parameters


# ---- docstring -------------------------------------------------------------------------------------------------------


def _docstring(plan: Plan, stage: StageGraph, parameters: Sequence[str], results: Sequence[str]) -> str:
    modules = prose(", ".join(stage_modules(plan.captured, stage)).replace(" – ", " … "))
    takes = signature(parameters, stage.inputs, ()).removesuffix(" → ")
    outputs = zip(results, stage.outputs, strict=True)
    gives = ", ".join(f"{name} {shape_text(node)}" for name, node in outputs)
    cost = plan.costs[stage.index]
    size = f"{format_count(cost.parameters or 0, 'parameters')}, {format_count(cost.flops or 0, 'FLOP')}"
    fixed = [*_handed_on(plan, stage, parameters), *_fixed_sizes(plan.captured, stage)]
    return "  ".join([f"{modules}.", f"{takes} → {gives}.", f"{size}.", *fixed, *_ties_to_other_stages(plan, stage)])


def _handed_on(plan: Plan, stage: StageGraph, parameters: Sequence[str]) -> list[str]:
    """``Hands skip on to the next stage.``, for the inputs that it returns as they are."""
    if stage is plan.stages[-1]:
        return []
    arguments = zip(parameters, stage.inputs, strict=True)
    names = [name for name, node in arguments if node in stage.outputs]
    return [f"Hands {', '.join(names)} on to the next stage."] if names else []


def _fixed_sizes(captured: Captured, stage: StageGraph) -> list[str]:
    """``tokens.shape[1] is 12 in every batch (mamba.py:260).``, for the sizes of its inputs that a line fixes."""
    input_labels = {label_of(node) for node in stage.inputs if node.op == "placeholder"}
    return [
        f"{prose(size.place)} is {size.size} in every batch ({prose(size.place_in_source)})."
        for size in captured.sizes.fixed
        if size.line and size.place.partition(".")[0] in input_labels
    ]


def _ties_to_other_stages(plan: Plan, stage: StageGraph) -> list[str]:
    """``lm_head.weight is tied to embed_tokens.weight of stage 0.``, for each parameter that other stages have too."""
    aliases: dict[str, list[str]] = {}
    for other_stage in plan.stages:
        if other_stage is not stage:
            for tensor, name in _parameter_names(plan.captured, other_stage).items():
                aliases.setdefault(tensor, []).append(f"{name} of stage {other_stage.index}")
    shared = [
        (name, aliases[tensor]) for tensor, name in _parameter_names(plan.captured, stage).items() if tensor in aliases
    ]
    ties = [f"{prose(name)} is tied to {prose(', '.join(places))}." for name, places in shared]
    count = len(ties) - _TIES_LISTED
    summary = f"{count} more {'are' if count > 1 else 'is'} tied; pipeline.json lists their names."
    return ties if count <= 0 else [*ties[:_TIES_LISTED], summary]


def _parameter_names(captured: Captured, stage: StageGraph) -> dict[str, str]:
    """The parameters of a stage: the first name of each in the model → its first name in the stage."""
    names: dict[str, str] = {}
    for entry in map(captured.state.__getitem__, stage.state):
        if entry.kind == "parameter":
            names.setdefault(entry.canonical, entry.fqn)
    return names


# ---- statements of __init__ ------------------------------------------------------------------------------------------


def _ties(captured: Captured, stage: StageGraph, tree: ModuleTree) -> Iterator[Statement]:
    """``self.output.weight = self.embed.weight`` if both names are in this stage."""
    shared = _shared_modules(captured, stage)
    for copy, first in shared.items():
        owner, _, attribute = copy.rpartition(".")
        is_module = captured.modules[copy].module is captured.modules[first].module
        has_buffers = any(
            name.startswith(f"{copy}.") and captured.state[name].kind != "parameter" for name in stage.state
        )
        if is_module and not has_buffers and is_plain(attribute):
            yield Assign((Attribute(module_access(tree, owner), attribute),), module_access(tree, first))
        else:
            yield from _ties_of_module(module_access(tree, first), module_access(tree, copy))
    for group in captured.tied:
        names = [name for name in group if name in stage.state]
        for name in names[1:]:
            if not shared.keys().isdisjoint(outer_names(name)):
                continue
            owner, _, attribute = name.rpartition(".")
            target, value = module_access(tree, owner), parameter_access(tree, names[0])
            if is_plain(attribute):
                yield Assign((Attribute(target, attribute),), value)
            else:
                yield Evaluate(call("setattr", target, string(attribute), value))


_FEW_TIES = 3  # that are written one by one


def _shared_modules(captured: Captured, stage: StageGraph) -> dict[str, str]:
    """The modules of a stage that have the parameters of another module of their class → that module, if these are more
    than a few."""
    first_names: dict[str, str] = {}
    for group in captured.tied:
        names = [name for name in group if name in stage.state]
        first_names |= dict.fromkeys(names[1:], *names[:1])
    shared: dict[str, str] = {}
    for copy, entry in captured.modules.items():
        names = [relative(name, copy) for name in stage.state if copy and name.startswith(f"{copy}.")]
        if len(names) <= _FEW_TIES or not shared.keys().isdisjoint(outer_names(copy)):
            continue
        first = first_names.get(f"{copy}.{names[0]}", "").removesuffix(f".{names[0]}")
        inside = [relative(name, first) for name in stage.state if first and name.startswith(f"{first}.")]
        are_tied = all(first_names.get(f"{copy}.{name}") == f"{first}.{name}" for name in names)
        if are_tied and inside == names and captured.modules[first].class_name == entry.class_name:
            shared[copy] = first
    return shared


def _ties_of_module(first: Expression, copy: Expression) -> Iterator[Statement]:
    """The loop that gives a module the parameters of another one of its class."""
    name, owner, attribute = Name("name"), Name("owner"), Name("attribute")
    target = method(copy, "get_submodule", owner)
    yield For(
        ("name", "parameter"),
        method(first, "named_parameters"),
        (
            Assign((owner, Name("_"), attribute), method(name, "rpartition", string("."))),
            Evaluate(call("setattr", target, attribute, Name("parameter"))),
        ),
    )


def _frozen(captured: Captured, stage: StageGraph, tree: ModuleTree) -> Iterator[Statement]:
    """``self.embed.requires_grad_(False)``, for the outermost modules without a trained parameter."""
    parameters = [captured.state[fqn] for fqn in stage.state if captured.state[fqn].kind == "parameter"]
    frozen = {entry.fqn for entry in parameters if not entry.requires_grad and entry.dtype.is_floating_point}
    trained = {entry.fqn for entry in parameters} - frozen
    if frozen and not trained:
        yield Evaluate(method(SELF, "requires_grad_", literal(False)))
        return
    partly_trained = {module for fqn in trained for module in outer_names(fqn)}
    done: set[str] = set()
    for fqn in sorted(frozen):
        module = next((outer_name for outer_name in outer_names(fqn) if outer_name not in partly_trained), None)
        if module not in done:
            owner = parameter_access(tree, fqn) if module is None else module_access(tree, module)
            yield Evaluate(method(owner, "requires_grad_", literal(False)))
            done |= {module} if module is not None else set()


def _modes(captured: Captured, modules: frozenset[str], tree: ModuleTree, has_train: bool) -> Iterator[Statement]:
    """``self.eval()`` and the like, for modules in another mode than the module around them.

    Args:
        has_train: whether the stage has its own ``train``.
    """
    training = captured.modules[""].training
    at = 0 if training else 1
    if has_train and all(captured.modules[fqn].training == captured.modules[fqn].modes[at] for fqn in modules if fqn):
        yield Evaluate(method(SELF, "train" if training else "eval"))
        return
    modes: dict[str, bool] = {}
    for fqn, module in captured.modules.items():
        if fqn and fqn not in modules:
            continue
        outer = fqn
        while outer and outer not in modes:
            outer = outer.rpartition(".")[0]
        if module.training != modes.get(outer, True):
            yield Evaluate(method(module_access(tree, fqn), "train" if module.training else "eval"))
        modes[fqn] = module.training


def _kept_modes(captured: Captured, modules: frozenset[str], tree: ModuleTree) -> Iterator[Statement]:
    """``self.backbone.eval()`` and the like, for modules that a model's own ``train`` gives another mode."""
    mode = Name("mode")
    modes: dict[str, tuple[bool, bool]] = {"": (True, False)}  # what super().train(mode) sets
    # What each pair of modes, in training and in evaluation, is in terms of the argument of ``train``.
    settings = {
        (True, False): ("train", (mode,)),
        (False, False): ("eval", ()),
        (True, True): ("train", ()),
        (False, True): ("train", (Template("not {}", (mode,)),)),
    }
    if (model_modes := captured.modules[""].modes) != modes[""]:
        value = literal(model_modes[0]) if model_modes[0] == model_modes[1] else Template("not {}", (mode,))
        yield Assign((Attribute(SELF, "training"),), value)
    for fqn, module in captured.modules.items():
        if not fqn or fqn not in modules:
            continue
        outer = fqn.rpartition(".")[0]
        while outer and outer not in modes:
            outer = outer.rpartition(".")[0]
        if module.modes != modes[outer]:
            name, arguments = settings[module.modes]
            yield Evaluate(method(module_access(tree, fqn), name, *arguments))
        modes[fqn] = module.modes
