"""``torch.export`` in training or evaluation mode, which leaves the model as it was."""

from __future__ import annotations

import inspect
import io
import keyword
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from itertools import product, zip_longest
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TextIO

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from pipegraph.errors import CaptureError, current_user_line, user_line
from pipegraph.graph.custom_functions import apply_by_operator
from pipegraph.graph.export.constant_drop_path import FoldConstantDropPath
from pipegraph.graph.export.dtype_reads import DtypeReads
from pipegraph.graph.export.explanations import at_line, explanation, summary
from pipegraph.graph.export.isolation import fake_parameters, generators_restored, not_logged, refusals_not_logged
from pipegraph.graph.export.kept_sizes import factory_sizes_kept, may_read_int, whole_numbers_kept
from pipegraph.graph.export.module_calls import record_calls
from pipegraph.graph.export.operation_record import calls_of_model, operations_of_model
from pipegraph.graph.export.shape_expression_limit import FixedSizeNeededError, ShapeExpressionLimit
from pipegraph.graph.function_trials import UnwritableFunctionError
from pipegraph.graph.model_structure import modes_of
from pipegraph.graph.symbolic_size import InputDimension
from pipegraph.graph.tensor_hooks import HOOK_ADVICE, TensorHookError, hooks_marked
from pipegraph.torch_private.export import autograd_functions_wrapped, fixed_sizes_seen, grad_modes_marked
from pipegraph.torch_private.modules import recurrent_layers_without_steps
from pipegraph.torch_private.pytrees import pytree

# ---- python random ---------------------------------------------------------------------------------------------------
# Random numbers of Python and NumPy that a model draws: a graph would have what one draw gives, for ever.


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
                    f"one draw decides.{line}",
                    "a probability of 0 where the model is built (layerdrop=0); or torch.rand() and torch.where; "
                    "or model.eval() in build_model, for stages that do not train.",
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


# ---- sliced lists ----------------------------------------------------------------------------------------------------
# The names of modules that a model takes from a slice of a list, such as ``self.blocks[1:]``.


_SLICE: Final = re.compile(r"slice\((-?\d+|None), (-?\d+|None), (-?\d+|None)\)")


def name_in_lists(program: ExportedProgram, model: nn.Module) -> None:
    """Name modules by their place in the model where ``torch.export`` has a slice: if something in them is shared.

    before:  blocks.slice(1, None, None).0
    after:   blocks.1
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack", {})
            if any("slice(" in fqn for fqn, _ in stack.values()):
                named = {call: (_name(fqn, model), kind) for call, (fqn, kind) in stack.items()}
                node.meta["nn_module_stack"] = {call: pair for call, pair in named.items() if pair[0] is not None}


def _name(fqn: str, model: nn.Module) -> str | None:
    """The name without slices; None for a slice itself, which is not a module of the model."""
    parts: list[str] = []
    names: list[str] | None = None  # of what the last slice has
    for part in fqn.split("."):
        match, module = _SLICE.fullmatch(part), model.get_submodule(".".join(parts))
        if match is not None:
            every = [str(number) for number in range(len(module))] if names is None else names  # type: ignore[arg-type]
            names = every[slice(*(None if bound == "None" else int(bound) for bound in match.groups()))]
            continue
        # A slice of a list counts again; one of a Sequential has its names.
        parts.append(part if names is None or not isinstance(module, nn.ModuleList) else names[int(part)])
        names = None
    return ".".join(parts) if names is None else None


# ---- torch export ----------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """An exported program.

    Attributes:
        program: of ``torch.export``.
        mode: in which each module was.
        fixed: the dimensions of inputs that were not let vary; None if none was let.
        lines: a size that the model fixed, as torch names it → the line of the model's source.
        obstacle: why no dimension was let vary, or none but the batch.
        computed: a dimension that had to be fixed → the line that computes from it what a stage cannot express.
        training_error: why it was not exported in training mode, with the line; empty if it was.
        keeps_int: whether ``int`` in the model's source kept a dynamic size.
        reads_dtype: whether the model asks for the dtype of a tensor, or casts one.
    """

    program: ExportedProgram
    mode: Mapping[nn.Module, bool]
    fixed: frozenset[InputDimension] | None
    lines: Mapping[str, str] = MappingProxyType({})
    obstacle: str = ""
    computed: Mapping[InputDimension, str] = MappingProxyType({})
    training_error: str = ""
    keeps_int: bool = False
    reads_dtype: bool = True


class IntOfSizeError(Exception):
    """A size is fixed on a line that may read ``int``."""


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fixed: frozenset[InputDimension] | None = frozenset(),
    *,
    free_dims: AbstractSet[InputDimension] = frozenset(),
    trains: bool = True,
    keeps_int: bool = False,
    may_keep_int: bool = False,
) -> Exported:
    """Export in training mode, or else in the mode that the model is in, with sizes that may vary if that works.

    Args:
        free_dims: the dimensions whose sizes are not fixed because much is computed from them.
        trains: whether to try training mode.
        keeps_int: whether ``int`` in the model's source keeps a dynamic size.
        may_keep_int: whether the caller exports again with `keeps_int`, if a size is fixed where ``int`` may be read.

    Raises:
        IntOfSizeError: with `may_keep_int`, a size is fixed on such a line.
        CaptureError: neither mode works, or random numbers of Python decide what the model does, or a custom backward
            would be lost; names the line of the model's own source.
        FixedSizeNeededError: what the model computes from a size is too long.
    """
    modules = list(model.modules())
    own_modes = {module: module.training for module in modules}
    modes = [*([modes_of(model).training] if trains else []), own_modes]
    first_error: Exception | None = None
    obstacle = ""

    def attempt(mode: Mapping[nn.Module, bool], tried: frozenset[InputDimension] | None) -> Exported:
        lines: dict[str, str] = {}
        int_lines: list[str] = []
        long = ShapeExpressionLimit(args, kwargs, free_dims)

        def note(size: str, value: int) -> None:
            line = lines.setdefault(size, current_user_line())
            if may_keep_int and line and may_read_int(model, line):
                int_lines.append(line)
                raise IntOfSizeError(line)  # the rest of this export would be in vain

        reads = DtypeReads()
        try:
            with long.refused(), fixed_sizes_seen(note), reads:
                program = export_in(mode, model, args, kwargs, fixed=tried, keeps_int=keeps_int)
        except Exception:
            if long.refusal is not None:  # torch may raise another error in its place
                raise long.refusal from None
            if int_lines:
                raise IntOfSizeError(int_lines[0]) from None
            raise
        failed = "" if first_error is None else at_line(summary(first_error), first_error)
        return Exported(
            program,
            mode,
            tried,
            lines,
            obstacle,
            training_error=failed,
            keeps_int=keeps_int,
            reads_dtype=reads.has_reads,
        )

    for mode, tried in product(modes, dict.fromkeys((fixed, None))):
        try:
            exported = attempt(mode, tried)
        except (FixedSizeNeededError, IntOfSizeError):
            raise
        except UnwritableFunctionError as error:
            raise _lost_backward(model, error) from error
        except Exception as error:
            if tried is None:  # otherwise the reason is the same, or it is that sizes vary
                first_error = first_error or error
            else:
                obstacle = obstacle or at_line(summary(error), error)
            continue
        other_dims = _beside_batch(args, kwargs)
        if tried is None and fixed is not None and other_dims > fixed and not free_dims & other_dims:
            with suppress(Exception):  # then nothing varies
                return attempt(mode, other_dims)
        return exported if tried is None else exported._replace(obstacle="")
    assert first_error is not None
    mode_needed = " in training mode" if _exports_evaluated(model, args, kwargs) else ""
    raise CaptureError(explanation(model, first_error, mode_needed)) from first_error


def _beside_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[InputDimension]:
    """All dimensions of the inputs but the batch: the first one of the first tensor, and those of others as long."""
    leaves = enumerate(pytree.tree_leaves((args, kwargs)))
    tensors = [(at, leaf) for at, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = tensors[0][1].shape[0] if tensors else 0
    every = ((at, dim, size) for at, tensor in tensors for dim, size in enumerate(tensor.shape))
    return frozenset((at, dim) for at, dim, size in every if dim or size != rows)


def _exports_evaluated(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a model that cannot be exported as it is can be in evaluation mode."""
    try:
        export_in(modes_of(model).evaluation, model, args, kwargs)
    except Exception:  # whatever the model raises
        return False
    return True


def export_in(
    mode: Mapping[nn.Module, bool],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None = None,
    *,
    fixed: frozenset[InputDimension] | None = None,
    keeps_int: bool = False,
) -> ExportedProgram:
    """Export with each module in the mode that ``mode`` gives it (True: training), as it is after ``model.to(dtype)``.

    The sizes of the inputs may vary, but for those in ``fixed`` and those that the model fixes; None fixes all.

    Raises what export raises, and CaptureError if what the model does depends on random numbers of Python.
    """
    with generators_restored() as are_used:
        program = _export(mode, model, args, kwargs, dtype, fixed, keeps_int)
        if are_used():
            check_chances(model, mode, args, kwargs)
    return program


def _export(
    mode: Mapping[nn.Module, bool],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype | None,
    fixed: frozenset[InputDimension] | None,
    keeps_int: bool,
) -> ExportedProgram:
    with (
        record_calls(model),
        torch.enable_grad(),  # else a block of no_grad would be like the code around it
        grad_modes_marked(),
        recurrent_layers_without_steps(),
        autograd_functions_wrapped(apply_by_operator),
        hooks_marked(),
        _modes(mode),
        fake_parameters(model, args, kwargs, dtype) as (fake_args, fake_kwargs),
        _every_input_named(model, kwargs),
        _graphs_not_shown(),
        FoldConstantDropPath(),
        factory_sizes_kept(),
        whole_numbers_kept(model) if keeps_int else nullcontext(),
        warnings.catch_warnings(),
    ):
        # The second list of weights of an nn.LSTM follows the fake ones, and goes back with them.
        warnings.filterwarnings("ignore", r"The tensor attributes? self\.\S*_flat_weights")
        warnings.filterwarnings("ignore", r"The tensor attributes? self\..* assigned during export")
        program = torch.export.export(
            model,
            fake_args,
            fake_kwargs,
            dynamic_shapes=None if fixed is None else _varying_sizes(model, fake_args, fake_kwargs, fixed),
            strict=False,
        )
    name_in_lists(program, model)
    return program


@contextmanager
def _every_input_named(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let the signature of a model's ``forward`` name the inputs that it takes as ``**kwargs``.

    ``torch.export`` takes the others to be in the signature, and fails where a size of these may vary.
    """
    forward = model.forward
    signature = inspect.signature(forward)
    parameters = [param for param in signature.parameters.values() if param.kind is not inspect.Parameter.VAR_KEYWORD]
    missing = [name for name in kwargs if name not in signature.parameters]
    if not missing or not all(name.isidentifier() and not keyword.iskeyword(name) for name in missing):
        yield
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in missing]
    named.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    previous_forward = vars(model).get("forward")
    model.forward = named
    try:
        yield
    finally:
        if previous_forward is None:
            del model.forward
        else:
            model.forward = previous_forward


def _varying_sizes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: frozenset[InputDimension]
) -> Any:
    """The ``dynamic_shapes`` with which ``torch.export`` lets each size vary that neither the model nor ``fixed``
    fixes."""
    shapes = torch.export.ShapesCollection()
    for position, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(leaf, torch.Tensor):
            # Of a size of 1 torch.export cannot tell whether it is broadcast.
            is_fixed = ((position, dim) in fixed or size < 2 for dim, size in enumerate(leaf.shape))
            shapes[leaf] = tuple(torch.export.Dim.STATIC if static else torch.export.Dim.AUTO for static in is_fixed)
    return shapes.dynamic_shapes(model, args, kwargs)


class _WithoutGraphs(io.TextIOBase):
    """A stream that passes on all but the graphs that torch prints."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        is_graph = "def forward(self" in text and "torch.ops.aten" in text
        return len(text) if is_graph else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def _graphs_not_shown() -> Iterator[None]:
    """Leave out what torch prints when an export fails: the whole graph, for each attempt. The error says the line."""
    logger = "torch.fx.experimental.symbolic_shapes"
    no_code = not_logged(logger, "Unable to find user code")
    failures = not_logged(logger, "failed during evaluate_expr")
    with no_code, failures, refusals_not_logged(), redirect_stderr(_WithoutGraphs(sys.stderr)):
        yield


@contextmanager
def _modes(mode: Mapping[nn.Module, bool]) -> Iterator[None]:
    previous_modes = {module: module.training for module in mode}
    for module, training in mode.items():
        module.training = training
    try:
        yield
    finally:
        for module, training in previous_modes.items():
            module.training = training


def _lost_backward(model: nn.Module, error: UnwritableFunctionError) -> CaptureError:
    where = user_line(error)
    at = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{type(model).__name__} cannot be captured: {error}, so that its backward would be lost.{at}",
        HOOK_ADVICE if isinstance(error, TensorHookError) else _FUNCTION_ADVICE,
    )


_FUNCTION_ADVICE: Final = (
    "a torch.autograd.Function of tensors and plain numbers, which returns new tensors; or torch.library.custom_op "
    "with register_autograd."
)
