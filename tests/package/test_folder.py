"""The folder of a package: opened, checked, and its stages loaded as their source stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipegraph.errors import PackageError
from pipegraph.package import WEIGHTS_INDEX, Package
from tests.messages import refused
from tests.runtime.packages import write
from tests.runtime.sketches import chain, tied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(chain(2), tmp_path / "out")


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with refused(PackageError, str(tmp_path / "absent"), advice="pipegraph split MODEL -o"):
        Package.open(tmp_path / "absent")
    with refused(PackageError, str(tmp_path / "pipeline.json"), advice="`pipegraph split MODEL -o OUT`"):
        Package.open(tmp_path)


def test_a_stage_runs_as_its_source_stands_now(folder: Path) -> None:
    """Also right after an edit of the same length, in the same second, when Python would trust an old .pyc."""
    original_stage = Package.open(folder).load_stage(0)
    source = (folder / "stage_0.py").read_text()
    (folder / "stage_0.py").write_text(source.replace("torch.tanh", "torch.cosh"))
    edited_stage = Package.open(folder).load_stage(0)
    x = torch.ones(2, 8)
    assert torch.allclose(edited_stage(x), torch.cosh(torch.atanh(original_stage(x))))
    assert not (folder / "__pycache__").exists()


def test_edited_and_missing_files_are_known(folder: Path) -> None:
    assert Package.open(folder).edited() == Package.open(folder).missing() == ()
    (folder / "stage_1.py").write_text("# mine\n")
    (folder / "__init__.py").unlink()
    (folder / "stage-1.safetensors").unlink()
    assert Package.open(folder).edited() == ("stage_1.py",)
    assert Package.open(folder).missing() == ("__init__.py", "stage-1.safetensors")


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "stage-1.safetensors").unlink()
    package = Package.open(folder)
    package.load_stage(0)
    with refused(PackageError, "stage-1.safetensors is missing", "stage 1 ", advice="restore"):
        package.load_stage(1)


def test_the_shard_of_a_tied_weight_is_needed_too(tmp_path: Path) -> None:
    folder = write(tied(), tmp_path / "tied")
    (folder / "stage-0.safetensors").unlink()
    with refused(PackageError, "stage-0.safetensors is missing", "stage 2 ", advice="restore"):
        Package.open(folder).load_stage(2)


def test_a_weight_that_the_index_lacks_is_named(folder: Path) -> None:
    index = json.loads((folder / WEIGHTS_INDEX).read_text())
    del index["weight_map"]["layer1.weight"]
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index))
    with refused(PackageError, WEIGHTS_INDEX, "layer1.weight", "stage 1", advice="restore"):
        Package.open(folder).load_stage(1)


@pytest.mark.parametrize(("text", "problem"), [("{", "not JSON"), ("[]", "a list"), ("{}", "weight_map")])
def test_a_damaged_index_is_refused(text: str, problem: str, folder: Path) -> None:
    (folder / WEIGHTS_INDEX).write_text(text)
    with refused(PackageError, WEIGHTS_INDEX, problem, advice="restore"):
        Package.open(folder).load_stage(0)


def test_a_damaged_shard_names_the_stage(folder: Path) -> None:
    (folder / "stage-1.safetensors").write_bytes(b"not safetensors")
    with refused(PackageError, "stage 1 ", "stage_1.py", "stage-1.safetensors", "SafetensorError", advice="restore"):
        Package.open(folder).load_stage(1)


def test_a_source_with_a_mistake_is_named(folder: Path) -> None:
    (folder / "stage_0.py").write_text("def forward(:\n")
    with refused(PackageError, "stage_0.py:1: SyntaxError", advice="pipegraph show"):
        Package.open(folder).load_stage(0)


@pytest.mark.parametrize(
    ("statement", "error"), [("1 / 0", "ZeroDivisionError"), ("raise SystemExit", ": SystemExit: ")]
)
def test_a_source_that_fails_or_ends_the_process_is_named_with_its_line(
    statement: str, error: str, folder: Path
) -> None:
    (folder / "stage_0.py").write_text(f"x = 1\n{statement}\n")
    with refused(PackageError, f"stage_0.py:2: {statement}", error, advice="pipegraph show"):
        Package.open(folder).load_stage(0)


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        ("None", ["load_stage", "NoneType"]),
        ("torch.nn.Linear(2, 2, device='meta')", ["weight has no value"]),
    ],
)
def test_what_a_changed_load_stage_returns_is_checked(returned: str, parts: list[str], folder: Path) -> None:
    source = "import torch\ndef load_stage(index, device, weights): return "
    (folder / "__init__.py").write_text(source + returned)
    with refused(PackageError, "stage 0 ", "stage_0.py", *parts, advice="restore"):
        Package.open(folder).load_stage(0)


def test_without_weights(tmp_path: Path) -> None:
    package = Package.open(write(chain(2), tmp_path / "out", weights=False))
    assert not package.has_weights
    package.load_stage(1, weights=False)
    with refused(PackageError, WEIGHTS_INDEX, "layer1.weight", "stage 1", advice="restore"):
        package.load_stage(1)
