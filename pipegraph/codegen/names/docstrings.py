"""Text for the docstrings of generated classes: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from pipegraph.graph.graph_text import type_text


def prose(text: str) -> str:
    """Text for a docstring or a comment: ASCII and our own signs as they are, everything else escaped."""
    return "".join(_prose_character(character) for character in text)


def _prose_character(character: str) -> str:
    if character in '\\"':
        return "\\\\" if character == "\\" else "'"
    if character in "…→–" or (character.isascii() and character.isprintable()):
        return character
    return character.encode("unicode_escape").decode("ascii").replace("\\", "\\\\")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def signature(parameters: Sequence[str], reads: Sequence[fx.Node], makes: Sequence[fx.Node]) -> str:
    """``h f32[8, 128, 512] → logits f32[8, 128, 10000]`` (results of a block have no name)."""
    taken = ", ".join(f"{name} {_type(node)}" for name, node in zip(parameters, reads, strict=True))
    return f"{taken or 'nothing'} → {', '.join(_type(node) for node in makes)}"


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    return type_text(value) if isinstance(value, torch.Tensor) else "tuple"
