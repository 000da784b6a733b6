"""The file of a plan: which model it is of, its split points, and what it is expected to take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pipegraph.cost.balance import BALANCES, parse_balance
from pipegraph.errors import PipegraphError, PlanError, SourceError
from pipegraph.graph.captured import Captured
from pipegraph.package.json_errors import FieldError
from pipegraph.package.json_file import Count, Entry, FileKind, Name, Text, json_text
from pipegraph.package.prediction import Prediction
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.solver.memory_shortage import MemoryShortage
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import format_bytes

SCHEMA_VERSION: Final = 1
_AGAIN: Final = "Try: pipegraph plan MODEL --ranks 4 -o plan.json, which writes a plan."


class ModelInput(Entry, frozen=True):
    """A tensor that the model takes; its dtype is torch's name without the prefix."""

    name: Name
    shape: tuple[Count, ...]
    dtype: Name

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSummary(Entry, frozen=True, rename={"class_name": "class"}):
    """The class of a model, and the elements of its parameters, a tied one once."""

    class_name: Text
    parameters: Count


class PlanFile(Prediction, frozen=True, kw_only=True):
    """A plan for a model of this class with so many parameters and these inputs, wherever that comes from."""

    schema_version: int = SCHEMA_VERSION
    model: ModelSummary
    inputs: tuple[ModelInput, ...]
    points: tuple[Name, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        stages, ranks = len(self.stages), len(self.memory)
        balance, _ = parse_balance(self.balance)
        unit = BALANCES[balance]
        if len(self.points) + 1 != stages:
            raise FieldError("costs", f"it has {stages} stages, and {len(self.points)} points make one more")
        if tuple(cut.point for cut in self.cuts) != self.points:
            raise FieldError("cuts", "they are at other points than points are")
        if self.unit != unit:
            raise FieldError("unit", f'it is "{self.unit}", and must be "{unit}" for the balance {self.balance}')
        if self.lower_bound is not None and self.lower_bound > self.value:
            raise FieldError("lower_bound", "it is more than value")
        recipe, chunks = find_recipe(self.schedule), stages // ranks
        if stages % ranks or (chunks != recipe.chunks and not recipe.any_chunks):
            raise FieldError("schedule", f"{recipe.name} cannot have {stages} stages on {ranks} ranks")
        if why := recipe.rule(ranks, self.microbatches):
            raise FieldError("microbatches", f"{recipe.name} on {ranks} ranks cannot have {self.microbatches}: {why}")
        placement = recipe.placement(ranks, chunks)
        if placement != self.placement:
            raise FieldError(
                "placement",
                f"it is {list(self.placement)}, and must be {list(placement)} for {self.schedule} on {ranks} ranks",
            )

    @property
    def prediction(self) -> Prediction:
        """What the plan is expected to take."""
        return Prediction(**{name: getattr(self, name) for name in Prediction.__struct_fields__})

    @classmethod
    def of(cls, made: Plan) -> PlanFile:
        """The file of a plan that was priced."""
        assert made.prediction is not None
        return cls(
            model=ModelSummary(made.captured.model_name, _parameters(made.captured)),
            inputs=_inputs(made.captured),
            points=tuple(str(point) for point in made.points),
            **msgspec.structs.asdict(made.prediction),
        )

    def to_dict(self) -> dict[str, Any]:
        """The file as data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": msgspec.to_builtins(self.model),
            "inputs": msgspec.to_builtins(self.inputs),
            "points": list(self.points),
            **self.prediction.to_dict(),
        }

    def to_json(self) -> str:
        """The text of the file, the same for the same plan."""
        return json_text(self.to_dict()) + "\n"

    @classmethod
    def read(cls, file: Path) -> PlanFile:
        """Raises SourceError for a file that cannot be read, is none of a plan, or is damaged: it says where."""
        return _KIND.read(file)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> PlanFile:
        """Read the text of a file; ``where`` names it in errors."""
        return _KIND.decode(text, where)

    def apply(self, captured: Captured, memory_bytes: int | None = None) -> Plan:
        """Cut a model where the file says.

        Raises PlanError if the plan is of another model or other inputs, and MemoryShortage if a rank needs more than
        ``memory_bytes``.
        """
        problem, instead = "", "pipegraph plan with this model, or --stages"
        if captured.model_name != self.model.class_name:
            problem = f"is of a {self.model.class_name}, and this model is a {captured.model_name}"
        elif _parameters(captured) != self.model.parameters:
            found = _parameters(captured)
            problem = f"is of a model with {self.model.parameters:,} parameters, and this one has {found:,}"
        elif _inputs(captured) != self.inputs:
            problem = f"is for the inputs {_listed(self.inputs)}, and this model has {_listed(_inputs(captured))}"
            instead = "the same inputs (--batch and --seq for hf: models), or pipegraph plan with these"
        if problem:
            raise PlanError(f"The plan {problem}.\nTry: {instead}.")
        if memory_bytes is not None and self.peak > memory_bytes:
            raise MemoryShortage(
                f"The plan needs {format_bytes(self.peak, 2)} on its fullest rank, and "
                f"{format_bytes(memory_bytes, 2)} are there.\nTry: pipegraph plan with this --memory.",
                self.peak,
            )
        made = plan(captured, points=self.points) if self.points else plan(captured, stages=1, balance="uniform")
        return made.predicted(self.prediction)


class _Header(msgspec.Struct, frozen=True):
    """What every plan has, of any version and damaged or not."""

    schema_version: int
    points: Any


def is_plan(file: Path) -> bool:
    """Whether a file is one of a plan, of any version and damaged or not."""
    try:
        FileKind(_Header, "a plan", SourceError, _AGAIN).read(file)
    except PipegraphError:
        return False
    return True


def _prepare(content: dict[str, Any]) -> dict[str, Any]:
    content.pop("gap", None)  # follows from value and lower_bound
    return content


_KIND: Final = FileKind(PlanFile, "a plan", SourceError, _AGAIN, SCHEMA_VERSION, _prepare)


def _inputs(captured: Captured) -> tuple[ModelInput, ...]:
    found = ((node.name, node.meta["val"]) for node in captured.inputs)
    return tuple(
        ModelInput(name, tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch.")) for name, value in found
    )


def _listed(inputs: Sequence[ModelInput]) -> str:
    return ", ".join(map(str, inputs)) or "none"


def _parameters(captured: Captured) -> int:
    """Elements of the parameters, a tied one once."""
    entries = [entry for entry in captured.state.values() if entry.kind == "parameter"]
    return sum(entry.numel for entry in {entry.canonical: entry for entry in entries}.values())
