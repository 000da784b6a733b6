"""Render the source files of a package through the templates."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.codegen.initial_values import InitialValues
from pipegraph.codegen.names.model_names import prose
from pipegraph.codegen.syntax.expressions import Expression, FunctionCall, ModuleInvocation, Name
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH, wrap
from pipegraph.codegen.syntax.statements import (
    Assign,
    ClassSource,
    FunctionSource,
    RegisterConstant,
    Return,
    SourceText,
    functions_called,
    lines,
)

_DOCSTRING_WIDTH = 112
_REGISTER_HOOKS = '"""Register the hooks of gradients that the model has. Weights are loaded before."""'
_TRAIN = '"""Set the mode, as the model itself does: some modules have another one."""'
# Up to this number of results, the type hint of the returned value lists each.
_LISTED_RESULTS = 6
# A name and its shape stay on one line, and so do an arrow and the word after it: while a docstring is filled, their
# spaces are no-break spaces.
_NAMED_SHAPE = re.compile(r"(?:\w+ )?\w+\[[\d, ]*\]")
_NO_BREAK_SPACE = "\u00a0"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python, not HTML; every name is escaped where it enters
    )


def templates_folder() -> Path:
    """The folder ``codegen_templates``: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "codegen_templates"
    return inside if inside.is_dir() else package.parent / "codegen_templates"


def render_stage(
    source: ClassSource,
    functions: Sequence[FunctionSource],
    blocks: Sequence[ClassSource],
    header: str,
    libraries: Mapping[str, str],
) -> str:
    """Render ``stage_0.py`` and the like.

    Args:
        source: the class of the stage.
        functions, blocks: the functions and classes of ``blocks.py``.
        header: the docstring of the file.
        libraries: namespace of operators → the module that defines them.
    """
    shared = {function.name for function in functions} | {block.name for block in blocks}
    text = "\n".join(_class_lines(source, {block.name: block for block in blocks}))
    # A function that only another function calls is imported by neither.
    used = functions_called(source.walk()) & shared & set(re.findall(r"\w+", text))
    return _render(
        "stage.py.jinja",
        header=_docstring("  ".join([header, *_origins([source])]), 0),
        lines=text,
        imports=_imports([source], libraries),
        constants=_constant_lines([source]),
        blocks=_blocks_import(sorted(used, key=_import_order)),
    )


def render_blocks(
    functions: Sequence[FunctionSource], blocks: Sequence[ClassSource], header: str, libraries: Mapping[str, str]
) -> str:
    """Render ``blocks.py``; the arguments are those of ``render_stage``."""
    by_name = {block.name: block for block in blocks}
    texts = [function.author_text.text for function in functions]
    texts += ["\n".join(_class_lines(block, by_name)) for block in blocks]
    imports = _imports([*functions, *blocks], libraries) if texts else []
    constants = _constant_lines([*functions, *blocks])
    header = "  ".join([header, *_origins([*functions, *blocks])])
    return _render("blocks.py.jinja", header=_docstring(header, 0), classes=texts, imports=imports, constants=constants)


def render_init(stages: Sequence[ClassSource], header: str, adapters: bool) -> str:
    """Render ``__init__.py``.

    Args:
        adapters: whether a checkpoint may lack parameters of adapters.
    """
    return _render(
        "init.py.jinja",
        header=_docstring(header, 0),
        stages=[stage.name for stage in stages],
        hooks=any(stage.hooks for stage in stages),
        adapters=adapters,
    )


def render_weights(header: str, values: InitialValues, checkpoint: bool, adapters: bool) -> str:
    """Render ``weights.py``, with its tables of initial values.

    Args:
        checkpoint: whether a checkpoint may have the weights under other names, or in parts.
        adapters: whether a checkpoint may lack parameters of adapters.
    """
    return _render(
        "weights.py.jinja",
        header=_docstring(header, 0),
        initialisation=values.known_lines,
        zero_rows=values.has_zero_rows,
        guesses=values.guessed_lines,
        checkpoint=checkpoint,
        adapters=adapters,
    )


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def _constant_lines(sources: Sequence[ClassSource | FunctionSource]) -> list[str]:
    """``EPS = 1e-5``, for the constants that texts of the author read."""
    constants = {name: value for text in _author_texts(sources) for name, value in text.constants}
    return [line for name, value in constants.items() for line in Assign((Name(name),), value).lines(0)]


def _origins(sources: Sequence[ClassSource | FunctionSource]) -> list[str]:
    """``LlamaMLP: the text of modeling_llama.py (Apache License).``, for each file that text is taken from."""
    names: dict[str, list[str]] = {}
    for source in sources:
        if source.author_text is not None and source.author_text.origin:
            names.setdefault(source.author_text.origin, []).append(source.name)
    return [f"{', '.join(of_file)}: the text of {prose(origin)}." for origin, of_file in names.items()]


def _author_texts(sources: Sequence[ClassSource | FunctionSource]) -> list[SourceText]:
    return [node for source in sources for node in source.walk() if isinstance(node, SourceText)]


def _class_lines(source: ClassSource, classes: Mapping[str, ClassSource]) -> list[str]:
    docstring = [f"    {line}" if line else "" for line in _docstring(source.docstring, 4)]
    head = [f"class {source.name}({source.base}):", *docstring]
    if source.init or source.children or source.forward:
        head.append("")
    if source.init or source.children:
        constructor = FunctionCall(Name("super().__init__"), source.children)
        with_defaults = (f"{name}={value.text}" for name, value in source.defaults.items())
        parameters = ", ".join(("self", *source.init_parameters, *with_defaults))
        head += wrap(f"def __init__({parameters}):", 4)
        head += [*wrap(constructor.text, 8), *lines(source.init, 8)]
    head += _apply_lines([statement for statement in source.init if isinstance(statement, RegisterConstant)])
    if not source.forward:
        return [*head, *_hook_lines(source)]
    separator = [""] if source.init or source.children else []
    if source.author_text is not None:
        forward = source.author_text.lines(4)
    else:
        forward = [*_forward_signature(source, classes), *lines(source.forward, 8)]
    return [*head, *separator, *forward, *_train_lines(source), *_hook_lines(source)]


def _train_lines(source: ClassSource) -> list[str]:
    if not source.train:
        return []
    head = ["", "    def train(self, mode: bool = True):", f"        {_TRAIN}", "        super().train(mode)"]
    return [*head, *lines(source.train, 8), "        return self"]


def _hook_lines(source: ClassSource) -> list[str]:
    if not source.hooks:
        return []
    head = ["", "    def register_hooks(self):", f"        {_REGISTER_HOOKS}"]
    return [*head, *(f"        {line}" if line else "" for line in source.hooks)]


def _forward_signature(source: ClassSource, classes: Mapping[str, ClassSource]) -> list[str]:
    """``def forward(self, x: Tensor, mask: Tensor) -> Tensor:``, at an indentation of 4; on several lines if it is
    long."""
    parameters = ["self", *(f"{name}: Tensor" for name in source.parameters)]
    counts = _result_counts(source, classes)
    kinds = ("Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]" for count in sorted(counts))
    returns = " | ".join(kinds) if all(count <= _LISTED_RESULTS for count in counts) else "tuple[Tensor, ...]"
    line = f"    def forward({', '.join(parameters)}) -> {returns}:"
    if len(line) <= LINE_LENGTH:
        return [line]
    inside = f"        {', '.join(parameters)}"
    listed = [inside] if len(inside) <= LINE_LENGTH else [f"        {parameter}," for parameter in parameters]
    return ["    def forward(", *listed, f"    ) -> {returns}:"]


def _result_count(statement: Return) -> int:
    """How many tensors a statement returns; more than are listed if it does not say."""
    return statement.count if statement.count is not None else _LISTED_RESULTS + 1


def _result_counts(source: ClassSource, classes: Mapping[str, ClassSource]) -> set[int]:
    """How many tensors ``forward`` returns: more than one number if branches differ."""
    counts: set[int] = set()
    if source.author_text is not None:
        return set()
    for statement in source.forward:
        for node in statement.walk():
            if not isinstance(node, Return):
                continue
            value = node.values[0]
            called = value.classes if len(node.values) == 1 and isinstance(value, ModuleInvocation) else ()
            inside = [_result_counts(classes[name], classes) for name in called if name in classes]
            counts |= set().union(*inside) if inside else {_result_count(node)}
    return counts or {1}


def _apply_lines(constants: Sequence[RegisterConstant]) -> list[str]:
    """A method that lets ``.to(device)`` move constants, but no ``.to(dtype)`` convert them. As bits nothing does."""
    if not constants:
        return []
    names = ", ".join(constant.tensor.text.removeprefix("self.") for constant in constants)
    reason = "it is a plain attribute" if len(constants) == 1 else "they are plain attributes"
    docstring = _docstring(f"Move {names} too, but convert only the rest: in the model {reason}.", 8)
    return [
        "",
        "    def _apply(self, fn, recurse=True):",
        *(f"        {line}" if line else "" for line in docstring),
        *(line for constant in constants for line in _view(constant.tensor, constant.bits)),
        "        super()._apply(fn, recurse)",
        *(line for constant in constants for line in _view(constant.tensor, constant.dtype)),
        "        return self",
    ]


def _view(tensor: Expression, dtype: Expression) -> list[str]:
    return wrap(f"{tensor.text} = {tensor.text}.view({dtype.text})", 8)


def _docstring(text: str, indent: int) -> list[str]:
    """A docstring as lines without indentation; two spaces in the text separate its parts if it is too long for one."""
    if len(text) + indent + 6 <= _DOCSTRING_WIDTH + 8:
        return [f'"""{text}"""']
    joined = _NAMED_SHAPE.sub(lambda match: match[0].replace(" ", _NO_BREAK_SPACE), text)
    head, *parts = joined.replace("→ ", f"→{_NO_BREAK_SPACE}").split("  ")
    first, *head_lines = _filled(head, _DOCSTRING_WIDTH - indent - 3)
    body = [line for part in parts for line in _filled(part, _DOCSTRING_WIDTH - indent)]
    filled = [f'"""{first}', *head_lines, *([""] if body else []), *body, '"""']
    return [line.replace(_NO_BREAK_SPACE, " ") for line in filled]


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _imports(sources: Sequence[ClassSource | FunctionSource], libraries: Mapping[str, str]) -> list[str]:
    """The imports that classes need, in isort's order."""
    names = {node.name for source in sources for node in source.walk() if isinstance(node, Name)}
    hook_libraries = {name for source in sources if isinstance(source, ClassSource) for name in source.hook_libraries}
    names |= {f"{library}." for library in hook_libraries}
    of_author = {line for text in _author_texts(sources) for line in text.imports}
    needs_torch = any(name.startswith("torch.") for name in names) or "import torch" in of_author
    imports = {"torch": "import torch"} if needs_torch else {}
    if any(name.startswith("F.") for name in names):
        imports["torch.nn.functional"] = "import torch.nn.functional as F"
    needs_math = any(name.startswith("math.") for name in names) or "import math" in of_author
    standard = ["import math"] if needs_math else []
    standard += ["from collections import OrderedDict"] if "OrderedDict" in names else []
    if standard:
        imports[""] = "\n".join(standard) + "\n"
    for namespace, module in libraries.items():
        if any(name.startswith(f"torch.ops.{namespace}.") for name in names):
            imports[module] = f"import {module}  # noqa: F401 (defines torch.ops.{namespace})"
    classes = [source for source in sources if isinstance(source, ClassSource)]
    is_hinted = any(source.forward and source.author_text is None for source in classes)
    torch_names = [*(["Tensor"] if is_hinted else []), *(["nn"] if classes else [])]
    torch_import = [f"from torch import {', '.join(torch_names)}"] if torch_names else []
    return _joined_imports([*(imports[module] for module in sorted(imports)), *torch_import], of_author)


def _joined_imports(lines: Sequence[str], of_author: AbstractSet[str]) -> list[str]:
    """Imports with those that texts of the author need, in isort's order."""
    if not of_author:
        return list(lines)
    statements = {line.strip() for entry in lines for line in entry.splitlines() if line.strip()} | of_author
    plain = sorted(line for line in statements if line.startswith("import "))
    members: dict[str, set[str]] = {}
    for line in statements - set(plain):
        module, _, names = line.removeprefix("from ").partition(" import ")
        members.setdefault(module, set()).update(names.split(", "))
    ordered = [
        *plain,
        *(
            f"from {module} import {', '.join(sorted(members[module], key=_import_order))}"
            for module in sorted(members)
        ),
    ]
    is_standard = {line: line.split()[1].partition(".")[0] in sys.stdlib_module_names for line in ordered}
    standard, rest = ([line for line in ordered if is_standard[line] is kind] for kind in (True, False))
    return [*standard, *([""] if standard and rest else []), *rest]


def _import_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """isort's order of imported names: CONSTANTS, Classes, and numbers by their value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _blocks_import(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    if len(", ".join(names)) < 90:
        return wrap(f"from .blocks import {', '.join(names)}", 0)
    return ["from .blocks import (", *(f"    {name}," for name in names), ")"]
