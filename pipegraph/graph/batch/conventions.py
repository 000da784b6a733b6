"""Roles that follow from the names of transformers' arguments, which the library uses for one thing alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor, nn

from pipegraph.graph.batch_report import BatchRole

_LISTS: Final = frozenset(
    ["image_grid_thw", "video_grid_thw", "pixel_values_videos", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"]
)
"""Arguments that describe the parts of one flat stream: no dimension of theirs is that of the rows."""


def conventional_roles(model: nn.Module, leaves: Sequence[tuple[str, Any]]) -> Iterator[tuple[int, BatchRole]]:
    """(Position, role) of inputs of a model of transformers whose names say their role.

    Patches of images are one flat stream if their grids are given beside them; else there is one image for each row of
    text, if there are equally many. Positions of several axes are ``[axes, batch, length]``.

    Args:
        leaves: the name and the value of each leaf of the inputs.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    names = {name for name, _ in leaves}
    texts = (leaf for name, leaf in leaves if name in ("input_ids", "inputs_embeds") and isinstance(leaf, Tensor))
    rows = next((len(text) for text in texts), None)
    for position, (name, leaf) in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        is_stream = name == "pixel_values" and "image_grid_thw" in names and leaf.dim() == 2
        if name in _LISTS or is_stream:
            yield position, BatchRole("list")
        elif name == "position_ids" and leaf.dim() == 3:
            yield position, BatchRole("rows", 1)
        elif name == "pixel_values" and leaf.shape[0] == rows:
            yield position, BatchRole("rows", 0)
