"""The manifest of a package, `pipeline.json`, as frozen structures.

The structures are the JSON, key for key (``class_name`` is ``"class"`` there). They check themselves when made, so that
a manifest that exists is one that the runtime can run. Everything wrong is a `PackageError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipegraph.errors import PackageError, nearest
from pipegraph.package.json_file import KEY, Count, Entry, Figure, FileKind, Name, Text, clipped, json_text, shortened
from pipegraph.package.prediction import Prediction
from pipegraph.package.sizes import Condition, Dimension, Size, evaluate, holds
from pipegraph.progress import track
from pipegraph.recompute import DEFAULT
from pipegraph.units import format_bytes

SCHEMA_VERSION: Final = 3
_DEEPEST: Final = 32
_LONGEST_NAME: Final = 255  # bytes, on every common file system
_ADVICE: Final = "Try: restore the file, or write the package again: `pipegraph split MODEL -o OUT`."

Nested = Any
"""Nested objects and lists whose leaves are names of values, or null."""

# ---- listed files ----------------------------------------------------------------------------------------------------
# The files that a package or a checkpoint lists, with their sizes and digests.


_THREADS: Final = 8
"""Threads that read files: hashlib releases the interpreter."""

Digest = Annotated[str, Meta(pattern="^sha256 [0-9a-f]{64}$")]


class ListedFile(Entry, frozen=True):
    """A file as it was written.

    Attributes:
        bytes: its size; None in a package of an older version of pipegraph.
        digest: of its content.
    """

    bytes: Count | None
    digest: Digest

    @classmethod
    def of_text(cls, text: str) -> ListedFile:
        """The entry of a file with this text, in UTF-8."""
        content = text.encode()
        return cls(len(content), f"sha256 {hashlib.sha256(content).hexdigest()}")

    @classmethod
    def read(cls, path: Path) -> ListedFile:
        """The entry of a file, which is read. Raises OSError."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}")

    def problem(self, path: Path) -> str:
        """What differs between the file and this entry; empty if nothing does. The file is there."""
        size = path.stat().st_size
        if self.bytes is not None and size != self.bytes:
            return f"it has {format_bytes(size)}, and was written with {format_bytes(self.bytes)}"
        return "" if ListedFile.read(path).digest == self.digest else "its content is not what was written"


def problems_of(folder: Path, files: Mapping[str, ListedFile]) -> dict[str, str]:
    """Name of each file that is there and differs from its entry → what differs. All of them are read."""
    names = sorted(name for name in files if (folder / name).is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        pending = [threads.submit(files[name].problem, folder / name) for name in names]
        results = zip(names, track("checking weights", pending), strict=True)
        return {name: result.result() for name, result in results if result.result()}


# ---- entries ---------------------------------------------------------------------------------------------------------


CALLER: Final = -1
"""The producer of a value that the caller passes in."""

Constant = bool | int | float | str | None

Role = Literal["rows", "whole", "list"]
"""How an input is given to microbatches: cut along a dimension, unchanged, or as a list with one value for each."""


class Value(Entry, frozen=True, rename={"name": KEY}):
    """One value that crosses a boundary, for one microbatch: a tensor, or a constant fixed at capture.

    Attributes:
        name: its key among the values.
        dtype: torch's name without the prefix (``"float32"``); ``""`` for a constant.
        shape: numbers, and expressions of the manifest's sizes.
        producer: a stage, or `CALLER`.
        consumers: the stages that take it, ascending.
        requires_grad: whether a gradient comes back for it.
        bound: an exclusive upper bound for integers.
        batch_dim: the dimension along which it is cut into microbatches, or joined from them; None if it has no rows.
        role: of an input; UNSET for other values. Use `batch_role`, which also reads packages of older versions.
        constant: the constant; UNSET for a tensor.
        keeps_dtype: True if it has this dtype even if the model is converted to another one.
        dim_order: its dimensions as they lie in memory, outermost first, as in `torch.Tensor.dim_order`; UNSET for a
            contiguous tensor.
    """

    name: Name
    dtype: Text
    shape: tuple[Dimension, ...]
    producer: Annotated[int, Meta(ge=CALLER, le=10**6)]
    consumers: tuple[Count, ...]
    requires_grad: bool = False
    bound: Count | None = None
    batch_dim: Count | None = None
    constant: Constant | UnsetType = UNSET
    keeps_dtype: bool | UnsetType = UNSET
    dim_order: tuple[Count, ...] | UnsetType = UNSET
    role: Role | UnsetType = UNSET

    @property
    def batch_role(self) -> Role:
        """The role of an input."""
        if self.role is not UNSET:
            return self.role
        return "whole" if self.batch_dim is None else "rows"

    @property
    def is_constant(self) -> bool:
        return self.constant is not UNSET

    def shape_at(self, sizes: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """The shape in numbers. Raises PackageError for a size that is not among ``sizes``."""
        return tuple(evaluate(dimension, sizes or {}) for dimension in self.shape)

    def __str__(self) -> str:
        return f"{self.name} = {self.constant!r}" if self.is_constant else f"{self.name} {self.type_text}"

    @property
    def type_text(self) -> str:
        """``float32[batch, 128]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Buffer(Entry, frozen=True):
    """A buffer's FQN, and whether it is in the model's `state_dict()`."""

    name: Name
    persistent: bool = True


class StageCost(Entry, frozen=True):
    """The cost of one microbatch on one stage; None for unknown values.

    Attributes:
        flops: floating-point operations of the forward; the backward takes about twice this number.
        parameters: elements of the stage's parameters, a tied weight counted once.
        parameter_bytes: the size of the parameters; of a plan, in the dtype that it computes in.
        trained_bytes: of these, the size of the parameters that have a gradient.
        added_bytes: the part of ``trained_bytes`` whose gradients are made before they are added; None for all.
        optimizer_bytes: the optimizer's state; None for AdamW's two moments in the dtype of the parameters.
        buffer_bytes: buffers and constants.
        input_bytes, output_bytes: bytes that the stage receives from other stages and sends to them.
        saved_bytes: activations that F keeps for the backward.
        weight_saved_bytes: values kept from the end of I to the end of W.
        offloaded_bytes: the part of ``saved_bytes`` that waits in CPU memory; None for 0.
        transient_bytes: memory that F, I, W and B need while they run, as `pipegraph.cost.TransientBytes` counts it.
        forward, input_grad, weight_grad: predicted seconds of F, I and W.
    """

    flops: Count | None = None
    parameters: Count | None = None
    parameter_bytes: Count | None = None
    trained_bytes: Count | None = None
    buffer_bytes: Count | None = None
    input_bytes: Count | None = None
    output_bytes: Count | None = None
    saved_bytes: Count | None = None
    weight_saved_bytes: Count | None = None
    offloaded_bytes: Count | None = None
    transient_bytes: tuple[Count, Count, Count, Count] | None = None
    added_bytes: Count | None = None
    optimizer_bytes: Count | None = None
    forward: Figure | None = None
    input_grad: Figure | None = None
    weight_grad: Figure | None = None

    @property
    def times(self) -> tuple[float, float, float] | None:
        """Seconds of F, I and W; None if they were not predicted."""
        if self.forward is None or self.input_grad is None or self.weight_grad is None:
            return None
        return self.forward, self.input_grad, self.weight_grad

    def to_dict(self) -> dict[str, float]:
        """The fields by name, without those that are not known."""
        return {name: figure for name, figure in msgspec.to_builtins(self).items() if figure is not None}


class StageEntry(Entry, frozen=True, rename={"class_name": "class"}):
    """One stage: `module` is its file without `.py`; `inputs` and `outputs` name values in the order of its forward.

    Attributes:
        untrained: trainable parameters that the model does not train, or not with every loss; UNSET if empty.
        draws: module of the stage → the names of the random numbers that it draws in training, in order. Modules with
            only their own names, numbered from 0, are left out: ``{"layers.4": ["layers.4#1"]}`` has the second random
            number of a layer that is cut after the first. UNSET if empty.
    """

    index: Count
    module: Name
    class_name: Name
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    parameters: tuple[Name, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    weights: Name | None = None
    cost: StageCost = StageCost()
    untrained: tuple[Name, ...] | UnsetType = UNSET
    draws: dict[Text, tuple[Name, ...]] | UnsetType = UNSET


class ModelEntry(Entry, frozen=True, rename={"class_name": "class"}):
    """The model that was split: where it came from, its class, and the sha256 of its source."""

    source: Text = ""
    class_name: Text = ""
    sha256: Text = ""


class RowOperator(Entry, frozen=True):
    """An operator whose result in one row depends on other rows of the batch.

    Attributes:
        operator: what it is: ``cumsum``, ``batch norm``.
        line: its line in the model's source: ``model.py:12``; "" if it is not known.
        result: "number" if it gives one number for all rows, such as a loss; "buffer" if it updates a buffer.
    """

    operator: Text
    line: Text = ""
    result: Literal["rows", "number", "buffer"] = "rows"

    def __str__(self) -> str:
        return f"{self.operator} ({self.line})" if self.line else self.operator


class BatchEntry(Entry, frozen=True):
    """What is known of the rows of a batch.

    Attributes:
        proof: how the roles of the inputs were proved: "rules" (operator by operator), "values" (the whole batch was
            compared with its halves), "declared" (by the user alone); "" in packages of older versions.
        per_microbatch: operators that mix rows by design, such as batch norm, and are computed for each microbatch.
        mixing: operators that mix rows otherwise. A batch is not cut into several microbatches then; lists of
            microbatches are right.
        suggestion: the role ``name=dimension`` with which nothing mixes rows, if there is such a dimension.
        target_dim: the dimension of the rows of a target; None for that of the outputs.
    """

    proof: Literal["", "rules", "values", "declared"] = ""
    per_microbatch: tuple[RowOperator, ...] = ()
    mixing: tuple[RowOperator, ...] = ()
    suggestion: Text = ""
    target_dim: Count | None = None


class PlanEntry(Entry, frozen=True):
    """Where the model was cut: the split points, the modules of each stage in words and, if it was priced, why.

    Attributes:
        layout: of the stages as Megatron writes it, ``Et*3|(tt|)*4,L``; UNSET if they are not of whole layers.
    """

    points: tuple[Name, ...] = ()
    stages: tuple[str, ...] = ()
    prediction: Prediction | None = None
    layout: Text | UnsetType = UNSET


class CheckpointNames(Entry, frozen=True):
    """The names in a Hugging Face checkpoint that differ from the model's.

    Attributes:
        base_model_prefix: what a checkpoint of the base model alone leaves out.
        stored: name of ``state_dict()`` → the names of its parts in the order in which they are joined; a ``*`` counts
            the first dimension. No parts: only transformers can read it.
        adapters: the parameters of adapters, which a checkpoint of the base model lacks; unset without adapters.
    """

    base_model_prefix: Text = ""
    stored: dict[Name, tuple[Name, ...]] = msgspec.field(default_factory=dict)
    adapters: tuple[Name, ...] | UnsetType = UNSET


# ---- manifest --------------------------------------------------------------------------------------------------------


class Manifest(Entry, frozen=True, kw_only=True):
    """`pipeline.json`.

    Every output is an output of the last stage; a value from an earlier stage, or from the caller, that the model
    returns is an input and an output of the last stage. Lists are tuples; `outputs_in` knows which were lists.

    Attributes:
        generator: the version of pipegraph that wrote the package.
        model, plan: what was split, and where.
        args, kwargs, outputs: what the model takes and returns, nested as it does; the leaves are names of `values`.
        evaluation_outputs: what it returns in evaluation mode; None if that is `outputs`, too.
        lists: the places in both that are lists, and no tuples: `outputs['aux']`.
        sizes: the dimensions that may vary, by name.
        conditions: what the stages take for granted of the sizes.
        values: everything that crosses, by name.
        stages: in order.
        tied: groups of parameters that are one; the weights hold it under the first name.
        files: generated file → its size and digest.
        shards: file of weights, or their index → its size and digest.
        requires: libraries that the package imports.
        checkpoint: names in a Hugging Face checkpoint.
        tp_plan: glob of module names → style of tensor parallelism.
        recompute: what backwards compute again if no plan says it: what the model checkpoints, as
            `pipegraph.recompute.Recompute` reads it.
        batch: what is known of the rows of a batch.
    """

    schema_version: int = SCHEMA_VERSION
    generator: Text
    model: ModelEntry
    args: Nested
    kwargs: dict[str, Nested]
    outputs: Nested
    evaluation_outputs: Nested = None
    lists: tuple[Text, ...] = ()
    sizes: dict[Name, Size] = msgspec.field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    values: dict[Name, Value]
    stages: tuple[StageEntry, ...]
    tied: tuple[Annotated[tuple[Name, ...], Meta(min_length=1)], ...] = ()
    plan: PlanEntry = PlanEntry()
    files: dict[Name, ListedFile] = msgspec.field(default_factory=dict)
    shards: dict[Name, ListedFile] = msgspec.field(default_factory=dict)
    requires: tuple[Name, ...] = ()
    checkpoint: CheckpointNames = CheckpointNames()
    tp_plan: dict[Name, Name] = msgspec.field(default_factory=dict)
    recompute: Text = DEFAULT
    batch: BatchEntry = BatchEntry()

    def __post_init__(self) -> None:
        for name in ("args", "kwargs", "outputs", "evaluation_outputs"):
            msgspec.structs.force_setattr(self, name, _tuples(getattr(self, name), name))
        for place, problem in _problems(self):
            raise PackageError(shortened(f"{place}: {problem}"))

    def to_json(self) -> str:
        entry = msgspec.to_builtins(self)
        for value in entry["values"].values():
            del value[KEY]
            if value["bound"] is None:
                del value["bound"]
        for plain, stage in zip(entry["stages"], self.stages, strict=True):
            plain["cost"] = stage.cost.to_dict()
            plain["buffers"] = [
                buffer.name if buffer.persistent else msgspec.to_builtins(buffer) for buffer in stage.buffers
            ]
        if self.recompute == DEFAULT:
            del entry["recompute"]
        if self.evaluation_outputs is None:
            del entry["evaluation_outputs"]
        if not self.lists:
            del entry["lists"]
        if self.batch == BatchEntry():
            del entry["batch"]
        if self.plan.prediction is not None:
            entry["plan"]["prediction"] = self.plan.prediction.to_dict()
        # Sorted, but for what the model takes and returns: a loss may unpack a dict's values in the model's order.
        ordered = {"args", "kwargs", "outputs", "evaluation_outputs"}
        return json_text({key: entry[key] if key in ordered else _sorted(entry[key]) for key in sorted(entry)}) + "\n"

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Read a file. Raises PackageError."""
        return _KIND.read(file)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """The manifest in `text`; `where` (a path) opens the message of every error."""
        return _KIND.decode(text, where)

    @property
    def prediction(self) -> Prediction | None:
        """The prediction of a step; None if the plan was not priced."""
        return self.plan.prediction

    @property
    def captured_sizes(self) -> dict[str, int]:
        """The value of each size at capture."""
        return {name: size.captured for name, size in self.sizes.items()}

    def caller_tensors(self, stage: int | None = None) -> list[Value]:
        """The tensors that the caller passes in, to one stage or to any."""
        names = self.values if stage is None else self.stages[stage].inputs
        values = [self.values[name] for name in names]
        return [value for value in values if value.producer == CALLER and not value.is_constant]

    def outputs_in(self, training: bool) -> Nested:
        """What the model returns in a mode, with its lists and tuples."""
        name = "outputs" if training or self.evaluation_outputs is None else "evaluation_outputs"
        return _with_lists(getattr(self, name), name, self.lists)

    def at_capture(self) -> Manifest:
        """The same with the numbers at capture in all shapes."""
        values = {
            name: msgspec.structs.replace(value, shape=value.shape_at(self.captured_sizes))
            for name, value in self.values.items()
        }
        return msgspec.structs.replace(self, values=values)

    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) pairs of stages between which a value crosses, ascending."""
        return _edges(self.values.values())

    def gradient_edges(self) -> tuple[tuple[int, int], ...]:
        """The edges over which a gradient comes back: at least one of their values requires one."""
        return _edges(value for value in self.values.values() if value.requires_grad)

    def edge_values(self, producer: int, consumer: int) -> tuple[str, ...]:
        """The values that cross from `producer` to `consumer`, in the order of the consumer's inputs."""
        return tuple(name for name in self.stages[consumer].inputs if self.values[name].producer == producer)

    def stored_name(self, parameter: str) -> str:
        """Return the name of a parameter in the weights: the first of its tied group."""
        return next((group[0] for group in self.tied if parameter in group), parameter)


def leaves(structure: Nested) -> Iterator[str | None]:
    """The leaves of a nested structure of `args`, `kwargs` or `outputs`, in order."""
    if isinstance(structure, Mapping):
        structure = tuple(structure.values())
    if not isinstance(structure, (list, tuple)):
        yield structure
    else:
        for item in structure:
            yield from leaves(item)


def path_problem(path: str) -> str:
    """Return why a path cannot name a file of the folder that it is relative to, on any system; empty if it can."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or ":" in path:
        return f"the path {clipped(repr(path))} leaves the package's folder"
    if "\0" in path or any(len(part.encode(errors="surrogatepass")) > _LONGEST_NAME for part in pure.parts):
        return f"{clipped(repr(path))} is not a file name: it has a null character, or too many characters"
    return ""


def sequences(structure: Nested, place: str) -> Iterator[tuple[str, list[Nested] | tuple[Nested, ...]]]:
    """The lists and tuples in a nested structure, each with its place: `outputs['aux'][1]`."""
    if isinstance(structure, (list, tuple)):
        yield place, structure
        structure = dict(enumerate(structure))
    for key, item in structure.items() if isinstance(structure, Mapping) else ():
        yield from sequences(item, f"{place}[{key!r}]")


def _with_lists(structure: Nested, place: str, lists: Container[str]) -> Nested:
    if isinstance(structure, Mapping):
        return {key: _with_lists(item, f"{place}[{key!r}]", lists) for key, item in structure.items()}
    if not isinstance(structure, tuple):
        return structure
    items = (_with_lists(item, f"{place}[{key}]", lists) for key, item in enumerate(structure))
    return list(items) if place in lists else tuple(items)


def _tuples(structure: Nested, place: str, depth: int = 0) -> Nested:
    if depth > _DEEPEST:
        raise PackageError(f"{place}: it is nested more than {_DEEPEST} deep")
    if isinstance(structure, Mapping):
        return {key: _tuples(item, place, depth + 1) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_tuples(item, place, depth + 1) for item in structure)
    if structure is not None and not isinstance(structure, str):
        raise PackageError(f"{place}: its leaf {structure!r} must be the name of a value, or null")
    return structure


def _sorted(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _sorted(item[key]) for key in sorted(item)}
    return [_sorted(member) for member in item] if isinstance(item, (list, tuple)) else item


def _edges(values: Iterable[Value]) -> tuple[tuple[int, int], ...]:
    pairs = {(value.producer, consumer) for value in values for consumer in value.consumers}
    return tuple(sorted(pair for pair in pairs if pair[0] != CALLER))


def _problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(place, what is wrong there) of what a runtime could not run."""
    stages, values = manifest.stages, manifest.values
    if not stages or [stage.index for stage in stages] != list(range(len(stages))):
        yield "stages", f"they are numbered {[stage.index for stage in stages]}, and must be numbered from 0"
    for place in ("files", "shards"):
        for problem in filter(None, map(path_problem, getattr(manifest, place))):
            yield place, problem
    for stage in stages:
        place = f"stages[{stage.index}]"
        if stage.weights and (problem := path_problem(stage.weights)):
            yield f"{place}.weights", problem
        if not (stage.module.isidentifier() and stage.class_name.isidentifier()):
            yield place, f"module {stage.module!r} and class {stage.class_name!r} must be names of Python"
        for name in stage.inputs + stage.outputs:
            if name not in values:
                yield place, f"it names {name!r}, which is not one of the values.{nearest(name, values)}"
        for name in stage.inputs:
            if values[name].producer >= stage.index or stage.index not in values[name].consumers:
                yield f"{place}.inputs", f"{name!r} ({values[name]}) does not reach stage {stage.index}"
    outputs_by_mode = {"outputs": manifest.outputs, "evaluation_outputs": manifest.evaluation_outputs}
    places = {place for name, nested in outputs_by_mode.items() for place, _ in sequences(nested, name)}
    yield from (("lists", f"{place!r} is not a list in the outputs") for place in manifest.lists if place not in places)
    for condition in manifest.conditions:
        try:
            if not holds(condition, manifest.captured_sizes):
                yield "conditions", f'"{condition}" does not hold at capture'
        except PackageError as error:
            yield "conditions", str(error)
    for key, value in values.items():
        place = f"values.{key}"
        if value.name != key:
            yield place, f"its name is {value.name!r}"
        try:
            value.shape_at(manifest.captured_sizes)
        except PackageError as error:
            yield f"{place}.shape", str(error)
        if value.batch_dim is not None and value.batch_dim >= len(value.shape):
            yield f"{place}.batch_dim", f"it is {value.batch_dim}, and the value has {len(value.shape)} dimensions"
        if value.role is not UNSET and (
            value.producer != CALLER or (value.role == "rows") != (value.batch_dim is not None)
        ):
            yield f"{place}.role", f'it is "{value.role}", and batch_dim is {value.batch_dim}'
        if value.dim_order is not UNSET and sorted(value.dim_order) != [*range(len(value.shape))]:
            yield (
                f"{place}.dim_order",
                f"it is {[*value.dim_order]}, and has to name each of the {len(value.shape)} dimensions once",
            )
        for consumer in value.consumers:
            if not (value.producer < consumer < len(stages) and key in stages[consumer].inputs):
                yield f"{place}.consumers", f"{key!r} goes to stage {consumer}, which does not take it"
        if value.producer >= len(stages):
            yield f"{place}.producer", f"there is no stage {value.producer}"
        if value.producer != CALLER and key not in stages[value.producer].outputs:
            yield f"{place}.producer", f"{key!r} comes from stage {value.producer}, which does not return it"
    for leaf in leaves((manifest.args, manifest.kwargs)):
        if leaf is not None and (leaf not in values or values[leaf].producer != CALLER):
            yield "args", f"the argument {leaf!r} is not a value that the caller passes"
    for key, nested in outputs_by_mode.items():
        for leaf in leaves(nested):
            if leaf is not None and leaf not in stages[-1].outputs:
                yield key, f"the output {leaf!r} is not an output of the last stage"
    prediction = manifest.plan.prediction
    if prediction is not None and (len(prediction.placement), len(prediction.cuts) + 1) != (len(stages), len(stages)):
        yield (
            "plan.prediction",
            (
                f"it is of {len(prediction.placement)} stages and {len(prediction.cuts)} cuts, and the package has "
                f"{len(stages)} stages"
            ),
        )


def _prepare(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a file as the structures take it: with a name for each key, and older versions as this one."""
    values, stages, plan = content.get("values"), content.get("stages"), content.get("plan")
    values = values if isinstance(values, dict) else {}
    for name, value in values.items():
        if isinstance(value, dict):
            value[KEY] = name
    for stage in stages if isinstance(stages, list) else []:
        if isinstance(stage, dict) and isinstance(stage.get("buffers"), list):
            stage["buffers"] = [{"name": buffer} if isinstance(buffer, str) else buffer for buffer in stage["buffers"]]
    prediction = plan.get("prediction") if isinstance(plan, dict) else None
    if content["schema_version"] == 1:
        for value in values.values():
            if isinstance(value, dict):
                value["batch_dim"] = 0 if value.get("shape") else None
        if isinstance(plan, dict) and plan.keys() - {"points", "stages"}:
            prediction = {key: plan.pop(key) for key in plan.keys() - {"points", "stages"}}
            plan["prediction"] = prediction
    if content["schema_version"] < SCHEMA_VERSION:  # versions 1 and 2 listed digests without sizes
        content["schema_version"] = SCHEMA_VERSION
        for place in ("files", "shards"):
            if isinstance(digests := content.get(place), dict):
                content[place] = {name: {"bytes": None, "digest": digest} for name, digest in digests.items()}
    if isinstance(prediction, dict):
        prediction.pop("gap", None)  # follows from the others
        prediction.pop("transient", None)  # of plans before `RankMemory`
    return content


_KIND: Final = FileKind(Manifest, "a manifest", PackageError, _ADVICE, SCHEMA_VERSION, _prepare)
