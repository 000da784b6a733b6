"""``write_package``: a plan becomes a folder of source, weights and a manifest."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import fx

import pipegraph
from pipegraph.codegen.blocks import Blocks
from pipegraph.codegen.literals import dtype_name
from pipegraph.codegen.names import prose, unused, variable
from pipegraph.codegen.source import render_blocks, render_init, render_stage
from pipegraph.codegen.stage_class import stage_class
from pipegraph.codegen.weights import shard_plan, write_weights
from pipegraph.errors import CaptureError, PackageError
from pipegraph.graph.bounds import index_bound
from pipegraph.graph.captured import Captured
from pipegraph.graph.source import ModelSource
from pipegraph.graph.stages import tensor_of
from pipegraph.package import MANIFEST, WEIGHTS_INDEX, Buffer, Manifest, Package, StageEntry, Value
from pipegraph.planner.plan import Plan

_BUILT_IN = frozenset({"aten", "prim", "prims"})


def write_package(
    plan: Plan,
    out: str | PathLike[str],
    weights: bool = True,
    overwrite: bool = False,
    source: ModelSource | None = None,
) -> Package:
    """Write the stages of a plan.

    The folder appears complete or not at all: everything is written beside it and renamed.

    Args:
        plan: from :func:`pipegraph.plan`.
        out: the folder. It must not exist, be empty, or hold a package that pipegraph wrote.
        weights: write parameters; buffers are written in any case.
        overwrite: replace a package that stands there, edited by hand or not.
        source: where the model came from, for the manifest.

    Raises:
        PackageError: the folder holds other files, or a package and ``overwrite`` is not given; or there are no
        weights.
        CaptureError: an operation comes from a library that a package could not import.
    """
    folder = Path(out)
    _check_folder(folder, overwrite)
    files, manifest = generate(plan, weights, source)
    shards = shard_plan(plan.captured, plan.stages, weights)
    with _beside(folder) as staging:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        write_weights(plan.captured, shards, staging)
        (staging / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return Package.open(folder)


def generate(plan: Plan, weights: bool = True, source: ModelSource | None = None) -> tuple[dict[str, str], Manifest]:
    """The source files of a package by name, and its manifest; nothing is written."""
    captured = plan.captured
    blocks = Blocks(captured)
    names = _value_names(plan, blocks)
    stages = [stage_class(plan, blocks, stage, names) for stage in plan.stages]
    requires = _requires(captured)
    model = source.name if source is not None else captured.model_name
    about = f"{prose(captured.model_name)} ({prose(model)})"
    count = f"{len(stages)} stages" if len(stages) > 1 else "one stage"
    files = {
        "__init__.py": render_init(
            stages, f"{about} in {count}, written by pipegraph {pipegraph.__version__}.", requires
        ),
        "blocks.py": render_blocks(blocks.classes, f"The blocks that the stages of {about} share.", requires),
    }
    for index, stage in enumerate(stages):
        header = f"Stage {index} of {len(stages)} of {about}."
        files[f"stage_{index}.py"] = render_stage(stage, blocks.classes, header)
    return files, _manifest(plan, names, files, weights, requires, source)


def _manifest(
    plan: Plan,
    names: Mapping[fx.Node, str],
    files: Mapping[str, str],
    weights: bool,
    requires: Sequence[str],
    source: ModelSource | None,
) -> Manifest:
    captured = plan.captured
    by_label = {node.name: names[node] for node in (*captured.inputs, *captured.returned)}
    shards = {name: file for file, held in shard_plan(captured, plan.stages, weights).items() for name in held}
    file_of = {int(file[6:11]): file for file in shards.values()}
    values = {names[boundary.node]: _value(names[boundary.node], boundary) for boundary in plan.boundaries}
    for name, constant in captured.constants.items():
        values[name] = Value(name, "", (), -1, (), constant=constant)
    return Manifest(
        generator=f"pipegraph {pipegraph.__version__}",
        model={
            "source": source.name if source is not None else "",
            "class": captured.model_name,
            "sha256": source.sha256 if source is not None else "",
        },
        args=_relabel(list(captured.args), by_label),
        kwargs=_relabel(captured.kwargs, by_label),
        outputs=_relabel(captured.outputs, by_label),
        values=values,
        stages=tuple(
            StageEntry(
                index=stage.index,
                module=f"stage_{stage.index}",
                class_name=f"Stage{stage.index}",
                inputs=tuple(names[node] for node in stage.inputs),
                outputs=tuple(names[node] for node in stage.outputs),
                parameters=tuple(fqn for fqn in stage.state if captured.state[fqn].kind == "parameter"),
                buffers=tuple(
                    Buffer(fqn, captured.state[fqn].persistent)
                    for fqn in stage.state
                    if captured.state[fqn].kind != "parameter"
                ),
                weights=file_of.get(stage.index),
                cost=cost.to_json(),
            )
            for stage, cost in zip(plan.stages, plan.costs, strict=True)
        ),
        tied=captured.tied,
        plan={
            "points": [str(point) for point in plan.points],
            "stages": [line.partition(": ")[2] for line in plan.describe()],
        },
        files={name: f"sha256 {hashlib.sha256(text.encode()).hexdigest()}" for name, text in files.items()},
        requires=tuple(requires),
    )


def _value(name: str, boundary: Any) -> Value:
    tensor = tensor_of(boundary.node)
    integer = boundary.producer < 0 and not (tensor.is_floating_point() or tensor.dtype == torch.bool)
    return Value(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        producer=boundary.producer,
        consumers=boundary.consumers,
        requires_grad=boundary.requires_grad,
        bound=index_bound(boundary.node) if integer else None,
    )


def _value_names(plan: Plan, blocks: Blocks) -> dict[fx.Node, str]:
    """A name for everything that crosses: the model's own for its arguments, the key for what it returns in a dict, and
    else what its source calls the value."""
    captured = plan.captured
    taken = set(captured.constants)
    keys = {label: key for key, label in _labelled(captured.outputs)}
    names: dict[fx.Node, str] = {}
    for boundary in plan.boundaries:
        node = boundary.node
        if node.op == "placeholder":
            wanted = node.name
        elif node in captured.returned:
            wanted = keys.get(node.name) or blocks.value_name(node, default="output")
        else:
            wanted = blocks.value_name(node)
        names[node] = unused(variable(wanted, "x"), taken)
        taken.add(names[node])
    return names


def _labelled(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(key, label) of each leaf that stands under a key."""
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _labelled(inner, name)
    elif isinstance(tree, list):
        for inner in tree:
            yield from _labelled(inner, key)
    elif tree is not None and key:
        yield key, tree


def _relabel(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _relabel(inner, names) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_relabel(inner, names) for inner in tree]
    return names.get(tree, tree)


def _requires(captured: Captured) -> tuple[str, ...]:
    """Libraries that define operations of the model; a package imports them before it runs."""
    found: dict[str, fx.Node] = {}
    for node in captured.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _BUILT_IN:
            found.setdefault(node.target.namespace, node)
    for namespace, node in found.items():
        if find_spec(namespace) is None:
            raise CaptureError(
                f"The model uses {node.target}, and there is no library {namespace} that a package could import to "
                f"have it.\nTry: put the definition of the operation into an importable module named {namespace}."
            )
    return tuple(sorted(found))


def _check_folder(folder: Path, overwrite: bool) -> None:
    if folder.is_file():
        raise PackageError(f"{folder} is a file.\nTry: -o with another folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    foreign = _foreign_files(folder)
    if foreign:
        raise PackageError(
            f"{folder} holds files that pipegraph did not write ({', '.join(foreign[:4])}"
            f"{', …' if len(foreign) > 4 else ''}); it is left alone.\nTry: -o with a new folder."
        )
    if not overwrite:
        edited = Package.open(folder).edited()
        held = f"a package whose {', '.join(edited)} was edited by hand" if edited else "a package"
        raise PackageError(f"{folder} already holds {held}.\nTry: --overwrite to replace it, or -o with a new folder.")


def _foreign_files(folder: Path) -> list[str]:
    """What stands in a folder beside the files of a package; all of it where there is no package."""
    try:
        manifest = Package.open(folder).manifest
    except PackageError:
        return sorted(entry.name for entry in folder.iterdir())
    own = {*manifest.files, *(stage.weights for stage in manifest.stages), MANIFEST, WEIGHTS_INDEX, "__pycache__"}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in own)


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder next to ``folder``, which takes its place at the end; nothing is left behind after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
        staging.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / "old")
            staging.rename(folder)
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
