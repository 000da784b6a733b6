"""The proof of a package: its text is compared with the captured graph, class by class, before it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from pipegraph.codegen.draft import Source
from pipegraph.codegen.syntax.statements import SourceText
from pipegraph.codegen.validation.settings import Setting, settings_of, settings_of_variant
from pipegraph.codegen.validation.validate import GraphDifference, differences
from pipegraph.errors import one_line
from pipegraph.package.source_import import ImportedPackage
from pipegraph.planner.plan import Plan


@dataclass(frozen=True)
class Proof:
    """How a package was compared with the captured graph, which it equals.

    Attributes:
        seconds: that the comparison took, of all forms.
        writing_seconds: that the text took, of all forms.
        plainer: classes that are written in a plainer form than usual → the form, in words.
        reasons: what each form before computed otherwise.
    """

    seconds: float
    writing_seconds: float
    plainer: Mapping[str, str]
    reasons: tuple[str, ...]


def differences_of_text(files: Mapping[str, str], plans: Sequence[Plan]) -> list[GraphDifference]:
    """Import the text of a package, and compare it with captured graphs.

    Args:
        files: name → text.
        plans: the graph, and those of other sizes for which the text is meant as well.
    """
    try:
        imported = ImportedPackage(Path("package"), files, files)
    except Exception as error:  # whatever the text raises
        problem = one_line(f"{type(error).__name__}: {error}")
        return [GraphDifference(0, Setting(plans[0].captured.training), ("the package",), problem, "")]
    with imported as package:
        load_stage = package.module.load_stage
        first, *variants = (plan.captured for plan in plans)
        settings = [settings_of(first, at_other_sizes=not variants), *map(settings_of_variant, variants)]
        return list(chain.from_iterable(map(differences, plans, repeat(load_stage), settings)))


def written_names(source: Source, difference: GraphDifference) -> list[str]:
    """The names under which `Forms` has the classes of a difference, innermost first."""
    model_classes = {block.name: block.model_class for block in source.blocks}
    return list(dict.fromkeys(model_classes.get(name, name) for name in difference.names))


def author_lines(
    source: Source, files: Mapping[str, str], written_differences: Sequence[GraphDifference]
) -> frozenset[tuple[str, int]]:
    """The files and lines of the model whose text, in classes that have their author's, differs from the graph.

    Of each difference it is the innermost line of such a class that computes something else, and the innermost one that
    led to what the graph has instead.
    """
    file_of = dict.fromkeys((block.name for block in source.blocks), "blocks.py")
    file_of |= {stage.name: f"stage_{index}.py" for index, stage in enumerate(source.stages)}
    written = (*source.blocks, *source.stages)
    texts = {cls.name: cls.author_text for cls in written if cls.author_text is not None}
    all_places = {place for text in texts.values() for place in text.places}
    file_lines = {name: text.splitlines() for name, text in files.items()}
    lines: set[tuple[str, int]] = set()
    for difference in written_differences:
        for name, number in difference.lines:
            if name not in texts:
                continue
            places = _places(texts[name], file_lines[file_of[name]][number - 1].strip())
            lines.update(places)
            if places:
                break
        lines.update([place for place in difference.captured_lines if place in all_places][:1])
    return frozenset(lines)


def _places(text: SourceText, line: str) -> list[tuple[str, int]]:
    """The file and the line that a line of a text is from."""
    lines = (line for function in text.functions for line in function.split("\n"))
    pairs = zip(lines, text.places, strict=True)
    return [place for author_line, place in pairs if place[1] and author_line.strip() == line]
