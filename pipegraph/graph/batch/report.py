"""The report on the rows of a batch: what the rules prove, and what values decide for operators without a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import fx

from pipegraph.graph.batch.roles import DeclaredRoles, RoleAssignment
from pipegraph.graph.batch.row_proof import RowProof
from pipegraph.graph.batch.row_state import Invariant, Rows
from pipegraph.graph.batch_report import BatchReport, BatchRole, MixingOperator, Proof
from pipegraph.graph.custom_functions import applied_function
from pipegraph.graph.nodes import arguments_of, source_line
from pipegraph.graph.operators import Loop, operator_of
from pipegraph.torch_private.operators import OpOverload, operator_name

Compare = Callable[[Mapping[str, BatchRole]], bool | None]
"""Roles → whether the model gives the same for a batch as for its halves; None if that cannot be computed."""

_NAMES: Final = {
    "native_batch_norm": "batch norm",
    "_native_batch_norm_legit": "batch norm",
    "batch_norm": "batch norm",
}
_MOST: Final = 8  # operators of one kind that a report names


def report_rows(graph: fx.Graph, roles: RoleAssignment, declared: DeclaredRoles, compare: Compare) -> BatchReport:
    """Report on the rows of a graph, in both of its modes.

    Args:
        graph: of the model.
        roles: of its inputs.
        declared: what the user declared.
        compare: decides what the rules cannot.
    """
    proof = roles.prove(graph)
    mixing = tuple(_operators(proof.certain))
    kind: Proof = "rules"
    by_design = [*_by_design(graph)]
    by_design += [replace(operator, result="number") for operator in _operators(proof.scalars)]
    by_design += [replace(operator, result="buffer") for operator in _operators(proof.updates)]
    if proof.undecided and not proof.certain:
        equal = compare(roles.roles)
        kind = "values" if equal is not None else "declared" if declared.rows else ""
        if equal is False or not kind:
            mixing = tuple(_operators(proof.undecided, "" if kind else "for which there is no rule"))
    if any(role.kind == "list" for role in roles.roles.values()):
        by_design, mixing = [*by_design, *mixing], ()  # the caller divides the batch, and each part is a batch
    return BatchReport(
        roles=roles.roles,
        dims=_dims(proof),
        target_dim=declared.target_dim,
        proof=kind,
        per_microbatch=tuple(dict.fromkeys(by_design)),
        mixing=mixing,
        suggestion=roles.suggestion,
    )


def _dims(proof: RowProof) -> dict[fx.Node, int | None]:
    """Value → the dimension of its rows, for all values of which that is known."""
    dims: dict[fx.Node, int | None] = {}
    for node, state in proof.states.items():
        if isinstance(state, (Rows, Invariant)):
            dims[node] = state.dim if isinstance(state, Rows) else None
    return dims


def _operators(nodes: Iterable[fx.Node], purpose: str = "") -> Iterator[MixingOperator]:
    """The operators of nodes, each once, as messages name them."""
    operators = dict.fromkeys(
        MixingOperator(f"{_name(node)}{f', {purpose}' if purpose else ''}", _line(node)) for node in nodes
    )
    yield from list(operators)[:_MOST]


def _name(node: fx.Node) -> str:
    function = applied_function(node.target)
    if function is not None:
        return function.function.__name__
    name = operator_name(node.target)[0] if isinstance(node.target, OpOverload) else str(node.target)
    return _NAMES.get(name, name.strip("_"))


def _line(node: fx.Node) -> str:
    """``model.py:12`` of a node: the name of the file, so that a package does not depend on a machine's folders."""
    path, _, location = source_line(node).rpartition(".py:")
    return f"{Path(path).name}.py:{location.partition(':')[0]}" if path else ""


def _by_design(graph: fx.Graph) -> Iterator[MixingOperator]:
    """Batch norm in training, and random numbers: each microbatch has its own."""
    random, norms = False, []
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        row = operator_of(node)
        if _NAMES.get(operator_name(node.target)[0]) and _trains(node):
            norms.append(node)
        named = arguments_of(node)
        is_dropout = bool(named.get("p") if row.dropout else named.get("dropout_p"))
        function = applied_function(node.target)
        random = random or is_dropout or row.loop is Loop.RANDOM or (function is not None and function.draws)
    yield from _operators(norms)
    if random:
        yield MixingOperator("random numbers")


def _trains(node: fx.Node) -> bool:
    """Return whether a batch norm computes the statistics of its batch in some mode."""
    named = arguments_of(node)
    return named.get("training", named.get("use_input_stats", True)) is not False
