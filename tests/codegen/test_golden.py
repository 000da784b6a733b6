"""The packages of six models, file by file as they are to look. Renewed by ``pytest tests/codegen --renew-golden``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pipegraph
from pipegraph.codegen.package_files import generate
from pipegraph.graph.sources import load
from tests.captures import captured
from tests.codegen.parity import ROOT, untidy
from tests.slow import cases
from tests.torch_version import is_tested_version

GOLDEN = Path(__file__).parent / "golden"
WEIGHTS = GOLDEN / "weights.py"
MODELS = {
    "transformer": ("examples/transformer.py", "layers.4"),
    "unet": ("examples/unet.py", "down.2,up.1"),
    "llama": ("hf:examples/llama", "model.layers.2,model.layers.5"),
    "t5": ("tests/models/t5.py", "t5.encoder.block.2,t5.decoder.block.1"),
    "vision_transformer": ("tests/models/vision_transformer.py", "blocks.2,blocks.3.mlp"),
    "mixture_of_experts": ("tests/models/mixture_of_experts.py", "layers.1,layers.3"),
}
GENERATE = """
from pipegraph.codegen.package_files import generate
from tests.codegen.parity import plan_of
from pipegraph.graph.sources import load

for file, points in (("examples/unet.py", "down.2,up.1"), ("tests/models/hostile_names.py", "layers.{{ x }},head")):
    source = load(file)
    package = generate(plan_of(source.model, source.args, cut=points))
    files, manifest = package.files, package.manifest
    print(files, manifest.to_json())
"""


def generated(name: str) -> dict[str, str]:
    """The files of a package by name; the weights are not built."""
    model, points = MODELS[name]
    path = f"hf:{ROOT / model[3:]}" if model.startswith("hf:") else str(ROOT / model)
    plan = pipegraph.plan(captured(model), points=points.split(","))
    package = generate(plan, weights=False, source=load(path, weights=False))
    files, manifest = package.files, package.manifest
    return {**files, "pipeline.json": manifest.to_json()}


def golden_package(name: str) -> dict[str, Path]:
    """The golden files of a package by name. Most packages have the same `weights.py`, which is stored once."""
    return {"weights.py": WEIGHTS} | {path.name: path for path in (GOLDEN / name).iterdir()}


@pytest.mark.parametrize("name", cases(list(MODELS), slow=["t5", "vision_transformer"]))
def test_package_is_as_it_was(name: str, pytestconfig: pytest.Config) -> None:
    files = generated(name)
    folder = GOLDEN / name
    if pytestconfig.getoption("renew_golden", default=False):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for file, text in files.items():
            if not (file == "weights.py" and text == WEIGHTS.read_text(encoding="utf-8")):
                (folder / file).write_text(text, encoding="utf-8")
    golden_files = golden_package(name)
    assert sorted(golden_files) == sorted(files)
    for file, text in files.items():
        golden = golden_files[file].read_text(encoding="utf-8")
        if file == "pipeline.json" and not is_tested_version():  # torch says what it takes for granted in other words
            text, golden = (json.dumps(json.loads(manifest) | {"conditions": []}) for manifest in (text, golden))
        assert text == golden, f"{name}/{file}"


@pytest.mark.parametrize("name", MODELS)
def test_package_is_tidy(name: str, tmp_path: Path) -> None:
    for file, path in golden_package(name).items():
        (tmp_path / file).write_bytes(path.read_bytes())
    assert untidy(tmp_path) == []


@pytest.mark.slow
def test_source_does_not_depend_on_the_order_of_hashes() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", GENERATE],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in running)
    assert "class Stage2" in first
    assert first == second
