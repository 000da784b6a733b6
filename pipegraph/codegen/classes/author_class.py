"""A class in its author's text, and the contents of a stage's own class."""

from __future__ import annotations

from typing import NamedTuple

from pipegraph.codegen.author_text.constructors import Constructor
from pipegraph.codegen.expressions.module_tree import ModuleTree
from pipegraph.codegen.expressions.torch_modules import BaseClass
from pipegraph.codegen.forward.items import ClassContents, Modules
from pipegraph.codegen.syntax.statements import SourceText, Statement


class AuthorClass(NamedTuple):
    """A class in its author's text.

    Attributes:
        constructor: its constructor, and the modules in it.
        has_author_results: whether it returns what the author's class does: tensors in tuples.
        parameters: the parameters of its ``forward`` if it is a part of the author's class.
        unread_tensors: the parameters of which it reads only the dtype or the device.
    """

    constructor: Constructor
    has_author_results: bool
    parameters: tuple[str, ...] | None
    unread_tensors: frozenset[str]


class AuthorText(NamedTuple):
    """The text of a class, and the modules in it.

    Attributes:
        source: its methods.
        init: the statements of ``__init__`` after ``super().__init__()``.
        tree, modules: the modules.
        has_author_results: as `AuthorClass` has it.
        base: the class that it derives from.
        unread_tensors: as `AuthorClass` has it.
    """

    source: SourceText
    init: tuple[Statement, ...]
    tree: ModuleTree
    modules: Modules
    has_author_results: bool
    base: BaseClass
    unread_tensors: frozenset[str]


class StageContents(NamedTuple):
    """The contents of a stage's own class.

    Attributes:
        contents: what it has if it is written from the graph.
        tree, modules: its modules.
        parameters: the names of the values that its ``forward`` takes.
        text: the statements of the model's ``forward`` in it; None if it is written from the graph.
    """

    contents: ClassContents
    tree: ModuleTree
    modules: Modules
    parameters: tuple[str, ...]
    text: AuthorText | None
