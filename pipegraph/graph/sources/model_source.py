"""A model as its source gives it, and how it is built without the memory of its parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

_META_TWIN = "_pipegraph_meta_twin"


@dataclass(frozen=True)
class TrainingFunctions:
    """What a model file may say of its training, as it is there; None for what it leaves out.

    Attributes:
        data: ``data(rank, world)``, the batches of data-parallel rank ``rank`` of ``world``.
        evaluation_data: the same for the batches whose loss is taken without training on them.
        optimizer: ``optimizer(parameters)``.
        scheduler: ``scheduler(optimizer)``, whose ``step()`` is called after each step.
        metrics: ``metrics(output, target)``, a dict of tensors that are averaged as the loss is.
        loss_weight: ``loss_weight(target)``, how many items of a microbatch count, for a loss that is their sum.
        loss_over: as in `Pipeline`: "rows", "batch" or "microbatch".
    """

    data: Any = None
    evaluation_data: Any = None
    optimizer: Any = None
    scheduler: Any = None
    metrics: Any = None
    loss_weight: Any = None
    loss_over: Any = None


@dataclass(frozen=True)
class ModelSource:
    """A model and everything needed to capture, check and train it.

    Attributes:
        args, kwargs: the example, one microbatch.
        batch_dims: name of an input → its role, as `pipegraph.capture` takes it.
        tp_plan: pattern of module names → style of tensor parallelism.
        batch, seq: rows and tokens of a microbatch; None for those of the example.
        rebuild: builds the same model again.
        inputs_of: makes keyword inputs with a given number of rows; None if only an example exists.
        config: the fields of a Hugging Face configuration that the model was built from.
        initial_values: which parameters have initial values because no weights were found for them; "" for none.
    """

    name: str
    sha256: str
    model: nn.Module = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    loss_fn: Callable[..., torch.Tensor] | None = None
    example_target: Any = field(default=None, repr=False)
    dynamic_shapes: Any = field(default=None, repr=False)
    batch_dims: Mapping[str, Any] | None = field(default=None, repr=False)
    tp_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    batch: int | None = None
    seq: int | None = None
    rebuild: Callable[[], nn.Module] | None = field(default=None, repr=False)
    inputs_of: Callable[[int], dict[str, Any]] | None = field(default=None, repr=False)
    training: TrainingFunctions = field(default=TrainingFunctions(), repr=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False)
    initial_values: str = field(default="", repr=False)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put parameters that this thread registers on the meta device; buffers and plain tensors keep their values.

    A rotary table computed in ``__init__`` is a buffer and must survive, so ``torch.device("meta")`` will not do. A
    parameter is replaced when it is registered, before ``reset_parameters`` could touch its pages. One object that is
    registered twice (a tied weight) stays one object.
    """
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # the twin, or None to keep it
        if threading.get_ident() != thread or parameter.device.type == "meta":
            return None
        twin = getattr(parameter, _META_TWIN, None)
        if twin is None:
            twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            setattr(parameter, _META_TWIN, twin)
        return twin

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        hook.remove()
