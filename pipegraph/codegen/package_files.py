"""The files of a package, built from a plan and compared with it: source and manifest. No package is written here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import sympy
from msgspec import structs

from pipegraph.arguments import for_asker
from pipegraph.codegen.draft import Draft, Source, draft, written_shape
from pipegraph.codegen.forms import USUAL, Forms
from pipegraph.codegen.initial_values import patterns_of
from pipegraph.codegen.names.model_names import prose
from pipegraph.codegen.proof import Proof, author_lines, differences_of_text, written_names
from pipegraph.codegen.validation.validate import GraphDifference
from pipegraph.errors import CaptureError, PlanError
from pipegraph.graph.captured import OtherSize
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.graph.symbolic_size import SymbolicSize, expression_text
from pipegraph.package import CONFIG, ListedFile, Manifest, StageCost
from pipegraph.package.json_file import json_text
from pipegraph.package.sizes import Size
from pipegraph.planner.plan import Plan

# ---- general sizes ---------------------------------------------------------------------------------------------------
# Sizes that a package takes although ``torch.export`` fixes them, because its code is the same at two of them.
#
# Export unrolls ``for t in range(x.shape[1])``, and the stage says it again. If two captures with different numbers of
# steps give the same code, it is that of any number, and both together say how a shape follows from it.


_SHAPE = re.compile(r"(?<=\w\[)[^\[\]]+(?=\])")  # between the brackets of f32[batch, 13]
_SUM_OF_PRODUCTS = re.compile(r"[\w *+-]+")
_NAME = re.compile(r"[^\W\d]\w*")
_PARTS = "  "  # between the parts of a docstring

Shapes = Mapping[str, tuple[int, ...]]


class _UnknownGrowthError(Exception):
    """Two captures do not say how a dimension follows from a size: it is half of it, say."""


def with_general_sizes(draft: Draft, variants: Sequence[tuple[OtherSize, Draft]]) -> Draft:
    """Return a package that takes any of those sizes at which its code stays the same.

    Args:
        draft: the package.
        variants: the sizes that may be general, each with the package at another one.
    """
    shapes, sources, sizes = dict(draft.shapes), [], []
    for size, variant in variants:
        if _written(draft) != _written(variant):
            continue
        try:
            grown = {name: _grown(shapes[name], draft.shapes[name], variant.shapes[name], size) for name in shapes}
        except _UnknownGrowthError:
            continue
        shapes = grown
        sources.append((size, variant.source))
        sizes.append(size)
    return Draft(_source(draft.source, sources), _manifest(draft.manifest, sizes, shapes), shapes) if sizes else draft


def _written(package: Draft) -> tuple[Any, ...]:
    """What a package has but for the numbers of shapes and costs."""
    manifest, source = package.manifest, package.source
    return (
        source.functions,
        [replace(part, docstring="") for part in (*source.blocks, *source.stages)],
        source.initial_values,
        [structs.replace(value, shape=("",) * len(value.shape)) for value in manifest.values.values()],
        [structs.replace(stage, cost=StageCost()) for stage in manifest.stages],
        (manifest.args, manifest.kwargs, manifest.outputs, manifest.evaluation_outputs, manifest.lists),
        (manifest.conditions, manifest.tied, manifest.requires),
    )


# ---- how a dimension follows -----------------------------------------------------------------------------------------


def _grown(general: Sequence[int], first: Sequence[int], second: Sequence[int], size: OtherSize) -> tuple[int, ...]:
    """A shape for any value of a size.

    Args:
        general: the shape, with the sizes that are general so far.
        first, second: the shape in both captures.
        size: the size.

    Raises:
        _UnknownGrowthError: a dimension does not grow evenly.
    """
    grown: list[int] = []
    for dim, first_dim, second_dim in zip(general, first, second, strict=True):
        expression = _expression(dim) + _growth(_expression(first_dim), _expression(second_dim), size)
        values = {_symbol(size): size.size, **getattr(dim, "symbols", {})}
        grown.append(SymbolicSize(expression, values) if expression.free_symbols else int(expression))
    return tuple(grown)


def _growth(first: sympy.Expr, second: sympy.Expr, size: OtherSize) -> sympy.Expr:
    """What a dimension has more than in the first capture: ``tokens_1 - 13``."""
    growth = sympy.expand((second - first) / (size.captured_size - size.size))
    if not all(number.is_Integer for number in growth.as_coefficients_dict().values()):
        raise _UnknownGrowthError
    return sympy.expand(growth * (_symbol(size) - size.size))


def _expression(dim: int) -> sympy.Expr:
    return dim.expression if isinstance(dim, SymbolicSize) else sympy.Integer(dim)


def _symbol(size: OtherSize) -> sympy.Symbol:
    return sympy.Symbol(size.name, integer=True, positive=True)


# ---- manifest and docstrings -----------------------------------------------------------------------------------------


def _manifest(base: Manifest, general: Sequence[OtherSize], shapes: Shapes) -> Manifest:
    sizes = base.sizes | {size.name: Size(captured=size.size, min=size.lowest) for size in general}
    values = {name: structs.replace(base.values[name], shape=written_shape(shape)) for name, shape in shapes.items()}
    return structs.replace(base, sizes=sizes, values=base.values | values)


def _source(source: Source, variants: Sequence[tuple[OtherSize, Source]]) -> Source:
    def documented(part: str) -> tuple[Any, ...]:
        variant_parts = zip(*(getattr(variant, part) for _, variant in variants), strict=True)
        return tuple(
            replace(
                definition,
                docstring=_docstring(
                    definition.docstring, [(size, peer.docstring) for size, peer in zip(sizes, peers, strict=True)]
                ),
            )
            for definition, peers in zip(getattr(source, part), variant_parts, strict=True)
        )

    sizes = [size for size, _ in variants]
    return replace(source, blocks=documented("blocks"), stages=documented("stages"))


def _docstring(docstring: str, variants: Sequence[tuple[OtherSize, str]]) -> str:
    """A docstring with names for the sizes in its shapes, and without the sentences that a size is fixed."""
    sizes = [size for size, _ in variants]
    text = _without_fixed(docstring, sizes)
    variant_shapes = [(size, _SHAPE.findall(_without_fixed(variant, sizes))) for size, variant in variants]
    numbers = iter(range(len(text)))

    def named(match: re.Match[str]) -> str:
        position = next(numbers)
        return _shape(match[0], [(size, shapes[position]) for size, shapes in variant_shapes if position < len(shapes)])

    return _SHAPE.sub(named, text)


def _without_fixed(docstring: str, sizes: Sequence[OtherSize]) -> str:
    fixed = tuple(f"{prose(place)} is " for size in sizes for place in size.places)
    return _PARTS.join(part for part in docstring.split(_PARTS) if not part.startswith(fixed))


def _shape(shape: str, variants: Sequence[tuple[OtherSize, str]]) -> str:
    """``batch, tokens_1`` for ``batch, 13`` and ``batch, 7``."""
    dims = shape.split(", ")
    variant_dims = [(size, text.split(", ")) for size, text in variants]
    same_rank = [(size, variant) for size, variant in variant_dims if len(variant) == len(dims)]
    return ", ".join(_dim(dim, [(size, variant[at]) for size, variant in same_rank]) for at, dim in enumerate(dims))


def _dim(dim: str, variants: Sequence[tuple[OtherSize, str]]) -> str:
    """A dimension in words; as it is if it does not say how it grows."""
    changed = [(size, text) for size, text in variants if text != dim]
    if not changed or not all(map(_SUM_OF_PRODUCTS.fullmatch, (dim, *(text for _, text in changed)))):
        return dim
    first = _parsed(dim)
    try:
        return expression_text(sympy.expand(first + sum(_growth(first, _parsed(text), size) for size, text in changed)))
    except _UnknownGrowthError:
        return dim


def _parsed(text: str) -> sympy.Expr:
    names = {name: sympy.Symbol(name, integer=True, positive=True) for name in _NAME.findall(text)}
    return sympy.sympify(text, locals=names)


# ---- package files ---------------------------------------------------------------------------------------------------


_LISTED = 8  # parameters that a warning names
_GRAPH_LINES = 32  # lines of an author's text that are written from the graph because they differ


@dataclass(frozen=True)
class Generated:
    """A package that is not written yet.

    Attributes:
        files: name → text.
        manifest: with the digests of these files.
        proof: that they equal the captured graph.
    """

    files: dict[str, str]
    manifest: Manifest
    proof: Proof


def generate(plan: Plan, weights: bool = True, source: ModelSource | None = None) -> Generated:
    """Generate a package without writing it, and compare it with the captured graph.

    Args:
        plan: the stages.
        weights: whether shards will hold parameters, or only buffers. Without them, parameters whose initialisation is
            not known are named in a warning.
        source: where the model came from.

    Raises:
        CaptureError: an operation comes from a library that a package could not import; or the source of a class is not
            the captured graph in any form.
    """
    begin = perf_counter()
    attempt = _attempt(plan, weights, source, USUAL)
    compared = attempt.seconds
    reasons: list[str] = []
    while attempt.differences:
        difference = attempt.differences[0]
        reasons.append(str(difference))
        if (with_statements := _with_graph_statements(attempt, plan, weights, source)) is not None:
            attempt = with_statements
            compared += attempt.seconds
            continue
        written = attempt.package.source
        general = {block.model_class for block in written.blocks if block.is_general}
        with_functions = {block.model_class for block in written.blocks if block.calls_functions}
        with_functions |= {stage.name for stage in written.stages if stage.calls_functions}
        forms = attempt.forms.plainer(written_names(written, difference), general, with_functions)
        for plainer in forms:
            attempt = _attempt(plan, weights, source, plainer)
            compared += attempt.seconds
            if not attempt.lacks_operation_of(difference):
                break
        else:
            raise CaptureError(
                f"The written source is not the model: {difference}. Nothing was written.",
                "a split point outside of that class; and please report it, with the class.",
            )
    package, files = attempt.package, attempt.files
    guessed = list(package.source.initial_values.guessed)
    if adapters := package.manifest.checkpoint.adapters:  # other parameters come from the base model's checkpoint
        guessed = [name for name in guessed if name in {*adapters, *patterns_of(adapters)}]
    if guessed and not weights:
        _warn_of_guesses(plan.captured.model_name, guessed)
    listed = {name: ListedFile.of_text(text) for name, text in files.items()}
    proof = Proof(compared, perf_counter() - begin - compared, attempt.forms.described(), tuple(reasons))
    return Generated(files, structs.replace(package.manifest, files=listed), proof)


@dataclass(frozen=True)
class _Attempt:
    """A package in one form of its classes, and where it differs from the captured graph."""

    forms: Forms
    package: Draft
    files: dict[str, str]
    differences: list[GraphDifference]
    seconds: float  # of the comparison

    def lacks_operation_of(self, difference: GraphDifference) -> bool:
        """Return whether the captured graph still has an operation that its stage lacks."""
        places = {(graph_difference.stage, graph_difference.captured) for graph_difference in self.differences}
        return (difference.stage, difference.captured) in places


def _with_graph_statements(attempt: _Attempt, plan: Plan, weights: bool, source: ModelSource | None) -> _Attempt | None:
    """Write the differing statements of an author's text from the graph; None if the first still differs."""
    lines = attempt.forms.graph_lines | author_lines(attempt.package.source, attempt.files, attempt.differences)
    if lines == attempt.forms.graph_lines or len(lines) > _GRAPH_LINES:
        return None
    plainer = _attempt(plan, weights, source, replace(attempt.forms, graph_lines=lines))
    texts = set(map(str, plainer.differences))
    return plainer if str(attempt.differences[0]) not in texts else None


def _attempt(plan: Plan, weights: bool, source: ModelSource | None, forms: Forms) -> _Attempt:
    package, plans = _draft(plan, weights, source, forms)
    files = _files(plan, package, source)
    begin = perf_counter()
    differences = differences_of_text(files, plans)
    return _Attempt(forms, package, files, differences, perf_counter() - begin)


def _draft(plan: Plan, weights: bool, source: ModelSource | None, forms: Forms) -> tuple[Draft, list[Plan]]:
    """A package, and the captured graphs that it must equal: the plan's, and those of other sizes that it takes."""
    drafts: list[tuple[OtherSize, Draft]] = []
    plans = {}
    for size in plan.captured.other_sizes:
        try:
            plans[size.name] = plan.for_capture(size.captured)
            drafts.append((size, draft(plans[size.name], weights, source, forms)))
        except PlanError:  # a cut inside the loop, after an iteration that the other one does not have
            continue
    package = with_general_sizes(draft(plan, weights, source, forms), drafts)
    return package, [plan, *(plans[name] for name in plans if name in package.manifest.sizes)]


def _files(plan: Plan, package: Draft, source: ModelSource | None) -> dict[str, str]:
    model, class_name = source.name if source is not None else plan.captured.model_name, plan.captured.model_name
    origin = f" ({prose(model)})" if model != class_name else ""
    files = package.source.files(f"{prose(class_name)}{origin}")
    if source is not None and source.config is not None:  # for `pipegraph export`
        files[CONFIG] = json_text(dict(source.config)) + "\n"
    return files


def _warn_of_guesses(model: str, names: Sequence[str]) -> None:
    """Warn of parameters that start from guesses. It only matters without weights."""
    listed = patterns_of(names)
    suffix = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    command = for_asker("`pipegraph split FILE`", "split")
    warnings.warn(
        f"How {model} initialises {', '.join(listed[:_LISTED])}{suffix} is not known. Without weights they start from "
        "a guess: normal random numbers with the mean and standard deviation that their values have now, or with 0.02 "
        "if they have no values. Try: correct GUESSES in weights.py of the package, or start from weights; "
        f"{command} sees how build_model() of a file makes parameters with torch.randn, torch.nn.init and the like.",
        stacklevel=4,
    )
