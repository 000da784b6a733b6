"""Read the text of a ``forward`` statement by statement, and that of the methods and functions that it calls."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from pipegraph.codegen.author_text.constructors import CONTAINERS
from pipegraph.codegen.author_text.cut import FunctionCut, TextLine, UnwritableError, definition
from pipegraph.codegen.author_text.edits import (
    Edit,
    OpenSizes,
    UsedSides,
    edited,
    end_of,
    present,
    replacement,
    start_of,
)
from pipegraph.codegen.author_text.headers import as_method, part_header, with_known_annotations, without_parameters
from pipegraph.codegen.author_text.names import (
    STANDARD,
    WITH_EFFECTS,
    AbsentPart,
    ForwardSurroundings,
    GraphPart,
    MixedMethod,
    MixedMethodError,
    Part,
    ReadNames,
    StagePart,
    TextPart,
    check_node,
    function_name,
    import_of,
    is_plain,
    origin_of,
    plain_expression,
)
from pipegraph.codegen.author_text.simplify import CalledFunctions
from pipegraph.codegen.author_text.statements import (
    SELF,
    arguments_of,
    assigns_sizes,
    attributes_set_by,
    called_once,
    divides_features,
    first_line_of,
    header_end,
    is_self,
    is_stored,
    is_super,
    may_divide_features,
    opened_sizes,
    parsed,
    returns,
    sets_attributes,
    tests_attribute,
    unchanged_arguments,
    variables,
)
from pipegraph.codegen.author_text.tables import table_expression
from pipegraph.codegen.syntax.expressions import Name, literal
from pipegraph.graph.calls import FunctionRun, ModuleValue
from pipegraph.graph.captured import ExecutedLines, ForwardFunction, LineStep
from pipegraph.graph.export.executed_lines import is_of_model
from pipegraph.graph.model_structure import is_layer_of_torch


def names_of_module(
    module: nn.Module,
    fqn: str,
    lines: ExecutedLines,
    surroundings: ForwardSurroundings,
    called_functions: CalledFunctions,
) -> ReadNames:
    """Return the text of the ``forward`` of a module, of the methods that it calls, and what these read.

    Args:
        called_functions: what is left of the functions of the model.

    Raises:
        UnwritableError: they read something that a package does not have.
    """
    forward = lines.forwards.get(fqn)
    function = inspect.unwrap(type(module).forward if forward is None else forward.function)
    if not isinstance(function, FunctionType):
        raise UnwritableError("its forward is not written in Python")
    file = function.__code__.co_filename
    names = ReadNames(origin_of(file), file)
    try:
        reader = _SourceReader(names, lines, module, fqn, surroundings, called_functions)
        reader.read_forward(function)
    except (AttributeError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        # Attributes and properties of a model's objects may raise any of these.
        raise UnwritableError(f"it cannot be read: {error}") from error
    return names


def add_called_function(
    names: ReadNames,
    module: nn.Module,
    fqn: str,
    lines: ExecutedLines,
    surroundings: ForwardSurroundings,
    called_functions: CalledFunctions,
    run: FunctionRun,
    has_features: bool,
) -> None:
    """Let the text of a module have the function, or the method, of a call.

    Args:
        called_functions: what is left of the functions of the model.
        has_features: whether a value in the call depends on parameters, which ranks along `tp` may divide.

    Raises:
        UnwritableError: the package cannot have it. ``names`` are as before.
    """
    if run.is_method and run.name in names.mixed_methods:
        raise UnwritableError("some of its statements are written from the graph")
    reader = _SourceReader(names, lines, module, fqn, surroundings, called_functions)
    texts, base = {*names.methods, *names.functions}, names.base
    children, attributes_set = set(names.children), set(names.attributes_set)
    with names.undone_on_error():
        try:
            if run.is_method:
                reader.add_method(run.name)
            else:
                reader.add_function(run.function, run.name)
        except (AttributeError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
            raise UnwritableError(f"it cannot be read: {error}") from error
        if (names.attributes_set, names.base) != (attributes_set, base):
            names.base = base
            raise UnwritableError("it sets attributes, or uses super")
        names.children |= {form.name for _, form in run.arguments if isinstance(form, ModuleValue)}
        for child in sorted(names.children - children):
            surroundings.check_child(child)
        methods = {name: "\n".join(line.text for line in text) for name, text in names.methods.items()}
        trees = [ast.parse(text) for name, text in {**methods, **names.functions}.items() if name not in texts]
        if has_features and any(divides_features(module, tree, tree) for tree in trees):
            raise UnwritableError("it names numbers of features, which ranks along tp divide")


class _SourceReader:
    """Reads the names of functions, one after the other."""

    def __init__(
        self,
        names: ReadNames,
        lines: ExecutedLines,
        module: nn.Module | None,
        fqn: str,
        surroundings: ForwardSurroundings,
        called_functions: CalledFunctions,
    ) -> None:
        self._names, self._lines, self._module, self._fqn = names, lines, module, fqn
        self._surroundings = surroundings
        self.attributes_set = attributes_set_by(type(module), lines.modules.get(fqn, ()))
        self._called_functions = called_functions
        self.texts = surroundings.texts

    @property
    def is_part(self) -> bool:
        """Whether the text is that of a part of a ``forward``."""
        return self._surroundings.stage_part is not None

    def add_autograd_function(self, name: str) -> None:
        """Add a custom Function whose text the package has. Raises UnwritableError if it does not."""
        if name not in self._surroundings.autograd_functions:
            raise UnwritableError(f"{name} is a Function without text")
        if name in self._names.functions:
            return
        text = self._surroundings.autograd_functions[name]
        for called in sorted(text.calls):
            self.add_autograd_function(called)
        self._names.functions[name] = text.functions[0]
        self._names.needs[name] = text.calls, text.constants, text.imports, text.origin
        self._names.constants |= dict(text.constants)

    def read_forward(self, function: FunctionType) -> None:
        """Read the ``forward``, statement by statement."""
        assert self._module is not None
        surroundings = self._surroundings
        self._check_closure(function)
        cut = FunctionCut(
            function.__code__.co_filename,
            function.__code__.co_firstlineno,
            self._lines.modules.get(self._fqn, frozenset()),
        )
        lines = self._simplified(cut, function)
        forward = self._lines.forwards.get(self._fqn)
        if forward is not None:
            of_class = inspect.unwrap(type(self._module).forward)
            _check_parameters(function, forward, of_class)
            lines = as_method(lines, "forward", forward.parameter, forward.owner, definition(of_class))
        text = _Text(self, function, lines)
        parts = list(text.parts(surroundings))
        if self._names.attributes_set and not text.returns_last:
            raise UnwritableError("it sets attributes, and returns before its last statement")
        decorators = [TextLine(decorator, 0) for decorator in self._decorators(cut)]
        header: Sequence[TextLine] = text.header
        if surroundings.stage_part is not None:
            if not (text.returns_last and isinstance(parts[-1], TextPart)):
                parts.append(GraphPart((), frozenset({_END}), frozenset(), True, "it is cut"))
            self._names.imports["Tensor"] = "from torch import Tensor"
            header = [TextLine(line, 0) for line in part_header(surroundings.stage_part)]
        self._names.parts = tuple(_joined(parts))
        self._names.header = (*decorators, *header)
        for name in self._names.mixed_methods:
            if any(line.text.find(f"self.{name}(") >= 0 for lines in self._names.methods.values() for line in lines):
                raise MixedMethodError(name, "other methods call it, too")

    def _simplified(self, cut: FunctionCut, function: FunctionType) -> list[TextLine]:
        return self._called_functions.simplified(cut.lines, function)

    def _check_closure(self, function: FunctionType) -> None:
        if set(function.__code__.co_freevars) - {"__class__"}:
            raise UnwritableError(f"{function.__name__} reads variables of the function around it")

    def add_method(self, name: str) -> None:
        """Add a method of the module's class, and what it reads."""
        if name in self._names.methods:
            return
        member = inspect.getattr_static(type(self._module), name)
        decorators = list[TextLine]()
        function = member
        if isinstance(member, (staticmethod, classmethod)):
            decorators, function = [TextLine(f"@{type(member).__name__}", 0)], member.__func__
        elif isinstance(member, property):
            decorators, function = [TextLine("@property", 0)], member.fget
        if isinstance(member, classmethod) or not isinstance(inspect.unwrap(function), FunctionType):
            raise UnwritableError(f"{name} is not a plain method")
        self._names.methods[name] = ()  # so that a method that calls itself ends
        steps = self._lines.modules.get(self._fqn, frozenset())
        if isinstance(member, staticmethod):
            code = inspect.unwrap(function).__code__
            steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        text = self._text(function, steps)
        code = inspect.unwrap(function).__code__
        if code.co_name != name and steps and code.co_varnames[:1] == (SELF,):
            text = as_method(text, name, SELF)
        file = code.co_filename
        if any((file, number) in self._surroundings.graph_lines for line in text for number in line.numbers):
            raise UnwritableError(f"{name} computes something else than the graph")
        self._names.methods[name] = (*decorators, *text)

    def add_function_as_method(self, function: FunctionType, name: str) -> None:
        """Add a function that takes the module first as a method of the class."""
        if name in self._names.methods:
            return
        code = function.__code__
        if code.co_name != name or not code.co_argcount:
            raise UnwritableError(f"{name} is defined under another name")
        self._names.methods[name] = ()  # so that a function that calls itself ends
        self._check_closure(function)
        parameter = code.co_varnames[0]
        last = max(line for _, _, line in code.co_lines() if line is not None)
        steps = frozenset(
            step
            for step in self._lines.modules.get(self._fqn, ())
            if step.file == code.co_filename and code.co_firstlineno <= step.start <= last
        ) or self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        cut = FunctionCut(code.co_filename, code.co_firstlineno, steps)
        lines = as_method(self._simplified(cut, function), name, parameter)
        self._names.methods[name] = tuple(_Text(self, function, lines).resolved())

    def add_mixed_method(self, name: str, call_lines: frozenset[int]) -> None:
        """Add a method, of which some statements are written from the graph.

        Args:
            call_lines: the lines of the only statement that calls it.
        """
        member = inspect.getattr_static(type(self._module), name)
        function = inspect.unwrap(member)
        of_method = self._surroundings.of_method
        if not isinstance(function, FunctionType) or of_method is None or name in self._surroundings.whole_methods:
            raise UnwritableError(f"{name} has no text with statements from the graph")
        self._check_closure(function)
        code = function.__code__
        if code.co_filename != self._names.file:
            raise UnwritableError(f"{name} is in another file")
        cut = FunctionCut(code.co_filename, code.co_firstlineno, self._lines.modules.get(self._fqn, frozenset()))
        text = _Text(self, function, self._simplified(cut, function))
        parts = tuple(_joined(text.parts(of_method(code.co_firstlineno, call_lines))))
        if any(isinstance(part, GraphPart) and part.returns for part in parts):
            raise UnwritableError(f"{name} returns something that is written from the graph")
        header = (*(TextLine(decorator, 0) for decorator in self._decorators(cut)), *text.header)
        self._names.mixed_methods[name] = MixedMethod(header, parts, code.co_firstlineno, call_lines)

    def add_function(self, function: Callable[..., Any], name: str) -> None:
        """Add a function of the model's source."""
        if name in self._names.functions:
            return
        code = inspect.unwrap(function).__code__
        if code.co_name != name:
            raise UnwritableError(f"{name} is defined under another name")
        steps = self._lines.functions.get((code.co_filename, code.co_firstlineno), frozenset())
        inner = ReadNames(origin_of(code.co_filename), functions=self._names.functions, needs=self._names.needs)
        reader = _SourceReader(inner, self._lines, None, "", self._surroundings, self._called_functions)
        text = reader._text(function, steps)
        self._names.functions[name] = "\n".join(line.text for line in text)  # after those that it calls
        self._names.constants |= inner.constants
        self._names.imports |= inner.imports
        calls = frozenset(inner.functions) - {name}
        constants, imports = tuple(inner.constants.items()), frozenset(inner.imports.values())
        self._names.needs[name] = calls, constants, imports, inner.origin

    def _text(self, decorated: Callable[..., Any], steps: frozenset[LineStep]) -> list[TextLine]:
        """The text of a function, cut to what ran, with the names in it resolved."""
        function = inspect.unwrap(decorated)
        code = function.__code__
        self._check_closure(function)
        cut = FunctionCut(code.co_filename, code.co_firstlineno, steps)
        decorators = [TextLine(decorator, 0) for decorator in self._decorators(cut)]
        lines = self._simplified(cut, function)
        callee = self._called_functions.callee(function) if self._module is None else None
        if callee is not None:
            lines = without_parameters(lines, callee.unread)
        return [*decorators, *_Text(self, function, lines).resolved()]

    def base_of(self, function: FunctionType, calls: Sequence[str], count: int) -> type[nn.Module]:
        """The layer of torch that has the methods that a method calls by ``super()``.

        Raises:
            UnwritableError: it uses ``super()`` otherwise, or a class of the model has such a method.
        """
        if self._module is None or self._surroundings.stage_part is not None or [*calls] != ["forward"] * count:
            raise UnwritableError("it uses super")
        classes = type(self._module).__mro__
        places = [at for at, owner in enumerate(classes) if _code_of(owner, function.__name__) is function.__code__]
        bases = classes[places[0] + 1 :] if places else ()
        base: type[nn.Module] | None = next((owner for owner in bases if "forward" in vars(owner)), None)
        if base is None or not is_layer_of_torch(base) or base not in vars(nn).values():
            raise UnwritableError("it uses super of a class of the model")
        return base

    def may_have_run(self, function: FunctionType) -> bool:
        """Return whether a function ran, or is in a file whose lines are not recorded."""
        code = inspect.unwrap(function).__code__
        ran = bool(self._lines.functions.get((code.co_filename, code.co_firstlineno)))
        return ran or not is_of_model(code.co_filename)

    def ran_lines(self, function: FunctionType) -> frozenset[int]:
        """The numbers of the lines of a function's file that ran in this module, or in calls of the function."""
        file, first_line = function.__code__.co_filename, function.__code__.co_firstlineno
        steps = (*self._lines.modules.get(self._fqn, ()), *self._lines.functions.get((file, first_line), ()))
        return frozenset(line for step in steps if step.file == file for line in (step.start, step.end))

    def absent_lines(self, file: str, lines: Iterable[TextLine]) -> frozenset[int]:
        """The numbers of the lines of a function that other modules of the class run, and this module does not."""
        module_lines = self._surroundings.module_lines
        if module_lines is None or self._module is None:
            return frozenset()
        return frozenset(line.number for line in lines if (file, line.number) not in module_lines)

    def _decorators(self, cut: FunctionCut) -> list[str]:
        # Those of other libraries are left out: if they compute anything, the comparison with the graph says so.
        decorators = [f"@{decorator}" for decorator in cut.decorators if decorator.startswith("torch.")]
        for decorator in decorators:
            check_node(ast.parse(decorator.removeprefix("@"), mode="eval").body)
        if decorators:
            self._names.imports["torch"] = "import torch"
        return decorators


_OF_ANY_TENSOR: Final = ("dtype", "device")
"""Attributes that are the same for all tensors that a model computes with."""
_END: Final = sys.maxsize  # the line of the ``return`` of a part


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts, with those that are written from the graph and follow each other as one."""
    waiting: GraphPart | None = None
    for part in parts:
        if isinstance(part, GraphPart):
            waiting = part if waiting is None else waiting.joined(part)
            continue
        if isinstance(part, AbsentPart):
            yield part
            continue
        if waiting is not None:
            yield waiting
        waiting = None
        yield part
    if waiting is not None:
        yield waiting


class _Text:
    """The text of one function, and where it reads what."""

    def __init__(self, reader: _SourceReader, function: FunctionType, lines: Sequence[TextLine]) -> None:
        self._reader, self._names, self._module = reader, reader._names, reader._module
        self._function = function
        namespace = self._namespace = function.__globals__
        self._lines, self._tree = with_known_annotations(lines, parsed(lines), namespace)
        tree = self._tree
        self._local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and is_stored(node)}
        self._local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        self._local |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._parents = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        self._attributes_set = reader.attributes_set
        self._edits = list(self._general_edits(tree))
        self._absent = set(_nodes_on(tree, self._lines, reader.absent_lines(function.__code__.co_filename, lines)))

    def _general_edits(self, tree: ast.FunctionDef) -> Iterator[Edit]:
        """Replace conditional expressions of which one side never ran by the other side, and sizes that ranks along
        `tp` divide by -1."""

        def ran(function: ast.expr) -> bool:
            value = self._namespace.get(function.id) if isinstance(function, ast.Name) else None
            return not isinstance(value, FunctionType) or self._reader.may_have_run(value)

        sides = UsedSides(self._lines, ran, self._reader.ran_lines(self._function))
        sides.visit(tree)
        yield from sides.edits
        if self._module is not None and may_divide_features(self._module, tree):
            sizes = OpenSizes(opened_sizes(tree))
            sizes.visit(tree)
            yield from sizes.edits

    @property
    def header(self) -> list[TextLine]:
        """The lines before the first statement. It is there when the text was read."""
        return present(self._edited()[: header_end(self._lines, self._tree)])

    @property
    def returns_last(self) -> bool:
        """Whether its last statement is its only ``return``."""
        *statements, last = self._tree.body
        return isinstance(last, ast.Return) and not any(map(returns, statements))

    def resolved(self) -> list[TextLine]:
        """The lines, with numbers in the place of attributes that a package does not have."""
        self._resolve(self._tree)
        return present(self._edited())

    def parts(self, surroundings: ForwardSurroundings) -> Iterator[Part]:
        """Yield the statements of a ``forward``, or of a method that it calls.

        A statement that reads something that a package does not have is written from the graph. So is one that reads a
        variable that such a statement assigns, unless the variable is a tensor.
        """
        stage_part = surroundings.stage_part
        unknown, none_variables = set(surroundings.unread), set[str]()
        if stage_part is None:
            self._resolve(self._tree.args)
        else:
            arguments = {node.arg for node in ast.walk(self._tree.args) if isinstance(node, ast.arg)}
            unknown = arguments - {SELF} - set(stage_part.parameters.values())
        start = header_end(self._lines, self._tree)
        parts: list[tuple[range, Part]] = []
        for statement in self._tree.body:
            end = statement.end_lineno or statement.lineno
            numbers = frozenset(number for line in self._lines[start:end] for number in line.numbers)
            reads, assigns = variables(statement, ast.Load) & self._local, variables(statement, ast.Store)
            edits = len(self._edits)
            if stage_part is not None and numbers & stage_part.other_lines and not numbers & stage_part.lines:
                values = {name: surroundings.value(name, numbers) for name in assigns}
                parameters = {
                    name for name, value in values.items() if value and stage_part.parameters.get(value) == name
                }
                parts.append((range(start, end), AbsentPart(numbers, frozenset(parameters))))
                unknown = (unknown - parameters) | (assigns - parameters)
                none_variables -= assigns
                start = end
                continue
            try:
                with self._names.undone_on_error():
                    if stage_part is not None:
                        is_whole = not any(
                            isinstance(part, GraphPart) and part.numbers & surroundings.lines for _, part in parts
                        )
                        _check_part(statement, numbers, stage_part, is_whole and self.returns_last)
                    if any((self._names.file, number) in surroundings.graph_lines for number in numbers):
                        raise UnwritableError("it computes something else than the graph")
                    self._keep_or_mix(statement, numbers, unknown, none_variables, surroundings)
            except UnwritableError as reason:
                del self._edits[edits:]
                is_return = isinstance(statement, ast.Return)
                has_absent = any(id(node) in self._absent for node in ast.walk(statement))
                if (not is_return and returns(statement)) or sets_attributes(statement) or has_absent:
                    raise
                has_operations = is_return or bool(numbers & surroundings.lines)
                comments = tuple(self._lines[start : first_line_of(statement) - 1]) if has_operations else ()
                tensors = frozenset(name for name in assigns if surroundings.value(name, numbers) is not None)
                parts.append((range(start, end), GraphPart(comments, numbers, tensors, is_return, str(reason))))
                for name in assigns:
                    unknown.discard(name)
                    none_variables.discard(name)
                    if name not in tensors:
                        (none_variables if surroundings.is_none(name, numbers) else unknown).add(name)
            else:
                unknown -= assigns
                none_variables -= assigns
                # What it computes is in no graph: nothing reads it.
                is_dead = isinstance(statement, (ast.Assign, ast.AnnAssign)) and not numbers & surroundings.lines
                is_plain = assigns_sizes(statement)
                parts.append((range(start, end), TextPart((), numbers, reads, assigns, is_plain, is_dead)))
            start = end
        lines = self._edited()
        for place, part in parts:
            text = tuple(present(lines[place.start : place.stop]))
            yield replace(part, lines=text) if isinstance(part, TextPart) else part

    def _keep_or_mix(
        self,
        statement: ast.stmt,
        numbers: frozenset[int],
        unknown: AbstractSet[str],
        none_variables: AbstractSet[str],
        surroundings: ForwardSurroundings,
    ) -> None:
        """Take over the text of a statement, and that of the method that it calls with statements from the graph in it
        if this is possible alone. Raises UnwritableError."""
        edits = len(self._edits)
        try:
            with self._names.undone_on_error():
                self._keep(statement, numbers, unknown, none_variables, surroundings)
        except UnwritableError as reason:
            methods = [name for name in called_once(statement, self._tree) if self._has_method(name)]
            if surroundings.of_method is None or len(methods) != 1 or methods[0] in self._names.methods:
                raise
            del self._edits[edits:]
            try:
                self._reader.add_mixed_method(methods[0], numbers)
                self._names.methods[methods[0]] = ()
                self._keep(statement, numbers, unknown, none_variables, surroundings)
            except UnwritableError:
                raise reason from None

    def _has_method(self, name: str) -> bool:
        is_plain_method = isinstance(inspect.getattr_static(type(self._module), name, None), FunctionType)
        return is_plain_method and getattr(nn.Module, name, None) is None

    def _keep(
        self,
        statement: ast.stmt,
        numbers: frozenset[int],
        unknown: AbstractSet[str],
        none_variables: AbstractSet[str],
        surroundings: ForwardSurroundings,
    ) -> None:
        """Take over the text of a statement. Raises UnwritableError."""
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call) and self._is_child(node.func))
        passed_on = {id(argument) for call in calls for argument in arguments_of(call)}
        for node in ast.walk(statement):
            if not isinstance(node, ast.Name) or node.id not in unknown or is_stored(node) or id(node) in self._absent:
                continue
            part = surroundings.stage_part
            names = surroundings.unread if part is None else part.parameters.values()
            is_left_out = node.id in names and id(node) in passed_on
            attribute = self._parents.get(id(node))
            if node.id in surroundings.unread_tensors and attribute is not None and attribute.attr in _OF_ANY_TENSOR:
                self._names.unread_tensors.add(node.id)
            elif not is_left_out:
                raise UnwritableError(f"{node.id} is no tensor")
        texts = {*self._names.methods, *self._names.functions}
        try:
            self._resolve(statement)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            # Attributes and properties of a model's objects may raise any of these.
            raise UnwritableError(f"it cannot be read: {error}") from error
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and is_self(node.value) and id(node) not in self._absent:
                surroundings.check_child(self._child_path(node))
        self._edits += self._without_none(statement, none_variables)
        methods = {name: "\n".join(line.text for line in lines) for name, lines in self._names.methods.items()}
        called = {**methods, **self._names.functions}
        trees: list[ast.AST] = [
            statement,
            *(ast.parse(text) for name, text in called.items() if name not in texts),
        ]
        if self._module is None or (
            surroundings.feature_lines is not None and numbers.isdisjoint(surroundings.feature_lines)
        ):
            return
        # A module with linear layers takes all features of its arguments; its methods take those of its layers.
        is_forward = self._tree.name == "forward"
        replicated = unchanged_arguments(self._tree, statement.lineno) if is_forward else frozenset()
        if any(
            divides_features(self._module, tree, self._tree, replicated if tree is statement else frozenset())
            for tree in trees
        ):
            raise UnwritableError("it names numbers of features, which ranks along tp divide")

    def _without_none(self, statement: ast.stmt, none_variables: AbstractSet[str]) -> list[Edit]:
        """The edits of a statement that let it do without variables that are None: ``None`` in their place, and the
        side of ``x if mask is None else y`` that ran."""
        edits: list[Edit] = []
        waiting: list[ast.AST] = [statement]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Name) and node.id in none_variables and not is_stored(node):
                if isinstance(statement, ast.Assert):
                    raise UnwritableError("it checks a variable that is None")
                edits.append(replacement(node, "None"))
            elif isinstance(node, ast.IfExp) and (side := self._side_that_ran(node, none_variables)) is not None:
                edits.append(replacement(node, side))
            else:
                waiting += ast.iter_child_nodes(node)
        return edits

    def _side_that_ran(self, choice: ast.IfExp, none_variables: AbstractSet[str]) -> str | None:
        """The text of one side of a conditional expression on a variable that is None; None if it is not on one line or
        has edits."""
        match choice.test:
            case ast.Compare(ast.Name(name), [ast.Is() | ast.IsNot() as comparison], [ast.Constant(None)]):
                side = choice.body if isinstance(comparison, ast.Is) else choice.orelse
            case _:
                return None
        names = {node.id for node in ast.walk(side) if isinstance(node, ast.Name)}
        has_edits = any(edit.is_within(choice) for edit in self._edits) or bool(names & none_variables)
        if name not in none_variables or has_edits or choice.lineno != choice.end_lineno:
            return None
        line = self._lines[side.lineno - 1].text.encode()
        text = line[side.col_offset : side.end_col_offset].decode()
        return (
            text if isinstance(side, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)) else f"({text})"
        )

    def _is_child(self, function: ast.expr) -> bool:
        """Return whether a call may be that of a child: ``self.attention``, ``self.layers[0]``, ``layer`` of a loop."""
        while isinstance(function, (ast.Attribute, ast.Subscript)):
            function = function.value
        return isinstance(function, ast.Name) and (function.id == SELF or function.id in self._local)

    def _resolve(self, tree: ast.AST) -> None:
        """Read the names in a part of the function. Raises UnwritableError."""
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and tests_attribute(node)]
        tested = {id(test.args[0]) for test in tests}
        for test in tests:
            attribute = ast.Attribute(test.args[0], ast.literal_eval(test.args[1]), ast.Load())
            if self._module is not None and hasattr(self._module, attribute.attr):
                self._read_attribute(attribute, {})
        supers = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and is_super(node)}
        calls = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_super(node.value)]
        if supers:
            self._names.base = self._reader.base_of(self._function, calls, len(supers))
        takers = self._functions_taking_the_module(tree)
        for node in ast.walk(tree):
            check_node(node)
            if isinstance(node, ast.Attribute) and is_self(node.value) and self._module is not None:
                self._read_attribute(node, self._parents)
            elif isinstance(node, ast.Name) and not is_stored(node):
                if id(node) in takers:
                    continue
                if node.id == SELF and self._module is not None and id(node) not in self._owners | tested:
                    raise UnwritableError("it hands itself on")
                if node.id not in self._local and id(node) not in supers:
                    self._read_global(node.id)

    def _functions_taking_the_module(self, tree: ast.AST) -> set[int]:
        """Make methods of the functions that a part of the text calls with its module, ``project(self, x)``.

        Returns:
            the ids of the nodes of these functions and modules.
        """
        nodes = set[int]()
        for node in ast.walk(tree) if self._module is not None else ():
            match node:
                case ast.Call(ast.Name(name) as called, [ast.Name("self") as module, *others]):
                    function = inspect.unwrap(self._namespace.get(name, name))
                case _:
                    continue
            if name in self._local or not isinstance(function, FunctionType) or hasattr(self._module, name):
                continue
            self._reader.add_function_as_method(function, name)
            nodes |= {id(called), id(module)}
            arguments: list[ast.expr | ast.keyword] = [*others, *node.keywords]
            line, column = end_of(node)
            following = min(map(start_of, arguments), default=(line, column - 1))
            self._edits += [replacement(called, f"self.{name}"), Edit(start_of(module), following, "")]
        return nodes

    # ---- attributes --------------------------------------------------------------------------------------------------

    def _read_attribute(self, node: ast.Attribute, parents: Mapping[int, ast.Attribute]) -> None:
        module, name = self._module, node.attr
        assert module is not None
        if not isinstance(node.ctx, ast.Load):
            if name == "training" or name in self._registered():
                raise UnwritableError(f"it sets self.{name}")
            self._names.attributes_set.add(name)
        if name == "training":
            return
        if id(node) in self._absent and not (name in vars(module) or hasattr(type(module), name)):
            return  # nothing reads it in this module
        for registered in (module._modules, module._parameters, module._buffers):
            if name in registered:
                if registered[name] is None:
                    self._names.attributes[name] = literal(None)
                elif registered is module._modules:
                    self._names.children.add(self._child_path(node))
                return
        if name in self._attributes_set:
            return
        if name in vars(module):
            self._read_value(node, vars(module)[name], parents)
            return
        try:
            member = inspect.getattr_static(type(module), name)
        except AttributeError:
            raise UnwritableError(f"self.{name} is not there") from None
        if isinstance(member, (FunctionType, staticmethod, classmethod, property)):
            if getattr(nn.Module, name, None) is not None:
                raise UnwritableError(f"it calls self.{name}")
            if isinstance(member, staticmethod) and self._reader.is_part and name not in self._local:
                self._reader.add_function(member.__func__, name)
                self._edits.append(replacement(node, name))  # all parts of the class share it
                return
            self._reader.add_method(name)
        else:
            self._read_value(node, member, parents)

    def _child_path(self, node: ast.Attribute) -> str:
        """``transformer.wte`` of ``self.transformer.wte``, whose ``self.transformer`` is a container of modules."""
        assert self._module is not None
        path, child = node.attr, self._module._modules.get(node.attr)
        while isinstance(child, nn.Module) and type(child) in CONTAINERS and id(node) in self._parents:
            node = self._parents[id(node)]
            if node.attr not in child._modules:
                break
            path, child = f"{path}.{node.attr}", child._modules[node.attr]
        return path

    def _read_value(self, node: ast.Attribute, value: Any, parents: Mapping[int, ast.Attribute]) -> None:
        """Read an attribute, or what an object in it has: ``self.config.eps`` is written as ``self.eps``."""
        first, outer = node, node
        while not (is_plain(value) or function_name(value)) and id(outer) in parents:
            outer = parents[id(outer)]
            value = getattr(value, outer.attr, _MISSING)
        if isinstance(value, torch.Tensor):
            if outer is not first:
                raise UnwritableError(f"it reads a tensor of self.{first.attr}")
            return
        written = Name(function_name(value)) if function_name(value) else plain_expression(value)
        if written is None:
            raise UnwritableError(f"self.{first.attr} is a {type(value).__name__}")
        name = outer.attr
        if outer is not first:
            is_taken = name in vars(self._module) and plain_expression(vars(self._module)[name]) != written
            if is_taken or name in self._registered():
                name = f"{first.attr}_{name}"
            self._edits.append(replacement(outer, f"self.{name}"))
        if id(node) in self._absent:
            return  # this module does not read it
        if self._names.attributes.setdefault(name, written) != written:
            raise UnwritableError(f"self.{name} would be two things")

    def _registered(self) -> set[str]:
        assert self._module is not None
        return {*self._module._modules, *self._module._parameters, *self._module._buffers}

    # ---- global names ------------------------------------------------------------------------------------------------

    def _read_global(self, name: str) -> None:
        if name not in self._namespace:
            if not hasattr(builtins, name) or name in WITH_EFFECTS:
                raise UnwritableError(f"it uses {name}")
            return
        value = self._namespace[name]
        imported = import_of(name, value)
        if imported is not None:
            self._names.imports[name] = imported
        elif isinstance(value, FunctionType) and not value.__module__.startswith("torch."):
            self._reader.add_function(value, name)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function) and value.__name__ == name:
            self._reader.add_autograd_function(name)
        elif (constant := plain_expression(value) or table_expression(value, self._reader.texts)) is not None:
            self._names.constants[name] = constant
            read = (standard for standard in ("F", "nn", "torch") if f"{standard}." in constant.text)
            self._names.imports |= {standard: STANDARD[standard] for standard in read}
        else:
            raise UnwritableError(f"{name} is a {type(value).__name__}, which no package can import")

    def _edited(self) -> list[TextLine | None]:
        return edited(self._lines, self._edits)


def _nodes_on(tree: ast.FunctionDef, lines: Sequence[TextLine], numbers: frozenset[int]) -> Iterator[int]:
    """The ids of the nodes of the statements of a function that are on these lines alone."""
    waiting: list[ast.stmt] = list(tree.body) if numbers else []
    while waiting:
        statement = waiting.pop()
        places = lines[statement.lineno - 1 : statement.end_lineno]
        if all(line.number in numbers for line in places if line.text.strip()):
            yield from map(id, ast.walk(statement))
        else:
            waiting += (node for node in ast.walk(statement) if isinstance(node, ast.stmt) and node is not statement)


def _check_parameters(function: FunctionType, forward: ForwardFunction, of_class: Callable[..., Any]) -> None:
    """Raise UnwritableError if a function takes its arguments in another order than the ``forward`` of a class."""
    named = [
        [parameter for parameter, value in inspect.signature(taker).parameters.items() if value.kind not in _VARIADIC]
        for taker in (function, of_class)
    ]
    parameters = named[0][named[0].index(forward.parameter) + 1 :]
    if named[1][1:] != parameters[: len(named[1]) - 1]:
        raise UnwritableError("it hands its module to a function with other parameters")


_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _code_of(owner: type, name: str) -> Any:
    return getattr(inspect.unwrap(vars(owner).get(name, owner)), "__code__", None)


def _check_part(statement: ast.stmt, numbers: frozenset[int], stage_part: StagePart, may_return: bool) -> None:
    """Raise UnwritableError for a statement that a part of a ``forward`` does not keep.

    A part keeps the ``return`` if it computes something, nothing else leaves the part, and all of the part is the
    author's text: the only line of the author among others would not have the names that these have.
    """
    if isinstance(statement, ast.Return):
        is_last = may_return and stage_part.results == 1 and bool(numbers & stage_part.lines)
        if not is_last or isinstance(statement.value, (ast.Tuple, ast.Dict)):
            raise UnwritableError("a part returns other values")
    if numbers & stage_part.other_lines:
        raise UnwritableError("it is cut")
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        raise UnwritableError("it describes more than the part")


_MISSING: Final = object()
