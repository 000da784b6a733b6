"""Find the small sizes for which an exported program is not the model."""

from __future__ import annotations

import traceback
from typing import Any

import sympy
from torch import nn

from pipegraph.errors import is_user_file
from pipegraph.graph.export.input_sizes import InputSizes
from pipegraph.graph.export.operation_record import Operations, operations_of_model, operations_of_program
from pipegraph.graph.export.size_guards import SizeGuards, Sizes
from pipegraph.graph.export.torch_export import Exported
from pipegraph.graph.symbolic_size import SizeLimits


def limits_of(guards: SizeGuards, comparison: ProgramComparison) -> SizeLimits:
    """The bounds and conditions of the sizes for which a program is the model.

    ``torch.export`` takes for granted that no size is 1, because 1 is broadcast, and notes nothing of a branch such as
    ``if x.shape[1] > 1``. The model and the program are therefore run at sizes of 1, and compared operation by
    operation. If they differ, such a size is left out.
    """
    alone: list[Sizes] = [{symbol: 1} for symbol in guards.captured]
    ones = {symbol: 1 for each in alone if guards.allow(each) for symbol in each}
    differ: list[sympy.Basic] = []
    if ones and (not guards.allow(ones) or not comparison.is_same(ones)):
        differ = [symbol > 1 for symbol in ones if not comparison.is_same({symbol: 1})]
        if not differ and guards.allow(ones):
            # Two may be 1 one at a time. Which of more may be was not tried.
            differ = [sympy.Ne(sympy.prod(ones), 1)] if len(ones) == 2 else [symbol > 1 for symbol in ones]
    exceptions = {relation: guards.exception(relation) for relation in guards.assumed}
    differ += [each for each, found in exceptions.items() if found is not None and not comparison.is_same(found)]
    return guards.limits(differ)


class ProgramComparison:
    """A model and its program, compared at several sizes."""

    def __init__(
        self, exported: Exported, sizes: InputSizes, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._exported, self._sizes, self._model, self._inputs = exported, sizes, model, (args, kwargs)
        self._results: dict[frozenset[tuple[sympy.Symbol, int]], bool] = {}

    def is_same(self, sizes: Sizes) -> bool:
        """Return whether the program does what the model does, at sizes that the program allows."""
        key = frozenset(sizes.items())
        if key not in self._results:
            self._results[key] = self._compare(sizes)
        return self._results[key]

    def _compare(self, sizes: Sizes) -> bool:
        try:
            own = self._of_model(sizes)
        except Exception as error:
            # What torch refuses (a kernel larger than the image) it refuses in a stage too. What the model refuses
            # itself, a stage would compute.
            return not is_user_file(traceback.extract_tb(error.__traceback__)[-1].filename)
        try:
            made = self._of_program(sizes)
            return own == made or self._without_dead(own) == made
        except Exception:  # whatever an operation raises on sizes that are not those of the model
            return False

    def _of_model(self, sizes: Sizes) -> Operations:
        return operations_of_model(self._model, self._exported.mode, *self._sizes.arguments_at(sizes, *self._inputs))

    def _of_program(self, sizes: Sizes) -> Operations:
        return operations_of_program(
            self._exported.program, self._model, *self._sizes.arguments_at(sizes, *self._inputs)
        )

    def _without_dead(self, operations: Operations) -> Operations | None:
        """The operations of the model without those that the program leaves out at the captured sizes, because nothing
        reads their results."""
        own, made = self._of_model({}), iter(self._of_program({}))
        wanted = next(made, None)
        kept = []
        for position, operation in enumerate(own):
            if operation == wanted:
                kept.append(position)
                wanted = next(made, None)
        if wanted is not None or len(operations) != len(own):
            return None
        return [operations[position] for position in kept]
