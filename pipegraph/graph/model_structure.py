"""The tables of a model: its state, its modules and their source, its arguments and results; names that it may have."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from pipegraph.errors import CaptureError, is_user_file, one_line
from pipegraph.graph.captured import EVALUATION_OUTPUTS, ModuleEntry, StateEntry, plain_containers
from pipegraph.graph.initialisation import initialisation_of
from pipegraph.graph.nodes import label_of
from pipegraph.torch_private.modules import has_forward_hooks, is_persistent
from pipegraph.torch_private.pytrees import pytree
from pipegraph.torch_private.tensors import memory_of

# ---- module modes ----------------------------------------------------------------------------------------------------
# The mode of each module after ``model.train()`` and ``model.eval()``, which a model may override.


Modes = Mapping[nn.Module, bool]
"""Whether each module is in training mode."""


class ModuleModes(NamedTuple):
    """The modes of all modules.

    Attributes:
        training: after ``model.train()``.
        evaluation: after ``model.eval()``.
    """

    training: Modes
    evaluation: Modes

    def mode_pair(self, module: nn.Module) -> tuple[bool, bool]:
        """The mode of one module after both."""
        return self.training[module], self.evaluation[module]


def modes_of(model: nn.Module) -> ModuleModes:
    """Return the modes of all modules. The model is left in its mode."""
    modules = list(model.modules())
    if not any(map(_overrides, modules)):
        return ModuleModes(dict.fromkeys(modules, True), dict.fromkeys(modules, False))
    modes = {module: module.training for module in modules}
    try:
        model.train()
        training = {module: module.training for module in modules}
        model.eval()
        return ModuleModes(training, {module: module.training for module in modules})
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _overrides(module: nn.Module) -> bool:
    """Whether a module has its own ``train`` or ``eval``."""
    attributes, cls = vars(module), type(module)
    return (
        "train" in attributes
        or "eval" in attributes
        or cls.train is not nn.Module.train
        or cls.eval is not nn.Module.eval
    )


# ---- model structure -------------------------------------------------------------------------------------------------


_TORCH = Path(torch.__file__).parent

MODULE_ATTRIBUTES: Final = frozenset(dir(nn.Module()))
"""What every module has, such as ``half`` and ``training``: a buffer or an argument of that name would hide it."""

_LONGEST: Final = 4000  # characters; a manifest takes a few more
_EXCERPT_LENGTH: Final = 40


def state_of(model: nn.Module) -> tuple[dict[str, StateEntry], dict[str, torch.Tensor]]:
    """Every parameter and buffer, and its tensor, under every name it has, in the order of ``state_dict()``."""
    state: dict[str, StateEntry] = {}
    tensors: dict[str, torch.Tensor] = {}
    first_name: dict[tuple[Any, ...], str] = {}
    initialisation = initialisation_of(model)
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for kind, named in (("parameter", parameters), ("buffer", buffers)):
            for name, tensor in named:
                fqn = f"{prefix}.{name}" if prefix else name
                tensors[fqn] = tensor.detach()
                state[fqn] = StateEntry(
                    fqn=fqn,
                    kind=kind,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    requires_grad=kind == "parameter" and tensor.requires_grad,
                    persistent=kind == "parameter" or is_persistent(module, name),
                    canonical=first_name.setdefault(memory_of(tensor), fqn),
                    initialisation=initialisation.get(id(tensor)),
                )
    return state, tensors


def modules_of(model: nn.Module) -> dict[str, ModuleEntry]:
    """Every module under every name it has."""
    lines = {cls: _first_line(cls) for cls in {type(module) for module in model.modules()}}
    modes = modes_of(model)
    return {
        fqn: ModuleEntry(
            fqn=fqn,
            class_name=type(module).__name__,
            training=module.training,
            source=lines[type(module)],
            modes=modes.mode_pair(module),
            module=module,
        )
        for fqn, module in model.named_modules(remove_duplicate=False)
    }


def _first_line(cls: type) -> str:
    """``file.py:line`` of a class outside torch, or nothing. Only the file's name, so that output does not depend on a
    machine's folders."""
    source = class_text(cls)
    return "" if source is None or _TORCH in source.file.parents else f"{source.file.name}:{source.line}"


def inputs_of(
    exported: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """The model's arguments with names as leaves: positional ones, those by keyword, and, name → value, all that are no
    tensors.

    A tensor that the model does not read keeps its name, because the caller passes it all the same.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    assert len(names) == len(leaves), "torch.export changed the number of inputs"
    constants: dict[str, Any] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            continue
        if leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            raise CaptureError(
                f"Input {name} is a {type(leaf).__name__}; a pipeline's inputs are tensors, numbers, strings or None.",
                "build the object inside the model's forward.",
            )
        constants[name] = leaf
    positional, keywords = plain_containers(pytree.tree_unflatten(names, spec))
    return tuple(positional), keywords, constants


def evaluation_outputs_of(graph: fx.Graph) -> Any:
    """As `outputs_of`, in evaluation mode; None if the model returns the same as in training mode."""
    (output,) = graph.find_nodes(op="output")
    values: Any = output.args[0]
    names = pytree.tree_map_only(int, lambda place: label_of(values[place]), output.meta.get(EVALUATION_OUTPUTS))
    return plain_containers(names)


def outputs_of(graph: fx.Graph, exported: ExportedProgram) -> Any:
    """The nesting of what the model returns, with names of graph values as leaves."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    (output,) = graph.find_nodes(op="output")
    values: Any = output.args[0]
    leaves: list[str | None] = []
    for value in values[: spec.num_leaves]:
        if value is not None and not isinstance(value, fx.Node):
            description = repr(value) if isinstance(value, (bool, int, float, str)) else "a number that it computes"
            raise CaptureError(
                f"The model returns {description}, which is neither a tensor nor None.", "return tensors only."
            )
        leaves.append(None if value is None else label_of(value))
    if not any(leaves):
        raise CaptureError(
            "The model returns no tensor, so that there is nothing to train.", "a return at the end of its forward."
        )
    return plain_containers(pytree.tree_unflatten(leaves, spec))


class ClassText(NamedTuple):
    """The file of a class, its first line, decorators included, and its text."""

    file: Path
    line: int
    text: str


def class_text(cls: type) -> ClassText | None:
    """Return the source of a class; None if it has no source, like a class that a call creates."""
    try:
        file = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return None
    if file is None:
        return None
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    span = _classes("".join(lines)).get(cls.__qualname__)
    return None if span is None else ClassText(Path(file), span[0], "".join(lines[span[0] - 1 : span[1]]))


def is_layer_of_torch(cls: type) -> bool:
    """Return whether a class is one of ``torch.nn``'s layers, which follow their mode themselves.

    ``torch.nn.utils.parametrizations`` are not among them: they ask for the mode, as a model does.
    """
    return cls.__module__.startswith("torch.nn.modules.")


def follows_mode(module: nn.Module) -> bool:
    """Return whether a module is such a layer and no more: a hook asks for the mode itself, as that of
    ``torch.nn.utils.spectral_norm`` does."""
    return is_layer_of_torch(type(module)) and not has_forward_hooks(module)


@lru_cache(maxsize=64)
def _classes(source: str) -> dict[str, tuple[int, int]]:
    """The first and the last line of each class in a file, by the name that ``__qualname__`` is."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    spans: dict[str, tuple[int, int]] = {}
    for name, node in _definitions(tree, ""):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        spans.setdefault(name, (first, node.end_lineno or first))
    return spans


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _definitions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions(child, prefix)


def check_module_names(model: nn.Module) -> None:
    """Check the names of modules, parameters and buffers. Raises CaptureError."""
    for name, _ in model.named_modules(remove_duplicate=False):
        _check("module", name)
    for name, _ in model.named_parameters(remove_duplicate=False):
        _check("parameter", name)
    for name, _ in model.named_buffers(remove_duplicate=False):
        _check("buffer", name)


def check_classes(model: nn.Module) -> None:
    """Raise CaptureError for modules that torch.jit has compiled, which have neither source nor a graph."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or type(model).__name__} is a module that torch.jit has compiled, which has no source of "
                "Python any more.",
                "the module before torch.jit.script or torch.jit.trace.",
            )


def check_keys(kind: str, structure: Any) -> None:
    """Check the keys of nested arguments or outputs; ``kind`` is what messages call them. Raises CaptureError."""
    for key in _keys(structure):
        _check(kind, key)


def _keys(structure: Any) -> Iterator[str]:
    if isinstance(structure, Mapping):
        yield from (key for key in structure if isinstance(key, str))
        structure = tuple(structure.values())
    if isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _keys(item)


def _check(kind: str, name: str) -> None:
    excerpt = one_line(name[:_EXCERPT_LENGTH]) + ("…" if len(name) > _EXCERPT_LENGTH else "")
    if len(name) > _LONGEST:
        problem = f"has {len(name)} characters, and {_LONGEST} at most can be written"
    elif any("\ud800" <= character <= "\udfff" for character in name):
        problem = "holds half a character, which cannot be written: \\ud800 to \\udfff stand in pairs"
    else:
        return
    raise CaptureError(f'The name of the {kind} "{excerpt}" {problem}.', "rename it in the model.")


def mentions_mode(cls: type[nn.Module]) -> bool:
    """Return whether the source of a class asks for its mode."""
    user_classes = [base for base in cls.__mro__ if base not in (nn.Module, object) and not is_layer_of_torch(base)]
    return any(source is None or ".training" in source.text for source in map(class_text, user_classes))


ASKS_ABOUT_EXPORT: Final = re.compile(r"is_\w*exporting")
"""How a model's source asks whether it is exported."""


def python_modules_of(model: nn.Module) -> list[ModuleType]:
    """The Python modules in which the classes of a model are defined, but for those of torch."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    modules = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    return [module for module in modules if is_user_file(getattr(module, "__file__", None) or "")]


def source_has(model: nn.Module, pattern: re.Pattern[str]) -> bool:
    """Return whether the text of one of these Python modules has a pattern."""
    return any(pattern.search(_text_of(str(module.__file__))) for module in python_modules_of(model))


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
