"""Run operations on fake tensors, and give each value its term, writes in place included.

Memory has a term as well: its values after all writes. A view is a way into memory, so that reading a view after a
write gives what was written. ``x.add_(y)`` and ``x = x + y`` are therefore one term, if nothing else sees the
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pipegraph.codegen.validation.operations import (
    CAST,
    EMBEDDING,
    Step,
    arguments_by_name,
    elementwise_term,
    expansion,
    number_argument,
    operation_key,
    split_steps,
    view_steps,
    view_term,
)
from pipegraph.codegen.validation.terms import Key, Operand, Terms, replace_terms
from pipegraph.graph.operators import operator_of_target
from pipegraph.torch_private.fake_tensors import TorchDispatchMode, no_dispatch, values_of
from pipegraph.torch_private.operators import OpOverload, operator_name, schema_arguments
from pipegraph.torch_private.tensors import storage_identity

_COPIES: Final = frozenset({"clone", "_to_copy", "to", "contiguous", "lift_fresh_copy"})
"""Operators that copy a tensor if they do not change its dtype."""
_NEUTRAL: Final[Mapping[str, tuple[tuple[type, ...], int]]] = {
    **dict.fromkeys(("add", "sub"), ((int,), 0)),
    **dict.fromkeys(("mul", "div"), ((int, float), 1)),
}
"""Operators → the types and the value of a number with which they compute their argument: capture leaves those out."""
_SMALL: Final = 64
"""The numbers of a constant up to this size are those of a list in the source."""


class UnknownValueError(Exception):
    """A tensor that no recorded operation made and that has no values."""


class WrittenInputError(Exception):
    """A stage writes into a tensor that it was given, which its sender or the caller may still read."""


@dataclass
class TensorMemory:
    """The memory of a tensor.

    Attributes:
        number: of the memory, in the order in which it was made.
        term: of its values.
        shape, dtype: of the tensor that was made with it.
        writes: how often it was written.
    """

    number: int
    term: int
    shape: tuple[int, ...]
    dtype: str
    writes: int = 0


@dataclass
class _Value:
    """A tensor.

    Attributes:
        tensor: the tensor, which has to live as long as its identity is used.
        memory: the memory of its values.
        steps: the views from the tensor that was made with the memory to this one; None if they are not known.
        term: of its values after ``writes`` writes into the memory.
        requires_grad: whether a gradient flows through it.
    """

    tensor: Tensor
    memory: TensorMemory
    steps: tuple[Step, ...] | None
    term: int
    writes: int
    requires_grad: bool


@dataclass(frozen=True)
class _Entry:
    """One term that a region asked for: the method of the recorder, its arguments, and the term."""

    method: str
    arguments: tuple[Any, ...]
    term: int


@dataclass(eq=False)
class RecordedTerms:
    """The terms of one call, which `TermRecorder.replay` makes for another call.

    Attributes:
        first_memory: the number of the first memory that was made in it.
        entries: its terms, in order.
        writes_outside: whether it wrote into memory that was there before.
    """

    first_memory: int
    entries: list[_Entry] = field(default_factory=list)
    writes_outside: bool = False

    def gives(self, arguments: Sequence[int]) -> bool:
        """Return whether an operation of the region has the term of an argument: it could not be told from that."""
        terms = frozenset(arguments)
        return any(entry.term in terms and Operand(entry.term) not in entry.arguments for entry in self.entries)


class _Operation(NamedTuple):
    """A call of an operator, with its arguments by name as well."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def functional(self) -> OpOverload | None:
        """``aten.add.Tensor`` for ``aten.add_.Tensor``; None if it is missing."""
        name, overload = operator_name(self.func)
        packet = getattr(getattr(torch.ops, self.func.namespace), name.removesuffix("_"), None)
        return getattr(packet, overload, None) if name.endswith("_") else None


class TermRecorder(TorchDispatchMode):
    """Records operations as terms while it is entered. The mode of the fake tensors has to be entered before it.

    Args:
        terms: the table; both sides of a comparison use one.
        on_term: is called with each new term of a value.
    """

    def __init__(self, terms: Terms, on_term: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.terms = terms
        self._on_term = on_term
        self._values: dict[int, _Value] = {}
        self._memories = 0
        self._draws: Counter[Key] = Counter()
        self._regions: list[RecordedTerms] = []
        self._read_only: set[int] = set()  # numbers of memory

    # ---- values ------------------------------------------------------------------------------------------------------

    def name(self, tensor: Tensor, key: Key, requires_grad: bool = False) -> None:
        """Give a tensor the term of a parameter or an input."""
        self._new(tensor, self.terms.number(key), requires_grad)

    def protect(self, tensors: Sequence[Tensor]) -> None:
        """Refuse writes into the memory of these tensors from here on, by WrittenInputError."""
        self._read_only |= {self.memory_number(tensor) for tensor in tensors}

    def term_of(self, tensor: Tensor) -> int:
        """The term of a tensor's values, after all writes so far."""
        value = self._value(tensor)
        if value.writes != value.memory.writes:
            value.term, value.writes = self._read(value), value.memory.writes
        return value.term

    def requires_grad(self, tensor: Tensor) -> bool:
        """Return whether a gradient flows through a tensor."""
        return self._value(tensor).requires_grad

    def number_key(self, term: int) -> Key | None:
        """The key of a term that is one number, which operations take as a number; None for any other term."""
        key = self.terms.keys[term]
        return key if key.operator == "full" and not key.shape else None

    def _value(self, tensor: Tensor) -> _Value:
        value = self._values.get(id(tensor))
        return value if value is not None else self._new(tensor, self._key_term(_constant(tensor)), False)

    def _new(self, tensor: Tensor, term: int, requires_grad: bool) -> _Value:
        """Give a tensor new memory."""
        memory = TensorMemory(self._memories, term, tuple(tensor.shape), str(tensor.dtype))
        self._memories += 1
        return self._add(tensor, memory, (), term, requires_grad)

    def _add(
        self, tensor: Tensor, memory: TensorMemory, steps: tuple[Step, ...] | None, term: int, requires_grad: bool
    ) -> _Value:
        value = self._values[id(tensor)] = _Value(tensor, memory, steps, term, memory.writes, requires_grad)
        if self._on_term is not None:
            self._on_term(term)
        return value

    def _read(self, value: _Value) -> int:
        """The term of a view of memory that was written since."""
        if value.steps is None:
            return self._term("read", value.tensor, Operand(value.memory.term), _layout(value.tensor))
        return self._memory_term(value.memory.term, value.steps)

    # ---- terms -------------------------------------------------------------------------------------------------------

    def _key_term(self, key: Key) -> int:
        return self._logged("_key_term", (key,), self.terms.number(key))

    def _term(self, operator: str, tensor: Tensor, *arguments: object) -> int:
        return self._key_term(Key(operator, arguments, tuple(tensor.shape), str(tensor.dtype)))

    def _operation_term(self, func: OpOverload, named: Mapping[str, Any], result: Any) -> int:
        key = operation_key(self.terms, func, named, result, self.term_of)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._random_term(key)
        is_elementwise = torch.Tag.pointwise in func.tags or operator_of_target(func).elementwise
        broadcasts = isinstance(result, Tensor) and (is_elementwise or key.operator == EMBEDDING)
        return self._elementwise_term(key) if broadcasts else self._key_term(key)

    def _elementwise_term(self, key: Key) -> int:
        return self._logged("_elementwise_term", (key,), elementwise_term(self.terms, key))

    def _random_term(self, key: Key) -> int:
        """The term of random numbers: equal operations draw other numbers each time."""
        self._draws[key] += 1
        random_key = key._replace(arguments=(*key.arguments, ("draw", self._draws[key])))
        return self._logged("_random_term", (key,), self.terms.number(random_key))

    def _view_term(self, source: int, steps: Sequence[Step]) -> int:
        return self._logged("_view_term", (Operand(source), tuple(steps)), view_term(self.terms, source, steps))

    def _memory_term(self, memory: int, steps: Sequence[Step]) -> int:
        """The term of a view of memory: what was written there, or a view of what was there before."""
        key = self.terms.keys[memory]
        if key.operator == "write" and key.arguments[1] == tuple(steps):
            written = key.arguments[2]
            assert isinstance(written, Operand)
            term = written.term
        else:
            term = view_term(self.terms, memory, steps)
        return self._logged("_memory_term", (Operand(memory), tuple(steps)), term)

    def _logged(self, method: str, arguments: tuple[Any, ...], term: int) -> int:
        if self._regions:
            entry = _Entry(method, arguments, term)
            for region in self._regions:
                region.entries.append(entry)
        return term

    # ---- regions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def region(self) -> Iterator[RecordedTerms]:
        """Keep the terms of a call, to make them again for others of equal code."""
        region = RecordedTerms(self._memories)
        self._regions.append(region)
        try:
            yield region
        finally:
            self._regions.pop()

    def is_new(self, tensor: Tensor, region: RecordedTerms) -> bool:
        """Return whether a tensor lies in memory that was made in a region."""
        return self._value(tensor).memory.number >= region.first_memory

    def memory_number(self, tensor: Tensor) -> int:
        """The number of the memory in which a tensor lies."""
        return self._value(tensor).memory.number

    def replay(self, region: RecordedTerms, terms: dict[int, int]) -> dict[int, int]:
        """Make the terms of a region again, for other arguments.

        Args:
            terms: the terms of the arguments and the state of the region → those of another call.

        Returns:
            The terms of the region → those of the other call.
        """
        replayed = dict(terms)
        for entry in region.entries:
            arguments = [
                part._replace(arguments=replace_terms(part.arguments, replayed))
                if isinstance(part, Key)
                else replace_terms(part, replayed)
                for part in entry.arguments
            ]
            plain = [part.term if isinstance(part, Operand) else part for part in arguments]
            replayed[entry.term] = getattr(self, entry.method)(*plain)
        return replayed

    def restore(self, tensor: Tensor, term: int, requires_grad: bool) -> None:
        """Let a tensor be a result of a replayed region."""
        self._new(tensor, term, requires_grad)

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator_of_target(func).check:
            return None
        named = arguments_by_name(func, args, kwargs)
        written = [name for name in _written_names(func) if isinstance(named.get(name), Tensor)]
        if torch.Tag.inplace_view in func.tags and operator_name(func)[0] != "detach_":
            return self._view_in_place(_Operation(func, args, kwargs, named), named[written[0]])
        if written and operator_name(func)[0] != "detach_":
            return self._write(_Operation(func, args, kwargs, named), written)
        result = func(*args, **kwargs)
        self._record(func, named, result)
        return result

    def _record(self, func: OpOverload, named: Mapping[str, Any], result: Any) -> None:
        name, source = operator_name(func)[0], next(iter(named.values()), None)
        if isinstance(source, Tensor) and self._record_view(func, name, named, source, result):
            return
        is_copy = name in _COPIES or _is_neutral(name, named)
        if is_copy and isinstance(source, Tensor) and result.dtype == source.dtype and result.shape == source.shape:
            self._new(result, *self._gradient(self.term_of(source), [source], result, func))
            return
        sources = [] if operator_of_target(func).factory else _tensors_in(named)
        if isinstance(result, Tensor):
            term, flows = self._gradient(self._operation_term(func, named, result), sources, result, func)
            if isinstance(source, Tensor) and storage_identity(result) == storage_identity(source):
                self._add(result, self._value(source).memory, None, term, flows)
            else:
                self._new(result, term, flows)
        elif isinstance(result, (tuple, list)):
            result_term = self._operation_term(func, named, result)
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    part_term = self._term("part", part, Operand(result_term), index)
                    self._new(part, *self._gradient(part_term, sources, part, func))

    def _record_view(self, func: OpOverload, name: str, named: Mapping[str, Any], source: Tensor, result: Any) -> bool:
        """Record an operation that is a view; return whether it is one."""
        if isinstance(result, Tensor):
            steps = view_steps(name, named, source, result)
            if steps is None:
                return False
            self._view(func, source, result, steps)
            return True
        parts = split_steps(name, named, source, result) if isinstance(result, (tuple, list)) else None
        for part, steps in zip(result, parts, strict=True) if parts is not None else ():
            self._view(func, source, part, steps)
        return parts is not None

    def _view(self, func: OpOverload, source: Tensor, result: Tensor, steps: Sequence[Step]) -> None:
        value = self._value(source)
        term, flows = self._gradient(self._view_term(self.term_of(source), steps), [source], result, func)
        if storage_identity(result) != storage_identity(source):  # a reshape that copies
            self._new(result, term, flows)
            return
        way = None if value.steps is None else _joined((*value.steps, *steps))
        self._add(result, value.memory, way, term, flows)

    def _view_in_place(self, operation: _Operation, target: Tensor) -> Tensor:
        """Run and record an operation after which a tensor is a view of what it was, such as ``unsqueeze_``."""
        name = operator_name(operation.func)[0]
        functional = torch.ops.aten.transpose.int if name == "transpose_" else operation.functional()
        if functional is None:
            raise UnknownValueError(f"{operation.func} has no form that returns a view")
        view = functional(*operation.args, **operation.kwargs)
        self._record(functional, operation.named, view)
        value = self._value(view)
        operation.run()
        self._add(target, value.memory, value.steps, value.term, value.requires_grad)
        return target

    def _gradient(self, term: int, sources: Sequence[Tensor], result: Tensor, func: OpOverload) -> tuple[int, bool]:
        """The term of a result, marked if a gradient is kept from it; and whether a gradient flows through it."""
        if not (result.is_floating_point() or result.is_complex()):
            return term, False
        if not any(self._value(source).requires_grad for source in sources):
            return term, False
        if torch.is_grad_enabled() and not operator_of_target(func).detaches:
            return term, True
        return self._term("no_grad", result, Operand(term)), False

    # ---- writes ------------------------------------------------------------------------------------------------------

    def _write(self, operation: _Operation, written: Sequence[str]) -> Any:
        """Run and record an operation that writes into arguments.

        Args:
            written: the names of these arguments.
        """
        is_copy = operator_name(operation.func)[0] == "copy_"
        functional = operation.functional() if len(written) == 1 else None
        if functional is None:
            return self._write_several(operation, written)
        target = operation.named[written[0]]
        if is_copy:
            source = operation.named["src"]
            term = self._cast(self.term_of(source), source, target)
            term = self._view_term(term, expansion(tuple(source.shape), tuple(target.shape)))
        else:
            result = functional(*operation.args, **operation.kwargs)
            term = self._cast(self._operation_term(functional, operation.named, result), result, target)
        term, flows = self._gradient(term, _tensors_in(operation.named), target, operation.func)
        returned = operation.run()
        self._store(target, term, flows)
        if isinstance(returned, Tensor) and id(returned) not in self._values:
            value = self._value(target)
            self._add(returned, value.memory, value.steps, term, value.requires_grad)
        return returned

    def _cast(self, term: int, source: Tensor, target: Tensor) -> int:
        """The term of a tensor in the dtype of another one."""
        if source.dtype == target.dtype:
            return term
        return self._key_term(Key(CAST, (("self", Operand(term)),), tuple(source.shape), str(target.dtype)))

    def _write_several(self, operation: _Operation, written: Sequence[str]) -> Any:
        """Run and record an operation that may return values as well: batch norm, which writes its statistics."""
        result_term = self._operation_term(operation.func, operation.named, None)
        result = operation.run()
        for name in written:
            target = operation.named[name]
            self._store(target, self._term("written", target, Operand(result_term), name), False)
        for index, part in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(part, Tensor) and id(part) not in self._values:
                part_term = self._term("part", part, Operand(result_term), index)
                sources = _tensors_in(operation.named)
                self._new(part, *self._gradient(part_term, sources, part, operation.func))
        return result

    def _store(self, target: Tensor, term: int, flows: bool) -> None:
        """Let a term be what lies in the memory of a tensor."""
        value = self._value(target)
        memory = value.memory
        if memory.number in self._read_only:
            raise WrittenInputError("it writes into a tensor that the stage was given")
        for region in self._regions:
            region.writes_outside |= memory.number < region.first_memory
        if value.steps == ():
            memory.term = term
        elif value.steps is not None and all(step.operator == "reshape" for step in value.steps):
            memory.term = self._view_term(term, [Step("reshape", memory.shape, memory.shape)])
        else:
            place = _layout(target) if value.steps is None else value.steps
            arguments = (Operand(memory.term), place, Operand(term))
            memory.term = self._key_term(Key("write", arguments, memory.shape, memory.dtype))
        memory.writes += 1
        value.term, value.writes = term, memory.writes
        value.requires_grad |= flows
        if self._on_term is not None:
            self._on_term(term)


def _is_neutral(name: str, named: Mapping[str, Any]) -> bool:
    """Return whether an operation adds 0, or multiplies by 1."""
    kinds, number = _NEUTRAL.get(name, ((), 0))
    operand = named.get("other")
    return type(operand) in kinds and operand == number and named.get("rounding_mode") is None


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """Where a tensor lies in its memory."""
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _joined(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps, with reshapes that follow one another as one."""
    joined: list[Step] = []
    for step in steps:
        if joined and step.operator == joined[-1].operator == "reshape":
            joined.pop()
        joined.append(step)
    return tuple(joined)


def _written_names(func: OpOverload) -> list[str]:
    aliased = (argument for argument in schema_arguments(func) if argument.alias_info is not None)
    return [argument.name for argument in aliased if argument.alias_info.is_write]


def _tensors_in(named: Mapping[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in named.values():
        parts = value if isinstance(value, (tuple, list)) else [value]
        tensors += [part for part in parts if isinstance(part, Tensor)]
    return tensors


def _constant(tensor: Tensor) -> Key:
    """The term of a tensor that no recorded operation made, such as ``torch.tensor([1, 2])``: its values."""
    values = values_of(tensor)
    if values is None:
        raise UnknownValueError(f"a tensor {tuple(tensor.shape)} comes from no recorded operation")
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    if tensor.numel() > _SMALL:
        return Key("constant", (values,), shape, dtype)
    with no_dispatch():
        numbers = tuple(number_argument(number) for number in tensor.flatten().tolist())
    return Key("full" if len(numbers) == 1 else "constant", numbers, shape, dtype)
