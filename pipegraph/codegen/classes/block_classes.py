"""The classes of blocks: one per distinct structure, nested as the model nests its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import fx, nn

from pipegraph.codegen.author_text.call_reader import CallReader
from pipegraph.codegen.author_text.constructors import ChildConstructors, Constructor, state_names
from pipegraph.codegen.author_text.cut import UnwritableError
from pipegraph.codegen.author_text.forward_text import MixedText, Results, results_of
from pipegraph.codegen.author_text.functions import add_function
from pipegraph.codegen.author_text.names import (
    MixedMethodError,
    ReadNames,
    SharedNames,
    StagePart,
    mixed_method,
)
from pipegraph.codegen.author_text.variables import CallVariables
from pipegraph.codegen.classes.author_class import AuthorClass, AuthorText, StageContents
from pipegraph.codegen.classes.computed_attributes import with_computed_numbers
from pipegraph.codegen.classes.constructor_arguments import module_attributes
from pipegraph.codegen.classes.sequences import constructors_in_sequence
from pipegraph.codegen.expressions.module_tree import (
    ModuleTree,
    build_tree,
    init_statements,
    repeated_sequence,
    sequence,
)
from pipegraph.codegen.expressions.operation import common_regions
from pipegraph.codegen.expressions.torch_modules import (
    BaseClass,
    CallArguments,
    author_arguments,
    base_class,
    derived_constructor,
    module_constructor,
    recorded_arguments,
    torch_module_call,
)
from pipegraph.codegen.forms import Forms
from pipegraph.codegen.forward.items import (
    ClassContents,
    FunctionStep,
    Item,
    ModuleCall,
    Modules,
    Operation,
    Step,
    conflicts,
    modules_in,
)
from pipegraph.codegen.forward.mode_branches import group_branches
from pipegraph.codegen.forward.roll_loops import roll_loops
from pipegraph.codegen.forward.source_numbers import ModuleNumbers, fixed_sizes
from pipegraph.codegen.forward.statement_loops import roll_statements
from pipegraph.codegen.forward.tensor_attributes import UnknownAttributeError
from pipegraph.codegen.forward.write_forward import write_forward
from pipegraph.codegen.names.author_arguments import author_arguments_of
from pipegraph.codegen.names.identifiers import class_name, outer_names, relative, unused_class
from pipegraph.codegen.names.model_names import ModelNames
from pipegraph.codegen.names.source_statements import SourceStatements
from pipegraph.codegen.syntax.expressions import SELF, Argument, Attribute, Expression, FunctionCall, call
from pipegraph.codegen.syntax.statements import (
    Assign,
    ClassSource,
    ClassVariant,
    FunctionSource,
    Statement,
)
from pipegraph.graph.calls import (
    CallTree,
    CallValues,
    StageMembers,
    argument_place,
    call_tree,
    call_values,
    is_within,
    result_place,
)
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.custom_functions import applied_functions
from pipegraph.graph.nodes import path_of
from pipegraph.graph.partition.split_points import opened_calls
from pipegraph.graph.partition.stages import StageGraph, local_name
from pipegraph.graph.symbolic_size import UnknownSizeError
from pipegraph.torch_private.export import call_name

# A call that reads no parameters gets no class if it has at most this many operations, or is only a part of one.
_SMALL = 2


class BlockClasses:
    """Collects the classes of a package, stage by stage. Equal structures share one class.

    Args:
        forms: how plainly each class is written.

    Attributes:
        called: of each stage, the FQNs of the modules that it calls. What other modules do is a part of their callers.
        package_tensors: the first names of the tensors that a class of the package makes, and no constructor of torch.
    """

    def __init__(self, captured: Captured, forms: Forms) -> None:
        self._captured = captured
        self._forms = forms
        self._stage = 0
        self.called: dict[int, frozenset[str]] = {}
        self.package_tensors: set[str] = set()
        self.source = SourceStatements(captured)
        self.names = ModelNames(captured, self.source, opened_calls(captured))
        self._below: dict[str, list[str]] = {"": list(captured.state)}  # module → parameters and buffers inside
        for fqn in captured.state:
            for module in outer_names(fqn):
                self._below.setdefault(module, []).append(fqn)
        self._order = {fqn: position for position, fqn in enumerate(captured.modules)}
        self._called = {fqn for node in captured.nodes for _, fqn in path_of(node)}
        self._by_structure: dict[tuple[object, ...], ClassSource] = {}
        self._author_classes: dict[tuple[int, str], AuthorClass | UnwritableError] = {}  # by stage and call
        self._shared_names = SharedNames({class_name(entry.class_name) for entry in captured.modules.values()})
        for applied in applied_functions(captured.nodes):
            add_function(self._shared_names, applied.function)
        autograd_functions = {
            function.name: function.author_text
            for function in self._shared_names.functions
            if function.author_text is not None
        }
        self._reader = CallReader(captured, self.source, forms.graph_lines, autograd_functions)

    def used_by(self, stages: Sequence[ClassSource]) -> tuple[ClassSource, ...]:
        """The classes that stages use, directly or through other classes, in an order in which each can be defined."""
        used = {name for stage in stages for name in stage.uses()}
        blocks: list[ClassSource] = []
        for block in reversed(self._by_structure.values()):
            if block.name in used:
                used |= block.uses()
                blocks.append(block)
        return tuple(reversed(blocks))

    def stage(self, stage: StageGraph, parameters: Sequence[str], first: Sequence[Statement]) -> StageContents:
        """The contents of a stage's own class. The classes that it uses are added to the collection.

        Args:
            parameters: names for the values that it takes.
            first: the statements with which its ``forward`` begins.
        """
        self._stage = stage.index
        members = StageMembers(stage.nodes, stage.outputs, stage.state)
        root = call_tree(stage.nodes)
        members.learn_results(root)
        contents, tree = self._contents(members, "", root.items, stage.inputs, stage.outputs, outer_regions=0)
        modules = modules_of(contents, tree)
        called = CallValues(root, tuple(stage.nodes), tuple(stage.inputs), tuple(stage.outputs))
        text: AuthorText | None = None
        with suppress(UnwritableError):
            variables = self._reader.variables(root)
            stage_part = self._reader.stage_part(members, called, variables, parameters)
            text = self._author_text(members, called, variables, stage_part, first)
            tree, modules, parameters = text.tree, text.modules, tuple(stage_part.parameters.values())
        self.called[stage.index] = modules.called
        # No reset_parameters() of torch initialises what a parametrization computes a weight from.
        fqns = (
            fqn
            for fqn in stage.state
            if fqn.rpartition(".")[0] not in modules.of_torch or "parametrizations" in fqn.split(".")
        )
        self.package_tensors.update(self._captured.state[fqn].canonical for fqn in fqns)
        return StageContents(contents, tree, modules, tuple(parameters), text)

    def _contents(
        self,
        members: StageMembers,
        prefix: str,
        calls: Sequence[fx.Node | CallTree],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        outer_regions: int,
    ) -> tuple[ClassContents, ModuleTree]:
        items = self._steps(members, prefix, calls)
        constructors = {relative(item.fqn, prefix): item.constructor for item in items if isinstance(item, ModuleCall)}
        below = [fqn for fqn in self._below.get(prefix, ()) if fqn in members.state]
        state = {relative(fqn, prefix): self._captured.state[fqn] for fqn in below}
        constructors |= self._uncalled_leaves(prefix, state, constructors)
        tree = self._tree(prefix, constructors, state)
        contents = ClassContents(
            prefix=prefix,
            items=self._rolled(prefix, items, outputs, tree),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            state=state,
            state_names=self._state_names(members, prefix, items, outputs),
            outer_regions=outer_regions,
            fixed_sizes=fixed_sizes(items, inputs, self.source),
        )
        return contents, tree

    def _tree(
        self, prefix: str, constructors: Mapping[str, FunctionCall], state: Mapping[str, StateEntry]
    ) -> ModuleTree:
        """The modules of a class, and the state that is in none of them."""
        entries = {name: entry for name, entry in state.items() if constructors.keys().isdisjoint(outer_names(name))}
        ordered = sorted(constructors, key=lambda name: self._order[_join(prefix, name)])
        return build_tree({name: constructors[name] for name in ordered}, entries, partial(self._module_at, prefix))

    def _rolled(
        self, prefix: str, steps: Sequence[Step], outputs: Sequence[fx.Node], tree: ModuleTree
    ) -> tuple[Item, ...]:
        """Steps in branches and loops."""
        branches = group_branches(steps)
        if not self._forms.rolls_loops(self._form_name(prefix)):
            return tuple(branches)
        return roll_loops(roll_statements(branches, outputs, self.source, prefix), outputs, tree, prefix)

    def _form_name(self, prefix: str) -> str:
        """The name under which `Forms` has a class: that of the model's class, or of the stage."""
        return self._captured.modules[prefix].class_name if prefix else f"Stage{self._stage}"

    def _module_at(self, prefix: str, name: str) -> nn.Module | None:
        module = self._captured.modules.get(_join(prefix, name))
        return module.module if module is not None else None

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _steps(self, members: StageMembers, prefix: str, calls: Sequence[fx.Node | CallTree]) -> list[Step]:
        """Operations and calls in order. Each module is called in one way."""
        inlined: frozenset[str] = frozenset()
        steps = self._items(members, prefix, calls, inlined)
        while conflicting := conflicts(steps):
            inlined |= conflicting
            steps = self._items(members, prefix, calls, inlined)
        return steps

    def _items(
        self, members: StageMembers, prefix: str, calls: Iterable[fx.Node | CallTree], inlined: frozenset[str]
    ) -> list[Step]:
        """Operations and calls in order. A call that cannot stay a call is replaced by its contents."""
        items: list[Step] = []
        for child in calls:
            if isinstance(child, fx.Node):
                items.append(Operation(child))
                continue
            item: Step | None = None
            if child.fqn not in inlined and is_within(child.fqn, prefix):
                item = self._module_call(members, prefix, child)
            items += [item] if item is not None else self._items(members, prefix, child.items, inlined)
        return items

    def _module_call(self, members: StageMembers, prefix: str, tree: CallTree) -> ModuleCall | None:
        """The call of a torch.nn module or of a class for the module; None if its operations read better."""
        called = call_values(self._captured, members, tree)
        if not called.makes:
            return None
        if len(called.makes) > 1:
            self.names.returned_together.update(called.makes)
        torch_call = torch_module_call(self._captured, tree, called.reads, called.makes)
        if torch_call is not None:
            inside = self._captured.modules[tree.fqn].module.named_modules()
            fqns = frozenset(f"{tree.fqn}.{name}" for name, _ in inside if name)
            return self._call(called, torch_call[0], Modules(fqns, fqns, fqns | {tree.fqn}), torch_call[1])
        constructor, modules = self._sequential(members, called)
        if constructor is None and (author_call := self._author_call(members, called)) is not None:
            return author_call
        if constructor is None:
            reads_state = any(node.op == "get_attr" for reader in called.nodes for node in reader.all_input_nodes)
            same_mode = self._captured.modules[tree.fqn].training == self._captured.modules[prefix].training
            small = len(called.nodes) <= _SMALL and not any(True for _ in tree.calls())
            small &= not (prefix and isinstance(self._captured.modules[prefix].module, nn.Sequential))
            if not reads_state and same_mode and (small or not self.names.is_whole(tree)):
                return None
            called = call_values(self._captured, members, tree, unread=True)
            if len(called.makes) > 1:
                self.names.returned_together.update(called.makes)
            try:
                source, modules = self._class(members, called)
            except (UnknownSizeError, UnknownAttributeError):  # the code around the module has the tensor
                return None
            return self._call(called, call(source.name), modules, parameters=source.parameters)
        return self._call(called, constructor, modules)

    def _call(
        self,
        called: CallValues,
        constructor: FunctionCall,
        modules: Modules,
        arguments: CallArguments | None = None,
        parameters: Sequence[str] = (),
    ) -> ModuleCall:
        return ModuleCall(
            fqn=called.tree.fqn,
            constructor=constructor,
            model_class=self._captured.modules[called.tree.fqn].class_name,
            reads=called.reads,
            makes=called.makes,
            nodes=called.nodes,
            modules=Modules(modules.fqns | {called.tree.fqn}, modules.called | {called.tree.fqn}, modules.of_torch),
            arguments=arguments,
            parameters=tuple(parameters),
        )

    def _sequential(self, members: StageMembers, called: CallValues) -> tuple[FunctionCall | None, Modules]:
        """The constructor and modules of a ``nn.Sequential``, or of a subclass that only adds a name; else None."""
        no_constructor = None, Modules()
        fqn = called.tree.fqn
        module = self._captured.modules[fqn].module
        is_sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if not is_sequential or len(called.reads) != 1 or len(called.makes) != 1:
            return no_constructor
        items = self._items(members, fqn, called.tree.items, frozenset())
        children = constructors_in_sequence(module, called, items, self._does_nothing, self.names.is_whole(called.tree))
        if children is None:
            return no_constructor
        fqns, run, of_torch = modules_in(items)
        inside = Modules(fqns.union(f"{fqn}.{name}" for name in children), run, of_torch)
        if type(module) is nn.Sequential:
            return call("nn.Sequential", *repeated_sequence(children)), inside
        modules = sequence(children)
        parts = {"base": "nn.Sequential", "children": tuple(map(Argument, modules))}
        return call(self._add(called, ("nn.Sequential", *modules), lambda: parts).name), inside

    def _does_nothing(self, fqn: str) -> bool:
        """Return whether a module runs no operation. The whole model counts: of a Sequential that is cut in two, the
        operations may be in another stage."""
        return fqn not in self._called and isinstance(self._captured.modules[fqn].module, (nn.Identity, nn.Dropout))

    # ---- author's text -----------------------------------------------------------------------------------------------

    def _author_call(self, members: StageMembers, called: CallValues) -> ModuleCall | None:
        """The call of a class in its author's text; None if a package cannot have that, or cannot call it."""
        try:
            author_class = self._author_class(members, called.tree)
        except UnwritableError:
            return None
        if author_class.parameters is not None:
            called = call_values(self._captured, members, called.tree, unread=True)
            return self._call(called, *author_class.constructor, parameters=author_class.parameters)
        module = self._captured.modules[called.tree.fqn].module
        # The text computes other values from its arguments: a pass left out two permutations that undo each other.
        if author_class.unread_tensors:
            called = self._reader.with_unread_tensors(members, called)
        places = {node: argument_place(node, called.tree.call) for node in called.reads}
        reads = tuple(node for node in called.reads if places[node] is not None)
        names = {name for place in places.values() if place is not None for name in place.names}
        if not author_class.unread_tensors <= names:
            return None  # the caller does not have the tensor
        called = replace(called, reads=reads)
        arguments = author_arguments(module, called, author_class.has_author_results)
        if arguments is None:
            return None
        return self._call(called, *author_class.constructor, None if arguments.is_plain else arguments)

    def _author_class(self, members: StageMembers, tree: CallTree) -> AuthorClass:
        """The class of a module in its author's text. Raises UnwritableError."""
        key = self._stage, tree.call or tree.fqn
        if key not in self._author_classes:
            try:
                self._author_classes[key] = self._new_author_class(members, tree)
            except UnwritableError as reason:
                self._author_classes[key] = reason
        author_class = self._author_classes[key]
        if isinstance(author_class, UnwritableError):
            raise author_class
        return author_class

    def _new_author_class(self, members: StageMembers, tree: CallTree) -> AuthorClass:
        fqn = tree.fqn
        called = call_values(self._captured, members, tree, unread=True)
        variables = self._reader.variables(tree)
        stage_part: StagePart | None = None
        if not self.names.is_whole(tree):
            defaults = self.names.parameters(tree, called.reads)
            stage_part = self._reader.stage_part(members, called, variables, defaults)
        text = self._author_text(members, called, variables, stage_part)
        general: ClassVariant | None = None
        if stage_part is None and self._forms.joins_branches(self._form_name(fqn)):
            general = self._general_variant(members, called, variables, text)
        parts = {
            "base": text.base.name,
            "children": text.base.arguments,
            "init": text.init,
            "forward": (text.source,),
            "general": general,
        }
        returned = tuple(node for node in called.makes if result_place(node, tree.call) is not None)
        if text.has_author_results and returned:  # others only give their dtype to a value after the call
            called = replace(called, makes=returned)
        source = self._add(called, (text.base, text.init, text.source, general), lambda: parts)
        fqns, run, of_torch = text.modules
        constructor = call(source.name), Modules(fqns | {fqn}, run | {fqn}, of_torch)
        parameters = None if stage_part is None else tuple(stage_part.parameters.values())
        return AuthorClass(constructor, text.has_author_results, parameters, text.unread_tensors)

    def _general_variant(
        self, members: StageMembers, called: CallValues, variables: CallVariables, text: AuthorText
    ) -> ClassVariant | None:
        """The class with the branches that any module of it runs; None if that cannot be written."""
        if self._reader.modules_differ(called.tree.fqn):
            try:
                text = self._author_text(members, called, variables, None, all_branches=True)
            except UnwritableError:
                return None
        return ClassVariant(text.init, text.source)

    def _author_text(
        self,
        members: StageMembers,
        called: CallValues,
        variables: CallVariables,
        stage_part: StagePart | None,
        first: Sequence[Statement] = (),
        *,
        all_branches: bool = False,
    ) -> AuthorText:
        """The text of the class of a call. Raises UnwritableError.

        Args:
            first: the statements with which its ``forward`` begins.
            all_branches: whether it has the branches that any module of the class runs.
        """
        if not self._forms.has_author_text(self._form_name(called.tree.fqn)):
            raise UnwritableError("it is written from the graph")

        check_child = partial(self._check_child, members, called.tree)
        whole_methods = frozenset[str]()
        while True:
            names = partial(self._reader.names, members, called, variables, stage_part, all_branches, check_child)
            try:
                return self._mixed_text(members, called, variables, stage_part, first, names(whole_methods))
            except MixedMethodError as error:
                whole_methods |= {error.method}

    def _mixed_text(
        self,
        members: StageMembers,
        called: CallValues,
        variables: CallVariables,
        stage_part: StagePart | None,
        first: Sequence[Statement],
        names: ReadNames,
    ) -> AuthorText:
        """The text of a class that reads these names. Raises UnwritableError."""
        tree, fqn = called.tree, called.tree.fqn
        parameters = None if stage_part is None else stage_part.parameters
        results = Results(called.makes, None, ()) if stage_part is not None else results_of(called)
        text = MixedText(names, variables, results, self.names.value_name, parameters)
        methods = {
            name: MixedText(
                method, self._reader.variables(tree, method.first_line), Results((), None, ()), self.names.value_name
            )
            for name, method in names.mixed_methods.items()
        }
        steps: list[Step] = []
        called_in_graph = dict[str, Constructor]()
        if text.is_mixed or methods:
            steps = self._steps(members, fqn, tree.items)
            if self._forms.has_text_of_functions(self._form_name(fqn)):
                steps = self._reader.with_functions(
                    called,
                    steps,
                    names,
                    stage_part is not None,
                    self._shared_names.meanings_of,
                    partial(self._check_child, members, tree),
                )
            if self._forms.calls_functions(self._form_name(fqn)):
                write_function = partial(self._function_statements, fqn)
                functions = self._reader.written_functions(self.names.value_name, write_function)
                steps = functions.joined(
                    steps, call_name(tree.call), frozenset(called.makes), names, self._shared_names.meanings_of
                )
            for name, method in names.mixed_methods.items():
                in_method, steps = self._reader.steps_of_method(fqn, steps, names, method)
                with mixed_method(name):
                    called_in_graph |= methods[name].add_steps(in_method)
            if text.is_mixed:
                called_in_graph |= text.add_steps((step, self.source.line_within(fqn, step.nodes[0])) for step in steps)
        constructors = self._children_of_author(members, tree, names.children)
        for child, constructor in called_in_graph.items():
            if constructors.setdefault(child, constructor)[0] != constructor[0]:
                raise UnwritableError(f"{child} is called in two ways")
        if steps and any(not constructors.keys().isdisjoint(outer_names(child)) for child in constructors):
            raise UnwritableError("it calls a module and a part of it")
        state = {
            relative(name, fqn): self._captured.state[name]
            for name in self._below.get(fqn, ())
            if name in members.state
        }
        children = {relative(name, fqn): constructor for name, (constructor, _) in constructors.items()}
        base = self._base(fqn, names)
        own_state = {name: entry for name, entry in state.items() if "." in name or name not in base.tensors}
        module_tree = self._tree(fqn, children | self._uncalled_leaves(fqn, own_state, children), own_state)
        if module_tree.container is not nn.Module:
            raise UnwritableError("its children have names that are no attributes")
        numbers: ModuleNumbers | None = None
        if self._forms.reads_attributes(self._form_name(fqn)):
            numbers = ModuleNumbers(self._captured, self.source, fqn)
        write = partial(self._statements_from_graph, members, called, module_tree, state, numbers)
        try:
            forward, written = text.text(write, first, names.attributes_set)
            for name, method_text in methods.items():
                with mixed_method(name):
                    lines, statements = method_text.text(write)
                names.methods[name] = tuple(lines)
                written[:0] = statements
            names.remove_unused(forward)
        except (UnknownSizeError, UnknownAttributeError) as error:
            raise UnwritableError(f"no variable has a size: {error}") from error
        attributes = names.attributes_in(forward)
        for name, value in (numbers.used if numbers is not None else {}).items():
            if attributes.setdefault(name, value) != value:
                raise UnwritableError(f"self.{name} would be two things")
        attributes = {name: value for name, value in attributes.items() if name not in base.settings}
        init = self._constructor(fqn, attributes, module_tree)
        calls_functions = any(isinstance(step, FunctionStep) for step in steps)
        source = replace(self._shared_names.text_of(names, forward, written), calls_functions=calls_functions)
        inside = [modules for _, modules in constructors.values()]
        fqns, run, of_torch = (frozenset[str]().union(*(modules[part] for modules in inside)) for part in range(3))
        modules = Modules(fqns, run, of_torch)
        unread = frozenset(names.unread_tensors)
        return AuthorText(source, init, module_tree, modules, text.has_author_results, base, unread)

    def _base(self, fqn: str, names: ReadNames) -> BaseClass:
        """The class that the class of a module derives from. Raises UnwritableError."""
        if names.base is None:
            return BaseClass()
        base = base_class(names.base, self._captured.modules[fqn].module)
        if base is None:
            raise UnwritableError(f"a {names.base.__name__} with its settings cannot be made")
        return base

    def _constructor(self, fqn: str, attributes: Mapping[str, Expression], tree: ModuleTree) -> tuple[Statement, ...]:
        """The statements of ``__init__`` of the class of a module: those that assign attributes, and its children."""
        children = tuple(init_statements(tree))
        values = with_computed_numbers(attributes, self._captured.modules[fqn].module, children)
        return *(Assign((Attribute(SELF, name),), value) for name, value in values.items()), *children

    def _statements_from_graph(
        self,
        members: StageMembers,
        called: CallValues,
        tree: ModuleTree,
        state: dict[str, StateEntry],
        numbers: ModuleNumbers | None,
        steps: Sequence[Step],
        inputs: Mapping[fx.Node, str],
        outputs: Mapping[fx.Node, str],
    ) -> tuple[Statement, ...]:
        """The statements of some steps of a call, the last of which returns ``outputs``."""
        fqn = called.tree.fqn
        contents = ClassContents(
            prefix=fqn,
            items=self._rolled(fqn, steps, tuple(outputs), tree),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            state=state,
            state_names=self._state_names(members, fqn, steps, tuple(outputs)),
            outer_regions=len(common_regions(called.nodes)) if fqn else 0,
            fixed_sizes=fixed_sizes(steps, tuple(inputs), self.source),
        )
        values = {node for item in contents.items for node in item.makes}.union(inputs, contents.state_names)
        if not values.issuperset(outputs):
            raise UnwritableError("a value is inside of a branch or of a loop")
        return write_forward(contents, tree, list(inputs.values()), self.source, outputs, numbers).statements

    def _function_statements(
        self, prefix: str, steps: Sequence[Step], inputs: Mapping[fx.Node, str], result: fx.Node
    ) -> tuple[Statement, ...]:
        """The statements of a function that has these steps of a module. Raises UnwritableError."""
        nodes = [node for step in steps for node in step.nodes]
        contents = ClassContents(
            prefix=prefix,
            items=tuple(steps),
            inputs=tuple(inputs),
            outputs=(result,),
            state={},
            state_names={},
            outer_regions=len(common_regions(nodes)),
            fixed_sizes={},
        )
        try:
            return write_forward(contents, self._tree(prefix, {}, {}), list(inputs.values()), self.source).statements
        except (UnknownSizeError, UnknownAttributeError) as error:
            raise UnwritableError(f"no argument has a size: {error}") from error

    def _check_child(self, members: StageMembers, tree: CallTree, name: str) -> None:
        """Raise UnwritableError if the text of a module cannot call a child as the model does."""
        self._children_of_author(members, tree, {name})

    def _children_of_author(self, members: StageMembers, tree: CallTree, names: set[str]) -> dict[str, Constructor]:
        """The constructors of children that the text of a module calls, by FQN. Raises UnwritableError."""
        modules = {name: entry.module for name, entry in self._captured.modules.items()}
        children = ChildConstructors(modules, partial(self._child_of_author, members, tree))
        constructors = dict(children.below(tree.fqn, names))
        for child in constructors:
            if any(f"{child}.{name}" not in members.state for name in state_names(modules[child])):
                raise UnwritableError(f"{child} has tensors that the stage does not have")
        return constructors

    def _child_of_author(self, members: StageMembers, tree: CallTree, child: str) -> Constructor:
        """The constructor of a module that the author's text of another one calls. Raises UnwritableError."""
        # A module without operations, such as a dropout of nothing, is in no tree of calls.
        inner = next((call for call in tree.descendants() if call.fqn == child), CallTree("", child))
        called = call_values(self._captured, members, inner)
        constructor, modules = self._sequential(members, called)
        if constructor is not None:
            return constructor, modules
        try:
            author_class = self._author_class(members, inner)
        except UnwritableError:
            # A class that is written from the graph takes the tensors that it reads, one after the other.
            arguments = recorded_arguments(self._captured.modules[child].module, inner, called.reads, called.makes)
            item = self._module_call(members, tree.fqn, inner) if arguments and arguments.is_plain else None
            if item is None or item.arguments is not None:
                raise
            return item.constructor, item.modules
        if not author_class.has_author_results or author_class.parameters is not None:
            raise UnwritableError(f"{child} returns something else than its author's")
        return author_class.constructor

    @property
    def functions(self) -> Sequence[FunctionSource]:
        """The functions that the author's text of classes calls, each after those that it calls."""
        return self._shared_names.functions

    # ---- classes -----------------------------------------------------------------------------------------------------

    def _class(self, members: StageMembers, called: CallValues) -> tuple[ClassSource, Modules]:
        """The class of a call, and the modules in it."""
        tree = called.tree
        outer_regions = len(common_regions(called.nodes))
        contents, modules = self._contents(members, tree.fqn, tree.items, called.reads, called.makes, outer_regions)
        init = tuple(init_statements(modules))
        neutral = [f"p{position}" for position in range(len(called.reads))]
        sizes = frozenset(size_place for places in contents.fixed_sizes.values() for size_place in places.items())
        structure = (init, len(called.reads), write_forward(contents, modules, neutral, None).statements, sizes)

        def parts() -> dict[str, object]:
            parameters = self.names.parameters(tree, called.reads)
            numbers: ModuleNumbers | None = None
            if self._forms.reads_attributes(self._form_name(tree.fqn)):
                numbers = ModuleNumbers(self._captured, self.source, tree.fqn)
            forward = write_forward(contents, modules, parameters, self.source, numbers=numbers).statements
            used = numbers.used if numbers is not None else {}
            base, init = f"nn.{modules.container.__name__}", self._constructor(tree.fqn, used, modules)
            return {"base": base, "init": init, "parameters": tuple(parameters), "forward": forward}

        return self._add(called, structure, parts), modules_of(contents, modules)

    def _add(
        self, called: CallValues, structure: tuple[object, ...], parts: Callable[[], Mapping[str, object]]
    ) -> ClassSource:
        """The class of a structure: the one that was collected before, or a new one under an unused name.

        Args:
            structure: everything in which two classes must agree to be one.
            parts: returns the statements of a new class, as arguments of ``ClassSource``.
        """
        module = self._captured.modules[called.tree.fqn]
        structure = (module.class_name, *structure)
        attributes = module_attributes(module.module)
        if structure in self._by_structure:
            block = self._by_structure[structure]
            common = {name: value for name, value in block.attributes.items() if attributes.get(name) == value}
            self._by_structure[structure] = replace(block, attributes=common)
        else:
            used_names = {source.name for source in self._by_structure.values()}
            self._by_structure[structure] = ClassSource(
                name=unused_class(class_name(module.class_name), used_names),
                docstring=self.names.docstring(called.tree, called.reads, called.makes),
                model_class=module.class_name,
                attributes=attributes,
                author_arguments=author_arguments_of(type(module.module)),
                part=self.names.part(called.tree),
                **parts(),  # type: ignore[arg-type]
            )
        return self._by_structure[structure]

    # ---- state -------------------------------------------------------------------------------------------------------

    def _uncalled_leaves(
        self, prefix: str, state: Mapping[str, StateEntry], constructors: Mapping[str, FunctionCall]
    ) -> dict[str, FunctionCall]:
        """Layers of torch that are not called although their weights are read (an attention's ``out_proj``)."""
        leaves: dict[str, FunctionCall] = {}
        for name in state:
            owner, _, _ = name.rpartition(".")
            if not owner or owner in leaves or not constructors.keys().isdisjoint(outer_names(name)):
                continue
            module = self._module_at(prefix, owner)
            is_leaf = module is not None and not any(True for _ in module.children())
            constructor = None
            if module is not None and is_leaf:
                constructor = module_constructor(module) or derived_constructor(module)
            if module is None or constructor is None:
                continue
            names = {f"{owner}.{attribute}" for attribute, _ in (*module.named_parameters(), *module.named_buffers())}
            if names <= set(state):
                leaves[owner] = constructor
        return leaves

    def _state_names(
        self, members: StageMembers, prefix: str, items: Sequence[Step], outputs: Sequence[fx.Node]
    ) -> dict[fx.Node, str]:
        """The parameters and buffers that ``forward`` reads itself → their names relative to the class."""
        names = self._captured.names_of
        candidate_names: dict[fx.Node, str] = {}
        for item in items:
            for node in item.reads:
                if node.op == "get_attr" and node not in candidate_names:
                    candidate_names[node] = local_name(item.nodes[0], names[str(node.target)])
        for node in outputs:
            if node.op == "get_attr":
                candidate_names.setdefault(node, str(node.target))
        state_names: dict[fx.Node, str] = {}
        for node, name in candidate_names.items():
            in_stage = (alias for alias in (name, *names[str(node.target)]) if alias in members.state)
            fqn = next((alias for alias in in_stage if is_within(alias, prefix)), None)
            if fqn is not None:
                state_names[node] = relative(fqn, prefix)
        return state_names


def modules_of(contents: ClassContents, tree: ModuleTree) -> Modules:
    """The FQNs of all modules of a class, directly or inside others."""
    fqns, called, of_torch = modules_in(contents.items)
    paths = {_join(contents.prefix, path): tree.at(path.split(".")) for path in tree.paths()}
    uncalled = (fqn for fqn, module in paths.items() if isinstance(module, FunctionCall) and fqn not in fqns)
    return Modules(fqns.union(paths), called, of_torch.union(uncalled))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
