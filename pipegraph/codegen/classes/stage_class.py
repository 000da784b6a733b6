"""The class of one stage, ready for its template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from pipegraph.codegen.classes.attributes import assignments
from pipegraph.codegen.classes.block_classes import Blocks, modules_of
from pipegraph.codegen.classes.class_source import ClassSource
from pipegraph.codegen.forward.body import write_body
from pipegraph.codegen.forward.module_tree import Tree, access
from pipegraph.codegen.names.docstrings import prose, signature, type_text
from pipegraph.codegen.names.identifiers import is_plain, literal_text, unused, variable
from pipegraph.graph.captured import Captured
from pipegraph.graph.partition.stages import StageGraph
from pipegraph.package import StageCost
from pipegraph.planner.plan import Plan
from pipegraph.planner.stage_modules import stage_modules
from pipegraph.units import format_count

_TIES_LISTED = 4


def stage_class(plan: Plan, blocks: Blocks, stage: StageGraph, names: Mapping[fx.Node, str]) -> ClassSource:
    """``class Stage1``: its attributes, and a ``forward`` over blocks with loops rolled.

    Args:
        names: what the model's source calls the values that cross. ``forward`` takes and returns them by their
            position in the manifest, so that only two of one stage need different names.
    """
    scope, tree = blocks.stage(stage)
    parameters = _parameters(blocks, stage, names)
    captured = plan.captured
    body = write_body(scope, tree, parameters, blocks.origins, {node: names[node] for node in stage.outputs})
    return ClassSource(
        name=f"Stage{stage.index}",
        docstring=_docstring(plan, stage, parameters, body.results),
        assignments=(
            *assignments(tree),
            *_ties(captured, stage, tree),
            *_frozen(captured, stage, tree),
            *_modes(captured, modules_of(scope, tree), tree),
        ),
        parameters=tuple(parameters),
        body=body.lines,
    )


def _parameters(blocks: Blocks, stage: StageGraph, names: Mapping[fx.Node, str]) -> list[str]:
    """The arguments of ``forward``. Of values with one name, some may have the name under which modules take them."""
    count = Counter(names[node] for node in stage.inputs)
    parameters: list[str] = []
    for node in stage.inputs:
        clashes = count[names[node]] > 1 and node.op != "placeholder"
        wanted = (blocks.origins.taken_as(node, names[node]) if clashes else None) or names[node]
        parameters.append(unused(variable(wanted, "x"), parameters))
    return parameters


def _docstring(plan: Plan, stage: StageGraph, parameters: Sequence[str], results: Sequence[str]) -> str:
    held = prose(", ".join(stage_modules(plan.captured, stage)).replace(" – ", " … ")) + "."
    taken = signature(parameters, stage.inputs, ()).removesuffix(" → ")
    given = ", ".join(
        f"{name} {type_text(node.meta['val'])}" for name, node in zip(results, stage.outputs, strict=True)
    )
    about = [held, f"{taken} → {given}.", f"{cost_text(plan.costs[stage.index])}.", *_tied_elsewhere(plan, stage)]
    return "  ".join(about)


def _tied_elsewhere(plan: Plan, stage: StageGraph) -> list[str]:
    """``lm_head.weight is tied to embed_tokens.weight of stage 0.``, for each parameter that other stages hold too."""
    held = _parameter_names(plan.captured, stage)
    others: dict[str, list[str]] = {}
    for other in plan.stages:
        if other is not stage:
            for tensor, name in _parameter_names(plan.captured, other).items():
                others.setdefault(tensor, []).append(f"{name} of stage {other.index}")
    shared = [(name, others[tensor]) for tensor, name in held.items() if tensor in others]
    ties = [f"{prose(name)} is tied to {prose(', '.join(places))}." for name, places in shared]
    left = len(ties) - _TIES_LISTED
    more = f"So {'are' if left > 1 else 'is'} {left} more, with their names in pipeline.json."
    return ties if left <= 0 else [*ties[:_TIES_LISTED], more]


def _parameter_names(captured: Captured, stage: StageGraph) -> dict[str, str]:
    """A stage's parameters: the tensor under its first name in the model → under its first name in the stage."""
    entries = [captured.state[fqn] for fqn in reversed(stage.state) if captured.state[fqn].kind == "parameter"]
    names = {entry.canonical: entry.fqn for entry in entries}
    return dict(reversed(names.items()))


def cost_text(cost: StageCost) -> str:
    """``12.6 M parameters, 51.3 GFLOP``."""
    return f"{format_count(cost.parameters or 0, 'parameters')}, {format_count(cost.flops or 0, 'FLOP')}"


def _ties(captured: Captured, stage: StageGraph, tree: Tree) -> Iterator[str]:
    """``self.output.weight = self.embed.weight`` where both names are in this stage."""
    for group in captured.tied:
        names = [name for name in group if name in stage.state]
        for name in names[1:]:
            owner, _, attribute = name.rpartition(".")
            target = _module(tree, owner)
            value = _parameter(tree, names[0])
            if is_plain(attribute):
                yield f"{target}.{attribute} = {value}"
            else:
                yield f"setattr({target}, {literal_text(attribute)}, {value})"


def _frozen(captured: Captured, stage: StageGraph, tree: Tree) -> Iterator[str]:
    """``self.embed.requires_grad_(False)``, for the largest modules in which nothing is trained."""
    parameters = [captured.state[fqn] for fqn in stage.state if captured.state[fqn].kind == "parameter"]
    frozen = {entry.fqn for entry in parameters if not entry.requires_grad and entry.dtype.is_floating_point}
    trained = {entry.fqn for entry in parameters} - frozen
    if frozen and not trained:
        yield "self.requires_grad_(False)"
        return
    done: list[str] = []
    for fqn in sorted(frozen):
        parts = fqn.split(".")
        if any(fqn.startswith(f"{module}.") for module in done):
            continue
        for depth in range(1, len(parts)):
            module = ".".join(parts[:depth])
            if not any(name.startswith(f"{module}.") for name in trained):
                done.append(module)
                yield f"{_module(tree, module)}.requires_grad_(False)"
                break
        else:
            yield f"{_parameter(tree, fqn)}.requires_grad_(False)"


def _modes(captured: Captured, modules: frozenset[str], tree: Tree) -> Iterator[str]:
    """``self.eval()`` and the like, for modules in another mode than the one around them."""
    modes: dict[str, bool] = {}
    for fqn, module in captured.modules.items():
        if fqn and fqn not in modules:
            continue
        outer = fqn
        while outer and outer not in modes:
            outer = outer.rpartition(".")[0]
        if module.training != modes.get(outer, True):
            yield f"{_module(tree, fqn)}.{'train' if module.training else 'eval'}()"
        modes[fqn] = module.training


def _module(tree: Tree, fqn: str) -> str:
    """The expression for a module of the stage; one inside a block is found by its name."""
    path = fqn.split(".") if fqn else []
    if not path or tree.at(path) is not None:
        return access(tree, path)
    return f"self.get_submodule({literal_text(fqn)})"


def _parameter(tree: Tree, fqn: str) -> str:
    owner, _, name = fqn.rpartition(".")
    path = owner.split(".") if owner else []
    if is_plain(name) and (not path or tree.at(path) is not None):
        return f"{access(tree, path)}.{name}"
    return f"self.get_parameter({literal_text(fqn)})"
