"""Random numbers of Python and NumPy that a model draws: a graph would have what one draw gives, for ever."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from torch import nn

from pipegraph.errors import CaptureError
from pipegraph.graph.export.isolation import generators_restored
from pipegraph.graph.export.operation_record import calls_of_model, operations_of_model

# Numbers of Mersenne Twisters in this state are all 0: less than any probability.
_ZEROS = (0,) * 624
_SEEDS = range(8)


def check_chances(
    model: nn.Module, mode: Mapping[nn.Module, bool], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a model without memory, as other numbers of Python's and NumPy's generators have it.

    Args:
        mode: whether each module is in training mode.
        args, kwargs: its inputs; only their shapes and dtypes count.

    Raises:
        CaptureError: it then runs other operations, or the same on other numbers.
    """
    with generators_restored():
        least = _at(None, operations_of_model, model, mode, args, kwargs)
        for seed in _SEEDS:
            if _at(seed, operations_of_model, model, mode, args, kwargs) != least:
                pair = (_at(run_seed, calls_of_model, model, mode, args, kwargs) for run_seed in (None, seed))
                different = (call or other_call for call, other_call in zip_longest(*pair) if call != other_call)
                line = next((f"\n  at {call[1]}" for call in different if call and call[1]), "")
                raise CaptureError(
                    "It draws random numbers of Python or NumPy that decide what it does, and a stage would do what "
                    f"one draw decides.{line}\n"
                    "Try: a probability of 0 where the model is built (layerdrop=0); or torch.rand() and torch.where; "
                    "or model.eval() in build_model, for stages that do not train."
                )


def _at(seed: int | None, run: Callable[..., Any], *arguments: Any) -> Any:
    """What a run returns with generators that are seeded, or give nothing but 0."""
    numpy = sys.modules.get("numpy")
    if seed is None:
        random.setstate((3, (*_ZEROS, len(_ZEROS)), None))
        if numpy is not None:
            numpy.random.set_state(("MT19937", _ZEROS, len(_ZEROS)))
    else:
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
    return run(*arguments)
