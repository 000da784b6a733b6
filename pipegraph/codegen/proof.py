"""The proof of a package: its text is compared with the captured graph, class by class, before it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipegraph.codegen.draft import Source
from pipegraph.codegen.validation.settings import Setting
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
        return [difference for plan in plans for difference in differences(plan, package.module.load_stage)]


def written_names(source: Source, difference: GraphDifference) -> list[str]:
    """The names under which `Forms` has the classes of a difference, innermost first."""
    model_classes = {block.name: block.model_class for block in source.blocks}
    return list(dict.fromkeys(model_classes.get(name, name) for name in difference.names))
