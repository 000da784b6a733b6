"""Read the author's text of the class of a call, with what the captured graph says about that call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from torch import fx

from pipegraph.codegen.author_text.class_lines import ClassLines
from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.author_text.function_steps import FunctionSteps
from pipegraph.codegen.author_text.names import ForwardSurroundings, MixedMethod, ReadNames, StagePart
from pipegraph.codegen.author_text.reader import add_called_function, names_of_module
from pipegraph.codegen.author_text.simplify import CalledFunctions
from pipegraph.codegen.author_text.variables import CallVariables, first_line, unread_parameters, variables_by_call
from pipegraph.codegen.author_text.written_functions import WriteFunction, WrittenFunctions
from pipegraph.codegen.forward.items import Step
from pipegraph.codegen.names.identifiers import unused
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.statements import SourceText
from pipegraph.graph.calls import CallTree, CallValues, FunctionRun, StageMembers, argument_place, sorted_by_place
from pipegraph.graph.captured import Captured, ExecutedLines
from pipegraph.graph.model_structure import is_layer_of_torch
from pipegraph.graph.nodes import parameter_values, path_of
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.modules import has_forward_hooks


class CallReader:
    """Reads the texts of the classes of a captured model.

    Args:
        captured: the model.
        source: the statements of its source.
        graph_lines: files and lines of statements that are written from the graph.
        autograd_functions: the custom Functions whose text the package has, by name.
    """

    def __init__(
        self,
        captured: Captured,
        source: SourceStatements,
        graph_lines: frozenset[tuple[str, int]],
        autograd_functions: Mapping[str, SourceText],
    ) -> None:
        self._captured, self._source = captured, source
        self._graph_lines, self._autograd_functions = graph_lines, autograd_functions
        self._variable_places = variables_by_call(captured.nodes)
        self._parameter_values = parameter_values(captured.nodes)
        self._class_lines = ClassLines(captured, source)
        self._arguments: dict[str, list[fx.Node]] = {}
        for node in captured.nodes:
            for call in node.meta.get("argument_of", {}):
                self._arguments.setdefault(call, []).append(node)
        lines = captured.lines or ExecutedLines({}, {}, {})
        self._called_functions = CalledFunctions(lines)
        self._functions = FunctionSteps(captured.nodes, source, self._called_functions)
        attributes = (value for entry in captured.modules.values() for value in vars(entry.module).values())
        self._texts = frozenset(value for value in attributes if isinstance(value, str))

    def with_unread_tensors(self, members: StageMembers, called: CallValues) -> CallValues:
        """A call with the tensors among its arguments that none of its operations reads: its text may read their
        dtypes and devices. It takes those that the call around it computed before, in this stage."""
        operation = next(iter(called.nodes), None)
        if operation is None or called.tree.call not in dict(path_of(operation)):
            return called
        path = path_of(operation)
        around = path[: list(dict(path)).index(called.tree.call)]
        call, unread = called.tree.call, []
        for node in self._arguments.get(call_name(call), ()):
            place = argument_place(node, call)
            is_inside = node in members.nodes and path_of(node)[: len(around)] == around
            if node not in called.reads and is_inside and place is not None and place.name is not None:
                unread.append(node)
        reads = [*called.reads, *unread]
        ordered = sorted_by_place(reads, (argument_place(node, call) for node in reads))
        return replace(called, reads=ordered) if unread else called

    def modules_differ(self, fqn: str) -> bool:
        """Return whether the modules of the class of a module run different lines."""
        return self._class_lines.differ(fqn)

    def with_functions(
        self,
        called: CallValues,
        steps: Sequence[Step],
        names: ReadNames,
        is_part: bool,
        check_names: Callable[[ReadNames], object],
        check_child: Callable[[str], None],
    ) -> list[Step]:
        """The steps of a call, with one for each call of a function that the text of its class can have.

        Args:
            names: of the class, to which the functions are added.
            is_part: whether the class is a part of that of the model.
            check_names: raises UnwritableError if a name means something else in another class.
            check_child: raises UnwritableError if the text cannot call a child as the model does.
        """
        tree, lines = called.tree, self._captured.lines
        assert lines is not None
        module = self._captured.modules[tree.fqn].module
        surroundings = ForwardSurroundings(
            stage_part=None,
            unread=frozenset(),
            value=lambda name, lines: None,
            is_none=lambda name, lines: False,
            check_child=check_child,
            lines=frozenset(),
            graph_lines=self._graph_lines,
            autograd_functions=self._autograd_functions,
            whole_methods=frozenset(),
            texts=self._texts,
        )

        def add_function(run: FunctionRun, nodes: AbstractSet[fx.Node]) -> None:
            has_features = not nodes.isdisjoint(self._parameter_values)
            with names.undone_on_error():
                add_called_function(
                    names, module, tree.fqn, lines, surroundings, self._called_functions, run, has_features
                )
                check_names(names)

        return self._functions.joined(steps, call_name(tree.call), frozenset(called.makes), is_part, add_function)

    def written_functions(self, name_of: Callable[[fx.Node], str], write: WriteFunction) -> WrittenFunctions:
        """The functions that no package can have as text. The arguments are as `WrittenFunctions` takes them."""
        return WrittenFunctions(self._functions, self._parameter_values, name_of, write)

    def steps_of_method(
        self, fqn: str, steps: Iterable[Step], names: ReadNames, method: MixedMethod
    ) -> tuple[list[tuple[Step, int]], list[Step]]:
        """The steps of a method, each with its line there, and the other steps."""
        method_lines = {(names.file, number) for part in method.parts for number in part.numbers}
        steps_inside, steps_outside = list[tuple[Step, int]](), list[Step]()
        for step in steps:
            first, second = (*self._source.lines_within(fqn, step.nodes[0]), ("", 0), ("", 0))[:2]
            if first[1] in method.call_lines and second in method_lines:
                steps_inside.append((step, second[1]))
            else:
                steps_outside.append(step)
        return steps_inside, steps_outside

    def variables(self, tree: CallTree, method_line: int | None = None) -> CallVariables:
        """The variables of a call, of its ``forward`` or of the method that begins on a line."""
        lines = self._captured.lines
        none_variables = lines.none_variables.get(tree.fqn, {}) if lines is not None else {}
        places = self._variable_places.get(call_name(tree.call), ())
        line = first_line(self._source.forward_of(tree.fqn)) if method_line is None else method_line
        return CallVariables(places, line, none_variables)

    def stage_part(
        self, members: StageMembers, called: CallValues, variables: CallVariables, defaults: Sequence[str]
    ) -> StagePart:
        """The part of a call that the stage has.

        Args:
            defaults: names for the values that it takes if they have no variable.
        """
        tree = called.tree
        nodes = [node for node in self._captured.nodes if not tree.call or tree.call in dict(path_of(node))]
        stage_lines, other_lines = (
            frozenset(self._source.line_within(tree.fqn, node) for node in nodes if (node in members.nodes) is in_stage)
            for in_stage in (True, False)
        )
        parameters: dict[fx.Node, str] = {}
        for node, default in zip(called.reads, defaults, strict=True):
            name = variables.name_of(node, other_lines | {0}) or default
            parameters[node] = unused(name, set(parameters.values()))
        return StagePart(stage_lines, other_lines, parameters, len(called.makes))

    def names(
        self,
        members: StageMembers,
        called: CallValues,
        variables: CallVariables,
        stage_part: StagePart | None,
        all_branches: bool,
        check_child: Callable[[str], None],
        whole_methods: frozenset[str],
    ) -> ReadNames:
        """What the text of the class of a call reads. Raises UnwritableError.

        Args:
            all_branches: whether it has the branches that any module of the class runs.
            check_child: raises UnwritableError if the text cannot call a child as the model does.
            whole_methods: names of methods without statements from the graph.
        """
        tree, lines = called.tree, self._captured.lines
        entry = self._captured.modules[tree.fqn]
        module = entry.module
        if lines is None:
            raise UnwritableError("its lines are not known")
        if is_layer_of_torch(type(module)) or has_forward_hooks(module) or "forward" in vars(module):
            raise UnwritableError("its forward is not that of its class")

        def value_of(variables: CallVariables, name: str, lines: frozenset[int]) -> fx.Node | None:
            node = variables.value(name, lines)
            is_in_stage = stage_part is None or node in members.nodes or node in stage_part.parameters
            return node if is_in_stage else None

        unread = unread_parameters(called, variables)
        arguments = (argument_place(node, tree.call) for node in self._arguments.get(call_name(tree.call), ()))
        tensors = {place.name for place in arguments if place is not None}
        surroundings = ForwardSurroundings(
            stage_part,
            unread,
            partial(value_of, variables),
            variables.is_none,
            check_child,
            frozenset(self._source.line_within(tree.fqn, node) for node in tree.nodes()),
            self._graph_lines,
            self._autograd_functions,
            whole_methods,
            unread_tensors=frozenset(name for name in unread if name in tensors and stage_part is None),
            texts=self._texts,
            feature_lines=frozenset(
                self._source.line_within(tree.fqn, node) for node in tree.nodes() if node in self._parameter_values
            ),
        )
        if all_branches:
            surroundings = replace(
                surroundings,
                feature_lines=None,
                lines=self._class_lines.graph_lines(tree.fqn),
                module_lines=self._class_lines.module_lines(tree.fqn),
            )
            lines = self._class_lines.executed(tree.fqn)

        def of_method(method_line: int, call_lines: frozenset[int]) -> ForwardSurroundings:
            chains = [self._source.lines_within(tree.fqn, node) for node in tree.nodes()]
            method_lines = {chain[1][1] for chain in chains if len(chain) > 1 and chain[0][1] in call_lines}
            return replace(
                surroundings,
                stage_part=None,
                unread=frozenset(),
                value=partial(value_of, self.variables(tree, method_line)),
                lines=frozenset(method_lines),
                feature_lines=None,
                of_method=None,
            )

        surroundings = replace(surroundings, of_method=of_method)
        return names_of_module(module, tree.fqn, lines, surroundings, self._called_functions)
