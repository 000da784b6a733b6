"""The file of a plan: which model it is of, its split points, and what it is expected to take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipegraph.cost.price import UNITS
from pipegraph.cost.schema import SchemaError, check_schema, parse
from pipegraph.errors import PipegraphError, PlanError, SourceError
from pipegraph.graph.captured import Captured
from pipegraph.planner.arguments import UNIFORM, check_balance
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.prediction import Prediction
from pipegraph.planner.solver.memory_shortage import MemoryShortage
from pipegraph.planner.solver.stage_schedule import arrange
from pipegraph.units import format_bytes

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Input:
    """A tensor that the model takes; its dtype is torch's name without the prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class PlanFile:
    """A plan for a model of this class with so many parameters and these inputs, wherever that comes from."""

    model_class: str
    parameters: int
    inputs: tuple[Input, ...]
    points: tuple[str, ...]
    prediction: Prediction

    @classmethod
    def of(cls, made: Plan) -> PlanFile:
        """The file of a plan that was priced."""
        assert made.prediction is not None
        points = tuple(str(point) for point in made.points)
        return cls(
            made.captured.model_name, _parameters(made.captured), _inputs(made.captured), points, made.prediction
        )

    def to_dict(self) -> dict[str, Any]:
        """The file as data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {"class": self.model_class, "parameters": self.parameters},
            "inputs": [asdict(each) | {"shape": list(each.shape)} for each in self.inputs],
            "points": list(self.points),
            **self.prediction.to_json(),
        }

    def to_json(self) -> str:
        """The text of the file, the same for the same plan."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, file: Path) -> PlanFile:
        """Raises SourceError for a file that cannot be read, is none of a plan, or is damaged: it says where."""
        again = "Try: pipegraph plan MODEL --ranks 4 -o plan.json, which writes one."
        try:
            found = parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise SourceError(f"The plan {file} cannot be read: {error.strerror}.\n{again}") from None
        except ValueError as error:
            raise SourceError(f"{file} is no plan: it is no JSON: {error}.\n{again}") from None
        if not _is_plan(found):
            raise SourceError(f"{file} is no plan: it has no schema_version, or no points.\n{again}")
        if found["schema_version"] > SCHEMA_VERSION:
            raise SourceError(
                f"{file} has schema_version {found['schema_version']}; this pipegraph reads up to {SCHEMA_VERSION}.\n"
                "Try: a newer pipegraph, or plan again."
            )
        try:
            check_schema(found, "pipegraph.planner", "plan.schema.json", "a plan")
            return _read(found)
        except PipegraphError as error:
            said = str(error).replace("\n", " ").rstrip(".")
            raise SourceError(f"The plan {file} is damaged: {said}.\n{again}") from None

    def apply(self, captured: Captured, memory_bytes: int | None = None) -> Plan:
        """Cut a model where the file says.

        Raises PlanError where the plan is of another model or other inputs, and MemoryShortage where a rank needs more
        than ``memory_bytes``.
        """
        problem, instead = "", "pipegraph plan with this model, or --stages"
        if captured.model_name != self.model_class:
            problem = f"is of a {self.model_class}, and this model is a {captured.model_name}"
        elif _parameters(captured) != self.parameters:
            problem = f"is of a model with {self.parameters:,} parameters, and this one has {_parameters(captured):,}"
        elif _inputs(captured) != self.inputs:
            problem = f"is for the inputs {_listed(self.inputs)}, and this model has {_listed(_inputs(captured))}"
            instead = "the same inputs (--batch and --seq for hf: models), or pipegraph plan with these"
        if problem:
            raise PlanError(f"The plan {problem}.\nTry: {instead}.")
        peak = self.prediction.peak
        if memory_bytes is not None and peak > memory_bytes:
            raise MemoryShortage(
                f"The plan needs {format_bytes(peak, 2)} on its fullest rank, and {format_bytes(memory_bytes, 2)} are "
                "there.\n"
                "Try: pipegraph plan with this --memory.",
                peak,
            )
        made = plan(captured, points=self.points) if self.points else plan(captured, stages=1, balance="uniform")
        return made.predicted(self.prediction)


def is_plan(file: Path) -> bool:
    """Whether a file is one of a plan, of any version and damaged or not."""
    try:
        return _is_plan(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _is_plan(found: Any) -> bool:
    return isinstance(found, dict) and type(found.get("schema_version")) is int and "points" in found


def _read(found: Mapping[str, Any]) -> PlanFile:
    """A plan that the schema has passed. Raises PipegraphError where its parts do not belong together."""
    prediction, points = Prediction.from_json(found), tuple(found["points"])
    stages, ranks = len(prediction.stages), len(prediction.memory)
    check_balance(prediction.balance)
    unit = "s" if prediction.balance == UNIFORM else UNITS[prediction.balance.partition(":")[0]]
    if len(points) + 1 != stages:
        raise SchemaError(f"{stages} stages in costs have one point less, and there are {len(points)} points")
    if tuple(cut.point for cut in prediction.cuts) != points:
        raise SchemaError("cuts are at other points than points are")
    if prediction.unit != unit:
        raise SchemaError(f'the unit of the balance {prediction.balance} is {unit}, not "{prediction.unit}"')
    if prediction.lower_bound is not None and prediction.lower_bound > prediction.value:
        raise SchemaError("lower_bound is more than value")
    placement = arrange(prediction.schedule, stages, prediction.microbatches, None, ranks).placement
    if placement != prediction.placement:
        raise SchemaError(
            f"the placement of {prediction.schedule} on {ranks} ranks is {list(placement)}, not "
            f"{list(prediction.placement)}"
        )
    model = found["model"]
    inputs = tuple(Input(each["name"], tuple(each["shape"]), each["dtype"]) for each in found["inputs"])
    return PlanFile(model["class"], model["parameters"], inputs, points, prediction)


def _inputs(captured: Captured) -> tuple[Input, ...]:
    found = ((node.name, node.meta["val"]) for node in captured.inputs)
    return tuple(
        Input(name, tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch.")) for name, value in found
    )


def _listed(inputs: Sequence[Input]) -> str:
    return ", ".join(map(str, inputs)) or "none"


def _parameters(captured: Captured) -> int:
    """Elements of the parameters, a tied one once."""
    entries = [entry for entry in captured.state.values() if entry.kind == "parameter"]
    return sum(entry.numel for entry in {entry.canonical: entry for entry in entries}.values())
