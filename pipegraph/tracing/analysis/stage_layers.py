"""The repeated layers of a package's stages, recognised by the names of their parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.(.+)")


@dataclass(frozen=True)
class Layer:
    """``layers.5`` of a stage. Layers with the same ``structure`` have parameters of the same names."""

    name: str
    structure: tuple[str, ...]


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage.

    Attributes:
        count: of its layers.
        structures: those that the model has more than once.
        first, last: the equal layers at its begin and at its end, from the border on; empty if the stage begins or
            ends with something else.
    """

    count: int
    structures: frozenset[tuple[str, ...]]
    first: tuple[Layer, ...]
    last: tuple[Layer, ...]


def stage_layers(stages: Sequence[Sequence[str]]) -> list[StageLayers]:
    """Return the layers of each stage, given the FQNs of its parameters in the model's order.

    A layer is what stands under an FQN's first number, ``layers.5`` of ``layers.5.norm.weight``. A part of a layer that
    is cut in two counts as a layer, and equals no other because it has fewer names.
    """
    rows = [[_layer(name, list(names)) for name, names in groupby(parameters, key=_name)] for parameters in stages]
    known = Counter(layer.structure for row in rows for layer in row if layer is not None)
    found = []
    for row in rows:
        whole = [layer if layer is not None and known[layer.structure] > 1 else None for layer in row]
        structures = frozenset(layer.structure for layer in whole if layer is not None)
        count = sum(layer is not None for layer in row)
        found.append(StageLayers(count, structures, _equal(whole), _equal(whole[::-1])))
    return found


def _equal(layers: Sequence[Layer | None]) -> tuple[Layer, ...]:
    """Return the layers at the begin that equal the first one."""
    found: list[Layer] = []
    for layer in layers:
        if layer is None or (found and layer.structure != found[0].structure):
            break
        found.append(layer)
    return tuple(found)


def _name(parameter: str) -> str:
    match = _LAYER.fullmatch(parameter)
    return match[1] if match else ""


def _layer(name: str, parameters: Sequence[str]) -> Layer | None:
    if not name:
        return None
    kind = name.rpartition(".")[0]  # layers of two lists, such as an encoder's and a decoder's, are not equal
    return Layer(name, (kind, *sorted(parameter.removeprefix(name) for parameter in parameters)))
