"""Modules of ``torch.nn`` that are written as themselves: ``nn.Linear(512, 10000)``, ``nn.MultiheadAttention(512, 8)``.

A call of such a module is written as a call if capture recorded all its arguments and results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from pipegraph.codegen.syntax.expressions import (
    Argument,
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Passing,
    Subscript,
    call,
    literal,
)
from pipegraph.graph.calls import ArgumentPlace, CallTree, CallValues, argument_place, result_place
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import shape_of
from pipegraph.torch_private.modules import has_forward_hooks

# Constructor arguments that a module keeps under no attribute, or under another name, or that are changed here: how to
# read them back.
_READERS: Mapping[str, Callable[[Any], object]] = {
    "bias": lambda module: _is_there(module.bias),
    "elementwise_affine": lambda module: module.weight is not None,
    "add_bias_kv": lambda module: module.bias_k is not None,
    "kdim": lambda module: None if module.kdim == module.embed_dim else module.kdim,
    "vdim": lambda module: None if module.vdim == module.embed_dim else module.vdim,
    # A kernel is functional in any case, and a stage must not change a tensor that it received.
    "inplace": lambda module: False,
}


def _activation(layer: Any) -> object:
    """The argument of a transformer's layer for its activation; AttributeError for a function of one's own."""
    if layer.activation is F.relu:
        return F.relu  # the default
    if layer.activation is F.gelu:
        return "gelu"
    raise AttributeError("activation")


_OF_TRANSFORMER_LAYERS: Mapping[str, Callable[[Any], object]] = {
    "d_model": lambda module: module.self_attn.embed_dim,
    "nhead": lambda module: module.self_attn.num_heads,
    "dim_feedforward": lambda module: module.linear1.out_features,
    "dropout": lambda module: module.dropout.p,
    "activation": _activation,
    "layer_norm_eps": lambda module: module.norm1.eps,
    "batch_first": lambda module: module.self_attn.batch_first,
    "bias": lambda module: _is_there(module.linear1.bias),
}
# Modules with children that are written as themselves: the constructor arguments that they read in another way.
_COMPOSITES: Mapping[type[nn.Module], Mapping[str, Callable[[Any], object]]] = {
    nn.MultiheadAttention: {"bias": lambda module: _is_there(module.in_proj_bias)},
    nn.TransformerEncoderLayer: _OF_TRANSFORMER_LAYERS,
    nn.TransformerDecoderLayer: _OF_TRANSFORMER_LAYERS,
}
_NOT_ARGUMENTS = ("device", "dtype", "_weight", "_freeze")
# A subclass that torch makes itself, and the public class that behaves the same.
_PUBLIC = {"NonDynamicallyQuantizableLinear": nn.Linear}


def module_constructor(module: nn.Module) -> FunctionCall | None:
    """``nn.Conv2d(3, 16, 3, padding=1)``.

    Only a module of ``torch.nn`` without children, attention, or a layer of a transformer has one. None for others, or
    if the constructor would not make an equal module (which is tried on the meta device).
    """
    if parametrize.is_parametrized(module):
        return _parametrized_constructor(module)
    cls = type(module)
    cls = _PUBLIC.get(cls.__name__, cls) if cls.__module__.startswith("torch.nn.modules") else cls
    if not cls.__module__.startswith("torch.nn.modules") or getattr(nn, cls.__name__, None) is not cls:
        return None
    if any(True for _ in module.children()) and cls not in _COMPOSITES:
        return None
    values = _constructor_arguments(cls, module)
    return None if values is None or not _makes_equal(cls, values, module) else _constructor_call(cls, values)


# The class of a parametrization in torch → the function that registers it, and its arguments as attributes.
_PARAMETRIZATIONS: Mapping[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    "_WeightNorm": (nn.utils.parametrizations.weight_norm, ("dim",)),
    "_SpectralNorm": (nn.utils.parametrizations.spectral_norm, ("n_power_iterations", "eps", "dim")),
}


def _parametrized_constructor(module: nn.Module) -> FunctionCall | None:
    """``nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3), dim=2)``; None for other parametrizations.

    A parametrized layer is of a class that torch derives from the layer's, with a list for each of its tensors.
    """
    lists = dict(module.parametrizations.items())  # type: ignore[union-attr, operator]
    name, parametrizations = next(iter(lists.items()))
    register, attributes = _PARAMETRIZATIONS.get(type(parametrizations[0]).__name__, (None, ()))
    cls = type(module).__mro__[1]
    if register is None or len(lists) > 1 or len(parametrizations) > 1 or getattr(nn, cls.__name__, None) is not cls:
        return None
    values = _constructor_arguments(cls, module)
    twin, written = (None, None) if values is None else (_twin(cls, values), _constructor_call(cls, values))
    if twin is None or written is None:
        return None
    arguments = {"name": name} | {key: getattr(parametrizations[0], key) for key in attributes}
    try:
        with torch.device("meta"):
            registered = register(twin, **arguments)
    except (TypeError, ValueError, RuntimeError):
        return None
    if _shapes(registered) != _shapes(module) or _settings(registered) != _settings(module):
        return None
    defaults = inspect.signature(register).parameters
    settings = {
        key: literal(value)
        for key, value in arguments.items()
        if value != (0 if defaults[key].default is None else defaults[key].default)
    }
    return call(f"nn.utils.parametrizations.{register.__name__}", written, **settings)


class BaseClass(NamedTuple):
    """The class that a written class derives from.

    Attributes:
        name, arguments: of the class, and of its constructor.
        tensors, settings: the parameters and buffers, and the attributes, that the constructor makes.
    """

    name: str = "nn.Module"
    arguments: tuple[Argument, ...] = ()
    tensors: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()


def base_class(layer: type[nn.Module], module: nn.Module) -> BaseClass | None:
    """``nn.Embedding`` with its arguments, for a module of a class that derives from this layer of torch.

    None if the constructor would not make what the module has of it.
    """
    values = _constructor_arguments(layer, module)
    twin = _twin(layer, values) if values is not None else None
    written = _constructor_call(layer, values) if values is not None else None
    if twin is None or written is None:
        return None
    settings, shapes = _settings(twin), _shapes(twin)
    if not (settings.items() <= _settings(module).items() and shapes.items() <= _shapes(module).items()):
        return None
    return BaseClass(written.function.text, written.arguments, frozenset(shapes), frozenset(settings))


def derived_constructor(module: nn.Module) -> FunctionCall | None:
    """The constructor of the layer of torch from which the class of a module derives, if that has all its tensors."""
    layers = (cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules"))
    layer = next(layers)
    if not hasattr(nn, layer.__name__) or any(True for _ in module.children()):
        return None
    base = base_class(layer, module)
    is_whole = base is not None and base.tensors == frozenset(_shapes(module))
    return FunctionCall(Name(base.name), base.arguments) if base is not None and is_whole else None


def _constructor_call(cls: type[nn.Module], values: Mapping[str, Any]) -> FunctionCall | None:
    arguments: list[Argument] = []
    for name, entry in _parameters(cls).items():
        try:
            if name in values:
                passing = Passing.POSITIONAL if entry.default is entry.empty else Passing.KEYWORD
                arguments.append(Argument(literal(values[name]), name, passing))
            elif isinstance(entry.default, (bool, int, float)):
                arguments.append(Argument(literal(entry.default), name, Passing.DEFAULT))
        except TypeError:
            return None
    return FunctionCall(Name(f"nn.{cls.__name__}"), tuple(arguments))


def _is_there(bias: Any) -> bool:
    """Return whether there is a bias; RNNs keep the truth itself."""
    return bias if isinstance(bias, bool) else bias is not None


def _parameters(cls: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a constructor. Those of ``nn.LSTM`` and similar classes are hidden by ``*args``."""
    if not issubclass(cls, nn.RNNBase):
        return inspect.signature(cls).parameters
    parameters = {name: param for name, param in inspect.signature(nn.RNNBase).parameters.items() if name != "mode"}
    if cls is nn.RNN:
        parameters["nonlinearity"] = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")
    return parameters


def _constructor_arguments(cls: type[nn.Module], module: nn.Module) -> dict[str, Any] | None:
    """The constructor's arguments that differ from their defaults, read back from the module."""
    arguments: dict[str, Any] = {}
    parameters, readers = _parameters(cls), {**_READERS, **_COMPOSITES.get(cls, {})}
    for name, entry in parameters.items():
        if name in _NOT_ARGUMENTS:
            continue
        if entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD):
            if cls is nn.Identity or cls.__init__ is nn.Module.__init__:  # arguments that mean nothing
                continue
            return None
        try:
            value = readers[name](module) if name in readers else getattr(module, name)
        except AttributeError:
            return None
        value = _shortened(cls, name, value)
        if entry.default is entry.empty or value != entry.default:
            arguments[name] = value
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if len(dtypes) == 1 and "dtype" in parameters:
        (dtype,) = dtypes
        if dtype != torch.float32:
            arguments["dtype"] = dtype
    return arguments


def _shortened(cls: type[nn.Module], name: str, value: Any) -> Any:
    """``3`` for ``(3, 3)``, if the constructor takes one number for all dimensions."""
    spread = isinstance(value, tuple) and value and len(set(value)) == 1 and isinstance(value[0], int)
    if spread and name in ("kernel_size", "stride", "padding", "dilation", "output_padding") and "Conv" in cls.__name__:
        return value[0]
    if spread and cls is nn.LayerNorm and len(value) == 1:
        return value[0]
    return value


def _makes_equal(cls: type[nn.Module], arguments: dict[str, Any], module: nn.Module) -> bool:
    """Return whether the constructor with these arguments makes a module of the same settings and state."""
    twin = _twin(cls, arguments)
    if twin is None or _shapes(twin) != _shapes(module) or _settings(twin) != _settings(module):
        return False
    parts = [part for name, part in module.named_modules() if name]
    if any(has_forward_hooks(part) or "forward" in vars(part) for part in parts):
        return False
    return _settings_of_parts(twin) == _settings_of_parts(module)


def _twin(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module | None:
    """What a constructor makes, without memory; None if it refuses the arguments."""
    try:
        with torch.device("meta"):
            return cls(**arguments)
    except (TypeError, ValueError, RuntimeError):
        return None


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, list, torch.dtype, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("training", "inplace") and isinstance(value, plain)
    }


def _settings_of_parts(module: nn.Module) -> dict[str, Any]:
    return {name: (type(part), _settings(part)) for name, part in module.named_modules() if name}


def _shapes(module: nn.Module) -> dict[str, Any]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """An argument other than a tensor: a number, a size, a dtype or a tuple of these."""

    value: object


@dataclass(frozen=True)
class CausalMask:
    """A mask that attention takes next to ``is_causal=True`` and does not read, so that the graph does not have it.

    Attributes:
        position: that of the sequence among the values that the call reads.
        dimension: of its length.
    """

    position: int
    dimension: int

    def written(self, sequence: Expression) -> Expression:
        """``nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)``."""
        length = Subscript(Attribute(sequence, "shape"), (literal(self.dimension),))
        settings = (Attribute(sequence, "device"), Attribute(sequence, "dtype"))
        return call("nn.Transformer.generate_square_subsequent_mask", length, *settings)


# The parameters of ``forward`` for such a mask: those for the sequence, and for the hint that it is causal.
_CAUSAL_MASKS: Mapping[str, tuple[str, str]] = {
    "attn_mask": ("query", "is_causal"),
    "src_mask": ("src", "is_causal"),
    "tgt_mask": ("tgt", "tgt_is_causal"),
}


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call of a module, or of a function.

    Attributes:
        values: for each argument that is a value, its keyword ("" for a positional one) and its position among the
            values that the call reads; for a tuple of values, their positions; None for an argument that nothing reads;
            `Passed` for a number that is given by position; `CausalMask` for a mask that is made for the call.
        settings: the arguments after them: numbers, strings and None, by keyword.
        takes_first: whether the module returns a tuple of which only the first result is used.
        unpacked: the results as the module nests them, if it returns more than is used or nests them: the position of
            each among the results that are used; None for others.
    """

    values: tuple[tuple[str, int | tuple[int, ...] | CausalMask | Passed | None], ...]
    settings: tuple[tuple[str, object], ...] = ()
    takes_first: bool = False
    unpacked: tuple[Any, ...] | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the values, a tuple's one after the other. That of a causal mask is its sequence's."""
        values = (at.position if isinstance(at, CausalMask) else at for _, at in self.values)
        places = (at if isinstance(at, tuple) else (at,) for at in values)
        return tuple(position for place in places for position in place if isinstance(position, int))

    @property
    def form(self) -> tuple[tuple[str, int], ...]:
        """The keyword of each argument that is a value, and of how many values it is."""
        return tuple((keyword, len(at) if isinstance(at, tuple) else 1) for keyword, at in self.values)

    @property
    def is_plain(self) -> bool:
        """Whether the call is ``module(x, y)``: the values that it reads one after the other, and nothing else."""
        in_order = all(not keyword and at == position for at, (keyword, position) in enumerate(self.values))
        return in_order and not self.settings and not self.takes_first and self.unpacked is None

    def call(self, function: Expression, values: Sequence[Expression]) -> Expression:
        """``self.attention(x, x, x, need_weights=False)[0]``.

        Args:
            values: the expressions of the values, a tuple's one after the other.
        """
        waiting = iter(values)

        def written(argument: int | tuple[int, ...] | CausalMask | Passed | None) -> Expression:
            match argument:
                case int():
                    return next(waiting)
                case tuple():
                    return _tuple([next(waiting) for _ in argument])
                case CausalMask():
                    return argument.written(next(waiting))
                case Passed():
                    return literal(argument.value)
            return literal(None)

        arguments = [(keyword, written(argument)) for keyword, argument in self.values]
        positional = [value for keyword, value in arguments if not keyword]
        named = {keyword: value for keyword, value in arguments if keyword}
        settings = {name: literal(value) for name, value in self.settings}
        expression = call(function, *positional, **named, **settings)
        return Subscript(expression, (literal(0),)) if self.takes_first else expression

    def written(self, expression_of: Callable[[object], Expression]) -> CallArguments:
        """These arguments, with the expressions of the numbers, sizes, dtypes and devices among them."""
        values = tuple(
            (keyword, Passed(expression_of(at.value)) if isinstance(at, Passed) else at) for keyword, at in self.values
        )
        settings = tuple((name, expression_of(value)) for name, value in self.settings)
        return replace(self, values=values, settings=settings)


def _tuple(parts: Sequence[Expression]) -> Expression:
    """``(cos, sin)``, and ``pair`` for ``(pair[0], pair[1])``."""
    owner = parts[0].text.removesuffix("[0]")
    if owner.isidentifier() and [part.text for part in parts] == [f"{owner}[{index}]" for index in range(len(parts))]:
        return Name(owner)
    return Collection(tuple(parts), "()")


def nested_targets(places: Iterable[Any], names: Sequence[Expression]) -> tuple[Expression, ...]:
    """``out, (h, _)``: what the results of a call are assigned to, nested as in `CallArguments.unpacked`.

    Args:
        names: of the results that are used.
    """
    return tuple(
        Collection(nested_targets(place, names), "()")
        if isinstance(place, tuple)
        else Name("_")
        if place is None
        else names[place]
        for place in places
    )


def torch_module_call(
    captured: Captured, called: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> tuple[FunctionCall, CallArguments | None] | None:
    """The constructor of the ``torch.nn`` module that ``called`` ran, and the arguments of the call: None for
    ``module(x, y)``, which passes the values that it reads one after the other.

    Nothing if the module cannot be written as itself, or if the call did something else than ``forward`` with the
    arguments that capture recorded. It may have hooks, be cut in two, be simplified, or read a tensor that is no
    argument.

    Args:
        reads: the values from outside that its operations read, the module's own state left out.
        makes: the values that operations outside read, in the order in which the module returns them.
    """
    module = captured.modules[called.fqn].module
    is_whole = len(list(called.nodes())) == captured.operations_of[called.call]
    if not is_whole or has_forward_hooks(module) or "forward" in vars(module):
        return None
    arguments = recorded_arguments(module, called, reads, makes)
    constructor = module_constructor(module) if arguments is not None else None
    if arguments is None or constructor is None:
        return None
    return constructor, None if arguments.is_plain else arguments


def recorded_arguments(
    module: nn.Module, called: CallTree, reads: Sequence[fx.Node], makes: Sequence[fx.Node]
) -> CallArguments | None:
    """The arguments of a call as capture recorded them, if it reads nothing else and returns ``makes``."""
    results = [result_place(node, called.call) for node in makes]
    first = results[0] if results else None
    paths = [place.path for place in results if place is not None and place.path is not None]
    if first is None or len(paths) != len(results):
        return None
    places = [argument_place(node, called.call) for node in reads]
    by_order = {order: at for at, place in enumerate(places) if place is not None for order in place.orders}
    recorded, parameters = dict(first.arguments), inspect.signature(module.forward).parameters
    if not recorded.keys() <= parameters.keys():
        return None
    values: dict[str, int | tuple[int, ...] | CausalMask] = {}
    order = unread = 0
    for name, value in recorded.items():
        count = len(value) if isinstance(value, tuple) else int(value is ...)
        positions = tuple(by_order[index] for index in range(order, order + count) if index in by_order)
        order += count
        if not positions and value is ... and (mask := _causal_mask(module, name, recorded, values, reads)) is not None:
            values[name] = mask
            unread += 1
            continue
        if len(positions) < count or (value is ... and name not in _names(places[positions[0]])):
            return None
        if count:
            values[name] = positions if isinstance(value, tuple) else positions[0]
    if order - unread != len(by_order) or set(by_order.values()) != set(range(len(reads))):
        return None
    defaults = {name: parameters[name].default for name in recorded}
    by_position = set(takewhile(values.__contains__, islice(parameters, first.positional)))
    is_flat = paths in ([()], [(0,)], [(at,) for at in range(first.count)])
    settings = ((name, value) for name, value in recorded.items() if name not in values)
    return CallArguments(
        tuple(
            ("" if name in by_position or defaults[name] is inspect.Parameter.empty else name, at)
            for name, at in values.items()
        ),
        tuple((name, value) for name, value in settings if value != defaults[name]),
        takes_first=paths == [(0,)],
        unpacked=None if is_flat else unpacked_places(first.form, paths),
    )


def _causal_mask(
    module: nn.Module,
    name: str,
    recorded: Mapping[str, object],
    values: Mapping[str, int | tuple[int, ...] | CausalMask],
    reads: Sequence[fx.Node],
) -> CausalMask | None:
    """The mask for an argument that nothing reads; None unless it is the mask of a causal attention.

    Args:
        module: the module that is called.
        name: the parameter of the argument.
        recorded: the arguments.
        values: the positions of those before it among the values that the call reads.
        reads: these values.
    """
    sequence, hint = _CAUSAL_MASKS.get(name, ("", ""))
    position = values.get(sequence)
    if type(module) not in _COMPOSITES or recorded.get(hint) is not True or not isinstance(position, int):
        return None
    attention: Any = module if isinstance(module, nn.MultiheadAttention) else module.self_attn
    return CausalMask(position, int(attention.batch_first and len(shape_of(reads[position])) == 3))


def author_arguments(module: nn.Module, called: CallValues, has_author_results: bool) -> CallArguments | None:
    """The arguments of a call of a class in its author's text: those that the call reads, and the plain ones.

    Args:
        module: the module that is called.
        called: the call.
        has_author_results: whether the class returns what the author's does, and not only what is read.

    Returns:
        None if the call reads a tensor that it does not take as an argument, or returns something else than tensors in
        tuples.
    """
    results = [result_place(node, called.tree.call) for node in called.makes]
    first = results[0] if results else None
    paths = [place.path for place in results if place is not None and place.path is not None]
    if first is None or (has_author_results and len(paths) != len(results)):
        return None
    names: dict[str, int] = {}
    parts: dict[str, dict[int, int]] = {}
    for position, node in enumerate(called.reads):
        place = argument_place(node, called.tree.call)
        if place is None:
            return None
        names |= dict.fromkeys(place.names, position)
        if place.part_of is not None:
            parts.setdefault(place.part_of[0], {})[place.part_of[1]] = position
    recorded = dict(first.arguments)
    values: dict[str, int | tuple[int, ...] | None] = {}
    settings: dict[str, object] = {}
    parameters = inspect.signature(module.forward).parameters
    for name, parameter in parameters.items():
        value = recorded.get(name, parameter.default)
        if name in names:
            values[name] = names[name]
        elif name in parts:
            if not isinstance(value, tuple) or len(parts[name]) != len(value):
                return None
            values[name] = tuple(parts[name][part] for part in range(len(value)))
        elif parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        elif value is not ... and not isinstance(value, tuple) and value is not inspect.Parameter.empty:
            if value is not parameter.default and value != parameter.default:
                settings[name] = value
        elif not _has_default(parameter):
            values[name] = None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        values |= {name: position for name, position in names.items() if name not in parameters}
    used = {at for place in values.values() for at in (place if isinstance(place, tuple) else (place,))}
    if used - {None} != set(range(len(called.reads))):
        return None
    leading = enumerate(takewhile(values.__contains__, parameters))
    positional = {name for index, name in leading if index < first.positional or not _has_default(parameters[name])}
    is_flat = not has_author_results or paths in ([()], [(0,)], [(at,) for at in range(first.count)])
    return CallArguments(
        tuple(("" if name in positional else name, place) for name, place in values.items()),
        tuple(settings.items()),
        takes_first=has_author_results and paths == [(0,)],
        unpacked=None if is_flat else unpacked_places(first.form, paths),
    )


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def unpacked_places(form: object, paths: Sequence[tuple[int, ...]], path: tuple[int, ...] = ()) -> Any:
    """Return the results of a call as it nests them, each as its position in ``paths``; None for one that nothing
    reads."""
    if isinstance(form, tuple):
        return tuple(unpacked_places(part, paths, (*path, index)) for index, part in enumerate(form))
    return paths.index(path) if path in paths else None


def _names(place: ArgumentPlace | None) -> tuple[str, ...]:
    return place.names if place is not None else ()
