"""The file of a plan: which model it is of, its split points, and what it is expected to take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipegraph.errors import PlanError, SourceError
from pipegraph.graph.captured import Captured
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.prediction import Prediction

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PlanFile:
    """A plan for a model of this class with so many parameters, wherever that comes from."""

    model_class: str
    parameters: int
    points: tuple[str, ...]
    prediction: Prediction

    @classmethod
    def of(cls, made: Plan) -> PlanFile:
        """The file of a plan that was priced."""
        assert made.prediction is not None
        points = tuple(str(point) for point in made.points)
        return cls(made.captured.model_name, _parameters(made.captured), points, made.prediction)

    def to_dict(self) -> dict[str, Any]:
        """The file as data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": {"class": self.model_class, "parameters": self.parameters},
            "points": list(self.points),
            **self.prediction.to_json(),
        }

    def to_json(self) -> str:
        """The text of the file, the same for the same plan."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, file: Path) -> PlanFile:
        """Raises SourceError for a file that cannot be read, or is none of a plan."""
        again = "Try: pipegraph plan MODEL --ranks 4 -o plan.json, which writes one."
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise SourceError(f"The plan {file} cannot be read: {error.strerror}.\n{again}") from None
        except ValueError as error:
            raise SourceError(f"{file} is no plan: it is no JSON: {error}.\n{again}") from None
        version = found.get("schema_version") if isinstance(found, dict) else None
        if not isinstance(version, int) or "points" not in found:
            raise SourceError(f"{file} is no plan: it has no schema_version, or no points.\n{again}")
        if version > SCHEMA_VERSION:
            raise SourceError(
                f"{file} has schema_version {version}; this pipegraph reads up to {SCHEMA_VERSION}.\n"
                "Try: a newer pipegraph, or plan again."
            )
        try:
            return _read(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SourceError(f"{file} has not the form of a plan: {type(error).__name__}: {error}.\n{again}") from None

    def apply(self, captured: Captured) -> Plan:
        """Cut a model where the file says.

        Raises PlanError where the plan is of another model.
        """
        problem = ""
        if captured.model_name != self.model_class:
            problem = f"is of a {self.model_class}, and this model is a {captured.model_name}"
        elif _parameters(captured) != self.parameters:
            problem = f"is of a model with {self.parameters:,} parameters, and this one has {_parameters(captured):,}"
        if problem:
            raise PlanError(f"The plan {problem}.\nTry: pipegraph plan with this model, or --stages.")
        made = plan(captured, points=self.points) if self.points else plan(captured, stages=1, balance="uniform")
        return made.predicted(self.prediction)


def _read(found: Mapping[str, Any]) -> PlanFile:
    model, points, prediction = found["model"], found["points"], Prediction.from_json(found)
    if not isinstance(points, list) or len(points) + 1 != len(prediction.stages):
        raise ValueError(f"{len(prediction.stages)} stages have one point less")
    if not prediction.memory or len(prediction.placement) != len(prediction.stages):
        raise ValueError("placement has a rank for each stage, and memory a figure for each rank")
    return PlanFile(str(model["class"]), int(model["parameters"]), tuple(map(str, points)), prediction)


def _parameters(captured: Captured) -> int:
    """Elements of the parameters, a tied one once."""
    entries = [entry for entry in captured.state.values() if entry.kind == "parameter"]
    return sum(entry.numel for entry in {entry.canonical: entry for entry in entries}.values())
