"""The lines on the batch of a package: the role of each input, and what is computed for each microbatch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pipegraph.errors import one_line
from pipegraph.package import CALLER, Manifest, RowOperator, Value

_MOST = 4  # operators that a line names


def batch_lines(manifest: Manifest) -> list[str]:
    """Return what a user has to know of the batch: a line on the inputs, and one on each kind of operator.

    Operators that mix rows are printed with a cure, because such a package runs one microbatch.
    """
    values = [value for value in manifest.values.values() if value.producer == CALLER and not value.is_constant]
    if not values:
        return []
    lines = [f"batch: {', '.join(f'{one_line(value.name)} {role_text(value)}' for value in values)}"]
    batch = manifest.batch
    if batch.per_microbatch:
        lines.append(f"computed per microbatch: {_named(batch.per_microbatch)}")
    if batch.mixing:
        cure = f"--batch-dim {batch.suggestion}, " if batch.suggestion else "a role for an input (--batch-dim), "
        lines.append(f"mixes the rows of a batch: {_named(batch.mixing)}; so a step cuts no batch into microbatches.")
        lines.append(f"Try: {cure}lists of microbatches, or one microbatch.")
    return lines


def role_text(value: Value) -> str:
    """``rows (0)``, ``whole`` or ``list``: the dimension of the rows is in parentheses."""
    return f"rows ({value.batch_dim})" if value.batch_role == "rows" else value.batch_role


def batch_dict(manifest: Manifest) -> dict[str, Any]:
    """Return the same as data."""
    inputs = {
        value.name: {"role": value.batch_role, "dim": value.batch_dim}
        for value in manifest.values.values()
        if value.producer == CALLER and not value.is_constant
    }
    return {"inputs": inputs, **msgspec.to_builtins(manifest.batch)}


def _named(operators: tuple[RowOperator, ...]) -> str:
    return ", ".join(_texts(operators))


def _texts(operators: tuple[RowOperator, ...]) -> Iterator[str]:
    yield from (one_line(str(operator)) for operator in operators[:_MOST])
    if len(operators) > _MOST:
        yield f"{len(operators) - _MOST} more"
