"""The file of a plan: its model, its split points, and the prediction of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pipegraph.cost.balance import BALANCES, parse_balance
from pipegraph.errors import PipegraphError, PlanError, ScheduleError, SourceError
from pipegraph.graph.captured import Captured
from pipegraph.package.json_file import Count, Entry, FieldError, FileKind, Name, Text, json_text
from pipegraph.package.prediction import Prediction
from pipegraph.planner.plan import Plan, plan
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.planner.solver.solve_arguments import memory_of_ranks
from pipegraph.schedule import check, from_csv
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import format_bytes

SCHEMA_VERSION: Final = 1
_ADVICE: Final = "Try: pipegraph plan MODEL --ranks 4 -o plan.json, which writes a plan."


class ModelInput(Entry, frozen=True):
    """A tensor that the model takes; its dtype is torch's name without the prefix."""

    name: Name
    shape: tuple[Count, ...]
    dtype: Name

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class ModelSummary(Entry, frozen=True, rename={"class_name": "class"}):
    """The class of a model, and the number of elements of its parameters, a tied one counted once."""

    class_name: Text
    parameters: Count


class PlanFile(Prediction, frozen=True, kw_only=True):
    """A plan for every model of this class with this number of parameters and these inputs."""

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
        if self.order:
            self._check_order()
            return
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

    def _check_order(self) -> None:
        """Raise FieldError if the order is not one of the stages, or cannot run."""
        try:
            schedule = from_csv("\n".join(self.order) + "\n", self.schedule, transfers=False)
            if self.edges:
                schedule = schedule.changed(edges=self.edges, gradient_edges=self.edges)
            check(schedule)
        except ScheduleError as error:
            raise FieldError("order", str(error).partition("\n")[0]) from None
        if (schedule.placement, schedule.microbatches) != (self.placement, self.microbatches):
            raise FieldError("order", "it is of another placement, or of other microbatches")

    @property
    def prediction(self) -> Prediction:
        """The prediction of a step."""
        return Prediction(**{name: getattr(self, name) for name in Prediction.__struct_fields__})

    @classmethod
    def from_plan(cls, priced_plan: Plan) -> PlanFile:
        """Return the file of a plan. The plan must be priced."""
        assert priced_plan.prediction is not None
        return cls(
            model=ModelSummary(priced_plan.captured.model_name, _parameters(priced_plan.captured)),
            inputs=_inputs(priced_plan.captured),
            points=tuple(str(point) for point in priced_plan.points),
            **msgspec.structs.asdict(priced_plan.prediction),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": msgspec.to_builtins(self.model),
            "inputs": msgspec.to_builtins(self.inputs),
            "points": list(self.points),
            **self.prediction.to_dict(),
        }

    def to_json(self) -> str:
        """Return the text of the file, which is the same for the same plan."""
        return json_text(self.to_dict()) + "\n"

    @classmethod
    def read(cls, file: Path) -> PlanFile:
        """Read a file. Raises SourceError with the path in the file if it is not a sound plan."""
        return _KIND.read(file)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> PlanFile:
        """Read the text of a file; ``where`` names it in errors."""
        return _KIND.decode(text, where)

    def apply(self, captured: Captured, memory_bytes: float | Sequence[float] | None = None) -> Plan:
        """Cut a model where the file says.

        ``memory_bytes`` is what each rank has: one figure, or one for each.

        Raises PlanError if the plan is of another model or other inputs, MemoryShortage if a rank needs more than it
        has, and ArgumentError for figures of another number of ranks.
        """
        problem, instead = "", "pipegraph plan with this model, or --stages"
        if captured.model_name != self.model.class_name:
            problem = f"is of a {self.model.class_name}, and this model is a {captured.model_name}"
        elif _parameters(captured) != self.model.parameters:
            count = _parameters(captured)
            problem = f"is of a model with {self.model.parameters:,} parameters, and this one has {count:,}"
        elif _inputs(captured) != self.inputs:
            problem = f"is for the inputs {_listed(self.inputs)}, and this model has {_listed(_inputs(captured))}"
            instead = "the same inputs (--batch and --seq), or pipegraph plan with these"
        if problem:
            raise PlanError(f"The plan {problem}.", f"{instead}.")
        limits = memory_of_ranks(memory_bytes, len(self.memory))
        for rank, (required_bytes, limit) in enumerate(zip(self.memory, limits, strict=bool(limits))):
            if required_bytes > limit:
                raise MemoryShortage(
                    f"The plan needs {format_bytes(required_bytes, 2)} on rank {rank}, and "
                    f"{format_bytes(limit, 2)} are there.",
                    required_bytes,
                    advice="pipegraph plan with this --memory.",
                )
        cut_plan = plan(captured, points=self.points) if self.points else plan(captured, stages=1, balance="uniform")
        return cut_plan.predicted(self.prediction)


class _Header(msgspec.Struct, frozen=True):
    """The fields by which a plan of any version is recognised."""

    schema_version: int
    points: Any


def is_plan(file: Path) -> bool:
    """Return whether a file holds a plan, of any version, damaged or not."""
    try:
        FileKind(_Header, "a plan", SourceError, _ADVICE).read(file)
    except PipegraphError:
        return False
    return True


def _prepare(content: dict[str, Any]) -> dict[str, Any]:
    content.pop("gap", None)  # follows from value and lower_bound
    content.pop("transient", None)  # of plans before `RankMemory`
    return content


_KIND: Final = FileKind(PlanFile, "a plan", SourceError, _ADVICE, SCHEMA_VERSION, _prepare)


def _inputs(captured: Captured) -> tuple[ModelInput, ...]:
    values = {node.name: node.meta["val"] for node in captured.inputs}
    return tuple(
        ModelInput(name, tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))
        for name, value in values.items()
    )


def _listed(inputs: Sequence[ModelInput]) -> str:
    return ", ".join(map(str, inputs)) or "none"


def _parameters(captured: Captured) -> int:
    """Return the number of elements of the parameters, a tied one counted once."""
    entries = [entry for entry in captured.state.values() if entry.kind == "parameter"]
    return sum(entry.numel for entry in {entry.canonical: entry for entry in entries}.values())
