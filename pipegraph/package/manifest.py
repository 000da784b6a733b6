"""The manifest of a package, `pipeline.json`, as dataclasses.

The dataclasses are the JSON, key for key (a stage's ``class_name`` is ``"class"`` there). They check themselves when
made, so that a manifest that exists is one that the runtime can run. Everything wrong is a `PackageError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, Final

from pipegraph.errors import PackageError

SCHEMA_VERSION: Final = 1
_LINE: Final = 120
CALLER: Final = -1
"""The producer of a value that the caller passes in."""


class _NotConstant(Enum):
    NOT_CONSTANT = "NOT_CONSTANT"

    def __repr__(self) -> str:
        return self.value


NOT_CONSTANT: Final = _NotConstant.NOT_CONSTANT


@dataclass(frozen=True, slots=True)
class Value:
    """One value that crosses a boundary, for one microbatch: a tensor, or a constant fixed at capture.

    `dtype` is torch's name without the prefix ("float32"); `producer` a stage or `CALLER`; `consumers` the stages that
    take it, ascending; `bound` an exclusive upper bound for integers; a `constant` has dtype "" and shape ().
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    producer: int
    consumers: tuple[int, ...]
    requires_grad: bool = False
    bound: int | None = None
    constant: object = NOT_CONSTANT

    @property
    def is_constant(self) -> bool:
        return self.constant is not NOT_CONSTANT

    def __str__(self) -> str:
        return f"{self.name} = {self.constant!r}" if self.is_constant else f"{self.name} {self.dtype}{list(self.shape)}"

    def to_dict(self) -> dict[str, Any]:
        entry = {"dtype": self.dtype, "shape": self.shape, "producer": self.producer, "consumers": self.consumers}
        optional = {} if self.bound is None else {"bound": self.bound}
        constant = {"constant": self.constant} if self.is_constant else {}
        return {**entry, "requires_grad": self.requires_grad, **optional, **constant}


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer's FQN, and whether it stands in the model's `state_dict()`."""

    name: str
    persistent: bool = True

    def to_json(self) -> str | dict[str, Any]:
        return self.name if self.persistent else {"name": self.name, "persistent": False}

    @staticmethod
    def from_json(entry: str | Mapping[str, Any]) -> Buffer:
        return Buffer(entry) if isinstance(entry, str) else Buffer(entry["name"], entry["persistent"])


@dataclass(frozen=True, slots=True)
class StageEntry:
    """One stage: `module` is its file without `.py`; `inputs` and `outputs` name values in the order of its forward."""

    index: int
    module: str
    class_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    weights: str | None = None
    cost: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        entry = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "class_name"}
        return {**entry, "class": self.class_name, "buffers": [buffer.to_json() for buffer in self.buffers]}

    @staticmethod
    def from_dict(entry: Mapping[str, Any]) -> StageEntry:
        plain: dict[str, Any] = {key: entry[key] for key in ("index", "module", "weights", "cost")}
        plain |= {key: tuple(entry[key]) for key in ("inputs", "outputs", "parameters")}
        return StageEntry(class_name=entry["class"], buffers=tuple(map(Buffer.from_json, entry["buffers"])), **plain)


@dataclass(frozen=True)
class Manifest:
    """`pipeline.json`. The leaves of `args`, `kwargs` and `outputs` are names of `values`, or None.

    `checkpoint` says what a Hugging Face checkpoint calls the tensors that it does not call as the model does.
    Every output is an output of the last stage; a value from an earlier stage, or from the caller, that the model
    returns is an input and an output of the last stage. Lists become tuples.
    """

    generator: str
    model: dict[str, Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: Any
    values: dict[str, Value]
    stages: tuple[StageEntry, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    checkpoint: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in ("args", "kwargs", "outputs"):
            object.__setattr__(self, name, _tuples(getattr(self, name)))
        for problem in _problems(self):
            raise PackageError(problem)

    def to_json(self) -> str:
        entry = {item.name: getattr(self, item.name) for item in fields(self)}
        entry["values"] = {name: value.to_dict() for name, value in self.values.items()}
        entry["stages"] = [stage.to_dict() for stage in self.stages]
        # Sorted, but for what the model takes and returns: a loss may unpack a dict's values in the model's order.
        ordered = {"args", "kwargs", "outputs"}
        parts = {key: entry[key] if key in ordered else _sorted(entry[key]) for key in sorted(entry)}
        return _json(parts) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """The manifest in `text`; `where` (a path) opens the message of every error."""
        try:
            entry = json.loads(text)
        except json.JSONDecodeError as error:
            raise PackageError(
                f"{where} is not JSON, or truncated: {error}. Write it anew: `pipegraph split`."
            ) from None
        version = entry.get("schema_version") if isinstance(entry, dict) else None
        if not isinstance(version, int):
            raise PackageError(f"{where} has no schema_version: it is no manifest of pipegraph.")
        if version > SCHEMA_VERSION:
            reads = f"this pipegraph reads up to {SCHEMA_VERSION}. Upgrade pipegraph, or split the model again."
            raise PackageError(f"{where} has schema_version {version}; {reads}")
        try:
            plain = {key: entry[key] for key in ("generator", "model", "args", "kwargs", "outputs", "plan", "files")}
            values = {name: _value(name, value) for name, value in entry["values"].items()}
            stages = tuple(map(StageEntry.from_dict, entry["stages"]))
            tied = tuple(map(tuple, entry["tied"]))
            plain |= {"requires": tuple(entry.get("requires", ())), "checkpoint": dict(entry.get("checkpoint", {}))}
            return cls(values=values, stages=stages, tied=tied, schema_version=version, **plain)
        except KeyError as error:
            raise PackageError(f"{where}: the key {error} is missing. Write it anew: `pipegraph split`.") from None
        except (TypeError, AttributeError, ValueError, IndexError) as error:
            raise PackageError(f"{where} has not the form of a manifest: {error}.") from None
        except PackageError as error:
            raise PackageError(f"{where}: {error}") from None

    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) pairs of stages between which a value crosses, ascending."""
        return _edges(value for value in self.values.values())

    def gradient_edges(self) -> tuple[tuple[int, int], ...]:
        """Those edges over which a gradient comes back: at least one of their values requires one."""
        return _edges(value for value in self.values.values() if value.requires_grad)

    def edge_values(self, producer: int, consumer: int) -> tuple[str, ...]:
        """The values that cross from `producer` to `consumer`, in the order of the consumer's inputs."""
        return tuple(name for name in self.stages[consumer].inputs if self.values[name].producer == producer)

    def stored_name(self, parameter: str) -> str:
        """The name under which a parameter stands in the weights: the first of its tied group."""
        return next((group[0] for group in self.tied if parameter in group), parameter)


def leaves(structure: Any) -> Iterator[str | None]:
    """The leaves of a nested structure of `args`, `kwargs` or `outputs`, in order."""
    if isinstance(structure, Mapping):
        structure = tuple(structure.values())
    if not isinstance(structure, (list, tuple)):
        yield structure
    else:
        for item in structure:
            yield from leaves(item)


def leaves_folder(path: str) -> bool:
    """Whether a path names something outside of the folder that it is relative to, on any system."""
    pure = PurePosixPath(path)
    return pure.is_absolute() or ".." in pure.parts or "\\" in path or ":" in path


def _tuples(structure: Any) -> Any:
    if isinstance(structure, Mapping):
        return {key: _tuples(item) for key, item in structure.items()}
    return tuple(map(_tuples, structure)) if isinstance(structure, (list, tuple)) else structure


def _json(item: Any, indent: str = "") -> str:
    """JSON that people can read: what fits on a line stands on one."""
    line = json.dumps(item, ensure_ascii=False)
    if not item or not isinstance(item, (dict, list, tuple)) or len(indent) + len(line) <= _LINE:
        return line
    if isinstance(item, dict):
        inner = [f"{json.dumps(key, ensure_ascii=False)}: {_json(item[key], indent + ' ')}" for key in item]
    else:
        inner = [_json(each, indent + " ") for each in item]
    opening, closing = "{}" if isinstance(item, dict) else "[]"
    return f"{opening}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{closing}"


def _sorted(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _sorted(item[key]) for key in sorted(item)}
    return [_sorted(each) for each in item] if isinstance(item, (list, tuple)) else item


def _value(name: str, entry: Mapping[str, Any]) -> Value:
    shape, consumers = tuple(entry["shape"]), tuple(entry["consumers"])
    plain = {key: entry[key] for key in ("dtype", "producer", "requires_grad")}
    optional = {key: entry[key] for key in ("bound", "constant") if key in entry}
    return Value(name, shape=shape, consumers=consumers, **plain, **optional)


def _edges(values: Iterator[Value]) -> tuple[tuple[int, int], ...]:
    pairs = {(value.producer, consumer) for value in values for consumer in value.consumers}
    return tuple(sorted(pair for pair in pairs if pair[0] != CALLER))


def _problems(manifest: Manifest) -> Iterator[str]:
    """What a runtime could not run, as messages."""
    stages, values = manifest.stages, manifest.values
    if not stages or [stage.index for stage in stages] != list(range(len(stages))):
        yield f"stages must be numbered from 0, and there is at least one; found {[stage.index for stage in stages]}."
    for path in [*manifest.files, *(stage.weights for stage in stages if stage.weights)]:
        if leaves_folder(path):
            yield f"the path {path!r} leaves the package's folder."
    for stage in stages:
        if not (stage.module.isidentifier() and stage.class_name.isidentifier()):
            yield f"stage {stage.index}: {stage.module!r} and {stage.class_name!r} must be names of Python."
        for name in stage.inputs + stage.outputs:
            if name not in values:
                yield f"stage {stage.index} names {name!r}, which is not one of the values."
        for name in stage.inputs:
            if values[name].producer >= stage.index or stage.index not in values[name].consumers:
                yield f"stage {stage.index} takes {name!r} ({values[name]}), which does not reach it."
    for value in values.values():
        for consumer in value.consumers:
            if not (value.producer < consumer < len(stages) and value.name in stages[consumer].inputs):
                yield f"{value.name!r} goes to stage {consumer}, which does not take it."
        if value.producer != CALLER and value.name not in stages[value.producer].outputs:
            yield f"{value.name!r} comes from stage {value.producer}, which does not return it."
    for leaf in leaves((manifest.args, manifest.kwargs)):
        if leaf is not None and (leaf not in values or values[leaf].producer != CALLER):
            yield f"the argument {leaf!r} is not a value that the caller passes."
    for leaf in leaves(manifest.outputs):
        if leaf is not None and leaf not in stages[-1].outputs:
            yield f"the output {leaf!r} is not an output of the last stage."
