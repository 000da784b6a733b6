"""From a stage's operations to classes: one per distinct structure, nested as the model nests its modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx, nn

from pipegraph.codegen.classes.attributes import assignments
from pipegraph.codegen.classes.class_source import ClassSource
from pipegraph.codegen.expressions import attention_calls
from pipegraph.codegen.expressions.attention_calls import Arguments, Attentions
from pipegraph.codegen.expressions.leaf_modules import Leaves, constructor
from pipegraph.codegen.forward.body import write_body
from pipegraph.codegen.forward.contexts import common_regions
from pipegraph.codegen.forward.items import Item, ModuleCall, Operation, Scope, conflicts, modules_in
from pipegraph.codegen.forward.module_tree import Tree, build_tree, paths
from pipegraph.codegen.forward.roll_loops import roll
from pipegraph.codegen.names.identifiers import class_name, is_within, outer_names, relative, unused_class
from pipegraph.codegen.names.model_names import Words
from pipegraph.codegen.names.source_statements import Origins
from pipegraph.codegen.syntax.literals import literal
from pipegraph.graph.call_arguments import argument_place, result_place, sorted_by_place
from pipegraph.graph.call_tree import CallTree, call_tree
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.nodes import path_of
from pipegraph.graph.partition.segments import opened_calls
from pipegraph.graph.partition.stages import StageGraph, local_name

# A call without state is written where it is if it has no more operations than this, or is only a part of one.
_SMALL = 2


class Blocks:
    """The classes of a package, collected stage by stage; a structure that was met before is not written again."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.origins = Origins(captured)
        self._opened = opened_calls(captured)
        self.words = Words(captured, self.origins, self._opened)
        self._names = captured.names_of
        self._below: dict[str, list[str]] = {"": list(captured.state)}  # module → its state and that of modules in it
        for fqn in captured.state:
            for module in outer_names(fqn):
                self._below.setdefault(module, []).append(fqn)
        self._order = {fqn: position for position, fqn in enumerate(captured.modules)}
        self._attentions = Attentions(captured)
        self._leaves = Leaves(captured)
        self._called = {fqn for node in captured.nodes for _, fqn in path_of(node)}
        self._by_structure: dict[tuple[object, ...], ClassSource] = {}

    def used_by(self, stages: Sequence[ClassSource]) -> tuple[ClassSource, ...]:
        """What ``blocks.py`` holds; a class stands behind those it uses. One whose module was spread out after all is
        left out."""
        users = list(stages)
        for block in reversed(self._by_structure.values()):
            if any(user.mentions(block.name) for user in users):
                users.append(block)
        return tuple(reversed(users[len(stages) :]))

    def stage(self, stage: StageGraph) -> tuple[Scope, Tree]:
        """A stage's own ``forward`` and attributes; the classes that it uses are collected."""
        inside = _Inside(frozenset(stage.nodes), frozenset(stage.outputs), frozenset(stage.state))
        root = call_tree(stage.nodes)
        return self._scope(inside, "", root.items, stage.inputs, stage.outputs, regions=0)

    # ---- scopes ------------------------------------------------------------------------------------------------------

    def _scope(
        self,
        inside: _Inside,
        prefix: str,
        items: Sequence[fx.Node | CallTree],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        regions: int,
    ) -> tuple[Scope, Tree]:
        inlined: frozenset[str] = frozenset()
        made = self._items(inside, prefix, items, inlined)
        while found := conflicts(made):
            inlined |= found
            made = self._items(inside, prefix, items, inlined)
        constructors = {relative(item.fqn, prefix): item.constructor for item in made if isinstance(item, ModuleCall)}
        state = {
            relative(fqn, prefix): self._captured.state[fqn]
            for fqn in self._below.get(prefix, ())
            if fqn in inside.state
        }
        constructors |= self._silent_leaves(prefix, state, constructors)
        own = {name: entry for name, entry in state.items() if constructors.keys().isdisjoint(outer_names(name))}
        ordered = sorted(constructors, key=lambda name: self._order[f"{prefix}.{name}" if prefix else name])
        tree = build_tree({name: constructors[name] for name in ordered}, own, partial(self._module_at, prefix))
        scope = Scope(
            prefix=prefix,
            items=roll(made, outputs),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            state=state,
            names=self._held(inside, prefix, made, outputs),
            regions=regions,
        )
        return scope, tree

    def _module_at(self, prefix: str, name: str) -> nn.Module | None:
        module = self._captured.modules.get(f"{prefix}.{name}" if prefix else name)
        return module.module if module is not None else None

    def _items(
        self, inside: _Inside, prefix: str, items: Iterable[fx.Node | CallTree], inlined: frozenset[str]
    ) -> list[Item]:
        """Operations and calls in order; what cannot be a call of its own is spread out."""
        made: list[Item] = []
        for item in items:
            if isinstance(item, fx.Node):
                made.append(Operation(item))
                continue
            call = None
            if item.call not in self._opened and item.fqn not in inlined and is_within(item.fqn, prefix):
                call = self._call(inside, prefix, item)
            made += [call] if call is not None else self._items(inside, prefix, item.items, inlined)
        return made

    def _call(self, inside: _Inside, prefix: str, call: CallTree) -> ModuleCall | None:
        """A call of a torch.nn module, or of a class that is written for it; None for what is better spread out."""
        nodes = tuple(call.nodes())
        reads, makes = self._reads(call, nodes), _makes(inside, call, nodes)
        if not makes:
            return None
        if len(makes) > 1:
            self.words.returned_together.update(makes)
        arguments = self._attentions.arguments(call, reads, makes)
        if arguments is not None:
            return self._attention(call, arguments, reads, makes)
        text, modules = self._leaves.constructor(call, reads, makes), frozenset[str]()
        if text is None:
            text, modules = self._sequential(inside, call, nodes, reads, makes)
        if text is None:
            stateless = not any(node.op == "get_attr" for each in nodes for node in each.all_input_nodes)
            same_mode = self._captured.modules[call.fqn].training == self._captured.modules[prefix].training
            small = len(nodes) <= _SMALL and not any(True for _ in call.calls())
            if stateless and same_mode and (small or not self.words.is_whole(call)):
                return None
            source, modules = self._class(inside, call, nodes, reads, makes)
            text = f"{source.name}()"
        model_class = self._captured.modules[call.fqn].class_name
        return ModuleCall(call.fqn, text, model_class, reads, makes, nodes, modules | {call.fqn})

    def _attention(
        self, call: CallTree, arguments: Arguments, reads: tuple[fx.Node, ...], makes: tuple[fx.Node, ...]
    ) -> ModuleCall:
        """A call of torch's own ``nn.MultiheadAttention``."""
        module = self._captured.modules[call.fqn].module
        assert isinstance(module, nn.MultiheadAttention)
        nodes, modules = tuple(call.nodes()), frozenset((call.fqn, f"{call.fqn}.out_proj"))
        makes = tuple(makes[position] for position in arguments.results)
        return ModuleCall(
            call.fqn, attention_calls.constructor(module), "MultiheadAttention", reads, makes, nodes, modules, arguments
        )

    def _sequential(
        self,
        inside: _Inside,
        call: CallTree,
        nodes: Sequence[fx.Node],
        reads: tuple[fx.Node, ...],
        makes: tuple[fx.Node, ...],
    ) -> tuple[str | None, frozenset[str]]:
        """``nn.Sequential(…)``, or a subclass that adds nothing but its name, and the modules in it; None for all
        else."""
        nothing = None, frozenset[str]()
        module = self._captured.modules[call.fqn].module
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            return nothing
        if len(reads) != 1 or len(makes) != 1 or [*module._modules] != [str(index) for index in range(len(module))]:
            return nothing
        row = self._items(inside, call.fqn, call.items, frozenset())
        built = {item.fqn: item for item in row if isinstance(item, ModuleCall)}
        handed, texts = reads, []
        for name, child in module.named_children():
            item = built.pop(f"{call.fqn}.{name}", None)
            if item is not None and item.reads == handed and len(item.makes) == 1:
                handed = item.makes
            elif item is not None or not self._silent(f"{call.fqn}.{name}"):
                return nothing
            texts.append(item.constructor if item is not None else constructor(child))
        if built or handed != makes or len(texts) < len(row) or None in texts:
            return nothing
        modules = {f"{call.fqn}.{name}" for name, _ in module.named_children()}.union(*map(modules_in, row))
        if type(module) is nn.Sequential:
            return f"nn.Sequential({', '.join(text for text in texts if text)})", frozenset(modules)
        source = self._subclass(call, nodes, tuple(text for text in texts if text), reads, makes)
        return f"{source.name}()", frozenset(modules)

    def _silent(self, fqn: str) -> bool:
        """Whether a module does nothing anywhere in the model; in a part of a Sequential, it may be another stage's."""
        return fqn not in self._called and isinstance(self._captured.modules[fqn].module, (nn.Identity, nn.Dropout))

    def _subclass(
        self,
        call: CallTree,
        nodes: Sequence[fx.Node],
        children: tuple[str, ...],
        reads: tuple[fx.Node, ...],
        makes: tuple[fx.Node, ...],
    ) -> ClassSource:
        """A class of the model's that derives from ``nn.Sequential`` and has no ``forward`` of its own."""
        module = self._captured.modules[call.fqn]
        return self._collect(
            (module.class_name, children),
            lambda name: ClassSource(
                name=name,
                docstring=self.words.docstring(call, self.words.parameters(call, reads), reads, makes),
                base="nn.Sequential",
                children=children,
                model_class=module.class_name,
                numbers=_numbers(module.module),
            ),
            module.class_name,
        )

    def _collect(self, structure: tuple[object, ...], make: Callable[[str], ClassSource], name: str) -> ClassSource:
        """The class of a structure: the one that is there, or a new one under an unused name."""
        if structure not in self._by_structure:
            taken = {source.name for source in self._by_structure.values()}
            self._by_structure[structure] = make(unused_class(class_name(name), taken))
        return self._by_structure[structure]

    def _reads(self, call: CallTree, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Values from outside, in the order in which the module takes them, or else reads them; its own state is
        none."""
        inner = set(nodes)
        read = dict.fromkeys(node for each in nodes for node in each.all_input_nodes if node not in inner)
        foreign = [
            node
            for node in read
            if node.op != "get_attr" or not any(is_within(name, call.fqn) for name in self._names[str(node.target)])
        ]
        return sorted_by_place(foreign, (argument_place(node, call.call) for node in foreign))

    def _class(
        self,
        inside: _Inside,
        call: CallTree,
        nodes: Sequence[fx.Node],
        reads: tuple[fx.Node, ...],
        makes: tuple[fx.Node, ...],
    ) -> tuple[ClassSource, frozenset[str]]:
        """The class of a call, and the modules in it."""
        scope, tree = self._scope(inside, call.fqn, call.items, reads, makes, regions=len(common_regions(nodes)))
        made = tuple(assignments(tree))
        neutral = [f"p{position}" for position in range(len(reads))]
        module = self._captured.modules[call.fqn]
        structure = (module.class_name, made, len(reads), write_body(scope, tree, neutral, None).lines)
        parameters = self.words.parameters(call, reads)
        source = self._collect(
            structure,
            lambda name: ClassSource(
                name=name,
                docstring=self.words.docstring(call, parameters, reads, makes),
                assignments=made,
                parameters=tuple(parameters),
                body=write_body(scope, tree, parameters, self.origins).lines,
                model_class=module.class_name,
                numbers=_numbers(module.module),
            ),
            module.class_name,
        )
        return source, modules_of(scope, tree)

    def _silent_leaves(self, prefix: str, state: dict[str, StateEntry], constructors: dict[str, str]) -> dict[str, str]:
        """torch.nn modules whose weights are read although the module is not called (an attention's ``out_proj``)."""
        found: dict[str, str] = {}
        for name in state:
            owner, _, _ = name.rpartition(".")
            if not owner or owner in found or not constructors.keys().isdisjoint(outer_names(name)):
                continue
            module = self._captured.modules.get(f"{prefix}.{owner}" if prefix else owner)
            text = constructor(module.module) if module is not None else None
            if module is None or text is None:
                continue
            held = {
                f"{owner}.{each}" for each, _ in (*module.module.named_parameters(), *module.module.named_buffers())
            }
            if held <= set(state):
                found[owner] = text
        return found

    def _held(
        self, inside: _Inside, prefix: str, items: Sequence[Item], outputs: Sequence[fx.Node]
    ) -> dict[fx.Node, str]:
        """State that the scope reads itself → its name relative to the class."""
        held: dict[fx.Node, str] = {}
        for item in items:
            for node in item.reads:
                if node.op == "get_attr" and node not in held:
                    self._hold(inside, held, node, prefix, local_name(item.nodes[0], self._names[str(node.target)]))
        for node in outputs:
            if node.op == "get_attr" and node not in held:
                self._hold(inside, held, node, prefix, str(node.target))
        return held

    def _hold(self, inside: _Inside, held: dict[fx.Node, str], node: fx.Node, prefix: str, wanted: str) -> None:
        names = [wanted, *self._names[str(node.target)]]
        for name in names:
            if name in inside.state and is_within(name, prefix):
                held[node] = relative(name, prefix)
                return


@dataclass(frozen=True)
class _Inside:
    """The stage that a scope belongs to."""

    nodes: frozenset[fx.Node]
    outputs: frozenset[fx.Node]
    state: frozenset[str]


def modules_of(scope: Scope, tree: Tree) -> frozenset[str]:
    """FQNs of all modules that a class has, those inside others included."""
    prefix = f"{scope.prefix}." if scope.prefix else ""
    return frozenset(f"{prefix}{path}" for path in paths(tree)).union(*map(modules_in, scope.items))


def _makes(inside: _Inside, call: CallTree, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Values that something outside a call reads, in the order in which its module returns them, or else makes them."""
    inner = set(nodes)
    made = [
        node
        for node in nodes
        if node in inside.outputs or any(user in inside.nodes and user not in inner for user in node.users)
    ]
    return sorted_by_place(made, (result_place(node, call.call) for node in made))


def _numbers(module: nn.Module) -> dict[str, str]:
    """The numbers that a module holds, by name; those that its constructor takes first."""
    held = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float))}
    order = [*inspect.signature(type(module).__init__).parameters, *held]
    return {name: literal(held[name]) for name in order if name in held and name != "training" and name[0] != "_"}
