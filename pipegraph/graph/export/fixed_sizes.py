"""The sizes of inputs that do not vary, each with the line of the model or the reason."""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.graph.export.dynamic_shapes import WantedSizes
from pipegraph.graph.export.input_sizes import InputSizes
from pipegraph.graph.export.torch_export import Exported
from pipegraph.graph.symbolic_size import FixedSize, InputDimension


def fixed_sizes(
    exported: Exported, sizes: InputSizes, wanted: WantedSizes
) -> Iterator[tuple[InputDimension, FixedSize]]:
    """The sizes of inputs that do not vary.

    Args:
        exported: the program.
        sizes: of its inputs.
        wanted: what the user says of them.
    """
    for name, (position, dim), size in sizes.fixed():
        line = exported.lines.get(f"L['{name}'].size()[{dim}]", "")
        if wanted.fixed is None or (position, dim) in wanted.fixed:
            reason = "dynamic_shapes fixes it"
        elif size < 2:
            reason = "the example has no more, and 1 may stand for a size that is broadcast; capture 2 or more"
        elif exported.fixed is None:
            reason = f"no size varies: {exported.obstacle}"
        elif (position, dim) in exported.fixed:
            reason = "the model computes from it what a stage cannot express"
        else:
            reason = "the model fixes it"
        known = size > 1 and exported.fixed is not None and (position, dim) not in exported.fixed
        yield (position, dim), FixedSize(f"{name}.shape[{dim}]", size, line if known else "", reason)
