"""Bad input: an exit code, a message that helps, no traceback, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipegraph.codegen import package_writer
from tests.cli.command import CHAIN, ROOT, Command, fails

MODEL = """
import torch
from torch import nn

{body}
"""


# A model that cannot be loaded


def test_missing_file_names_the_nearest(pipegraph: Command, tmp_path: Path) -> None:
    result = pipegraph("split", "tests/models/chains.py", "--stages", 2, "-o", tmp_path / "out")
    fails(result, 2, "No model file tests/models/chains.py", 'Did you mean "tests/models/chain.py"?')


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("example_inputs = (torch.ones(1),)", "defines neither build_model() nor model"),
        ("model = nn.Linear(1, 1)", "defines no example_inputs"),
        ("def build_model(): return 3\nexample_inputs = (torch.ones(1),)", "build_model gives int"),
        ("model = nn.Linear(1, 1)\nexample_inputs = 3", "example_inputs is a int"),
        ("def build_model(:", "SyntaxError"),
        ("raise SystemExit", ":5: importing it raised SystemExit"),
        ("def build_model(): raise SystemExit\nexample_inputs = ()", "raised SystemExit"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("def build_model(): raise ValueError('out of bricks')\nexample_inputs = ()", "out of bricks"),
    ],
)
def test_model_file_without_what_it_needs(pipegraph: Command, tmp_path: Path, body: str, said: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(body=body))
    fails(pipegraph("split", file, "--stages", 2, "-o", tmp_path / "out"), 2, str(file), said)
    assert not (tmp_path / "out").exists()


def test_unknown_name_in_a_model_file(pipegraph: Command, tmp_path: Path) -> None:
    result = pipegraph("split", "examples/transformer.py:build_tiny", "--stages", 2, "-o", tmp_path / "out")
    fails(result, 2, "has no build_tiny", 'Did you mean "build_tiny_model"?')


def test_missing_configuration(pipegraph: Command, tmp_path: Path) -> None:
    fails(pipegraph("split", f"hf:{tmp_path}/none.json", "--stages", 2, "-o", tmp_path / "out"), 2, "none.json")


def test_configuration_of_a_model_of_sound(pipegraph: Command, tmp_path: Path) -> None:
    config = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    config |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", **config}))
    result = pipegraph("split", f"hf:{tmp_path}", "--stages", 2, "-o", tmp_path / "out")
    fails(result, 2, "takes input_features; hf: makes token ids and pixels", "example_inputs")


def test_a_size_that_the_model_fixes(pipegraph: Command, tmp_path: Path) -> None:
    fails(pipegraph("split", CHAIN, "--stages", 2, "--seq", 4, "-o", tmp_path / "out"), 3, "--seq 4")


def test_control_flow_on_data_names_the_line(pipegraph: Command, tmp_path: Path) -> None:
    file = Path("tests/models/data_dependent.py")  # from the folder in which the command is typed
    line = next(number for number, text in enumerate((ROOT / file).read_text().splitlines(), 1) if "if x.sum()" in text)
    result = pipegraph("split", file, "--stages", 2, "-o", tmp_path / "out")
    fails(result, 3, f" {file}:{line}: if x.sum() > 0")
    assert list(tmp_path.iterdir()) == []


# A model that cannot be split as asked


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ("layer.2", 'Did you mean "layers.2"?'),
        ("layers.7", "the model has no module layers.7"),
        ("layers.3,layers.1", "lies before layers.3"),
        ("layers.2,layers.2", "was given twice"),
        ("layers.1:end,layers.2", "is the same cut as"),
        ("layers.0", "cuts nothing"),
        ("head:end", "cuts nothing"),
        ("layers.2,", "the name of a module is missing"),
        ("layers.2:edn", 'after a colon comes "end"'),
        ("|", "has no layer"),
    ],
)
def test_points_that_do_not_cut(pipegraph: Command, tmp_path: Path, points: str, said: str) -> None:
    fails(pipegraph("split", CHAIN, "--points", points, "-o", tmp_path / "out"), 3, said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [("--points", "layers.2", "--stages", 2), (), ("--points", "")])
def test_either_points_or_stages(pipegraph: Command, tmp_path: Path, options: tuple[object, ...]) -> None:
    result = pipegraph("split", CHAIN, *options, "-o", tmp_path / "out")
    fails(result, 2, "--points layers.4 (modules that start a stage), or --stages 2, and not both")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("out", "options", "said"),
    [
        ("README.md/out", (), ("cannot be written", "-o with another folder")),
        ("tests", ("--overwrite",), ("holds files that pipegraph did not write", "-o with a new folder")),
        ("tests", ("--check",), ("tests holds no package to check",)),
    ],
)
def test_a_bad_folder_is_refused_before_any_work(
    pipegraph: Command, out: str, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    result = pipegraph("split", "absent.py", "--stages", 2, "-o", out, *options)
    fails(result, 2, *said)


def test_a_damaged_package_can_be_replaced(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(chain, tmp_path / "damaged"))
    (damaged / "pipeline.json").write_text("{")
    again = ["split", CHAIN, "--points", "layers.2", "-o", damaged]
    fails(pipegraph(*again), 2, "already holds a damaged package", "--overwrite")
    assert pipegraph(*again, "--overwrite").code == 0
    assert pipegraph("verify", damaged, CHAIN).code == 0


def test_a_lost_index_of_weights(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(chain, tmp_path / "damaged"))
    (damaged / "model.safetensors.index.json").unlink()
    fails(pipegraph("run", damaged, "--nproc", 1), 2, "model.safetensors.index.json is missing")


def test_more_stages_than_segments(pipegraph: Command, tmp_path: Path) -> None:
    fails(pipegraph("split", CHAIN, "--stages", 9, "-o", tmp_path / "out"), 3, "5 segments", "9 stages")
    assert list(tmp_path.iterdir()) == []


# A folder that must not be written to


def test_folder_with_other_files_is_never_touched(pipegraph: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for flags in ([], ["--overwrite"]):
        fails(pipegraph("split", CHAIN, "--stages", 2, "-o", out, *flags), 2, str(out))
        assert [path.name for path in tmp_path.rglob("*")] == ["out", "thesis.tex"]


@pytest.mark.parametrize(("out", "said"), [("/", "did not write"), ("/dev/null", "is a file")])
def test_what_no_package_replaces_is_refused_before_any_work(pipegraph: Command, out: str, said: str) -> None:
    fails(pipegraph("split", "no such model.py", "--stages", 2, "-o", out), 2, out, said)


def test_other_files_in_a_package_are_never_touched(pipegraph: Command, tmp_path: Path, copied: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    contents_before = _contents(copied)
    fails(pipegraph("split", CHAIN, "--stages", 3, "-o", copied, "--overwrite"), 2, "notes.txt")
    assert _contents(copied) == contents_before


def test_a_full_disk_leaves_the_package_before(
    pipegraph: Command, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(package_writer, "write_weights", full)
    contents_before = _contents(copied)
    result = pipegraph("split", CHAIN, "--stages", 3, "-o", copied, "--overwrite")
    fails(result, 2, "No space left on device. The disk of ", "free of")
    assert _contents(copied) == contents_before
    assert [path.name for path in copied.parent.iterdir()] == [copied.name]


def test_a_path_through_a_folder_that_does_not_exist(
    pipegraph: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell's own commands find nothing there; what is written has to be what is read."""
    out = tmp_path / "absent/../out"
    done = pipegraph("split", CHAIN, "--points", "layers.2", "-o", out)
    assert (done.code, done.out.splitlines()[-1]) == (0, f"wrote {tmp_path / 'out'}")
    assert pipegraph("show", out).code == 0
    fails(pipegraph("split", CHAIN, "--points", "layers.2", "-o", out), 2, "already holds a package", "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_edited_stage_is_kept_without_overwrite(pipegraph: Command, tmp_path: Path, copied: Path) -> None:
    with (copied / "stage_0.py").open("a") as file:
        file.write("# a careful change\n")
    contents_before = _contents(copied)
    fails(pipegraph("split", CHAIN, "--stages", 3, "-o", copied), 2, "stage_0.py", "--overwrite")
    assert _contents(copied) == contents_before
    assert pipegraph("split", CHAIN, "--stages", 3, "-o", copied, "--overwrite").code == 0
    assert (copied / "stage_2.py").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


# A package that is damaged


def _truncate(folder: Path) -> None:
    manifest = folder / "pipeline.json"
    manifest.write_text(manifest.read_text()[:200])


def _from_the_future(folder: Path) -> None:
    manifest = folder / "pipeline.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}))


def _no_manifest(folder: Path) -> None:
    (folder / "pipeline.json").unlink()


@pytest.mark.parametrize("verb", ["show", "run", "verify"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [(_truncate, "truncated"), (_from_the_future, "schema_version: it is 99"), (_no_manifest, "No such file")],
)
def test_damaged_manifest(
    pipegraph: Command, copied: Path, verb: str, damage: Callable[[Path], None], said: str
) -> None:
    damage(copied)
    fails(pipegraph(verb, copied, *([CHAIN] if verb == "verify" else [])), 2, "pipeline.json", said)


def _remove_shard(folder: Path) -> None:
    (folder / "stage-00001-of-00002.safetensors").unlink()


def _reshape_shard(folder: Path) -> None:
    shard = folder / "stage-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"head.weight": torch.zeros(3, 3)}, shard)


def _cut_shard(folder: Path) -> None:
    shard = folder / "stage-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:40])


def _flip_bit(folder: Path) -> None:
    shard = folder / "stage-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "nproc"),
    [(_remove_shard, 1), (_reshape_shard, 1), (_cut_shard, 1), pytest.param(_reshape_shard, 2, marks=pytest.mark.slow)],
)
def test_damaged_shard(pipegraph: Command, copied: Path, damage: Callable[[Path], None], nproc: int) -> None:
    damage(copied)
    fails(pipegraph("run", copied, "--nproc", nproc, "--no-check-weights"), 2, "stage")


def test_a_flipped_bit_is_named(pipegraph: Command, copied: Path) -> None:
    _flip_bit(copied)
    damaged = "stage-00001-of-00002.safetensors"
    for verb, *args in (("run", "--nproc", 1), ("verify", CHAIN)):
        fails(pipegraph(verb, copied, *args), 2, f"{damaged} is damaged", "Try: restore the file", "--no-check-weights")
    for flags in ((), ("--json",)):
        result = pipegraph("show", copied, *flags)
        assert result.code == 2 and f"{damaged} is damaged, or changed" in result.err and "Try: " in result.err
        assert damaged in result.out, "what can be shown is shown"
    unchecked = pipegraph("show", copied, "--no-check-weights")
    assert unchecked.code == 0 and "damaged" not in unchecked.out


@pytest.mark.slow
def test_every_rank_takes_changed_weights_when_asked(pipegraph: Command, copied: Path) -> None:
    _flip_bit(copied)
    assert pipegraph("run", copied, "--kernels", "autograd", "--no-check-weights").code == 0


def test_an_empty_index_is_no_random_start(pipegraph: Command, copied: Path) -> None:
    (copied / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    for verb, *args in (("run", "--nproc", 1), ("verify", CHAIN), ("show",)):
        fails(pipegraph(verb, copied, *args), 2, "weight_map: it has no tensor of stage-00000-of-00002.safetensors")


# A run that cannot be


def test_wrong_number_of_processes(pipegraph: Command, chain: Path) -> None:
    fails(pipegraph("run", chain, "--nproc", 3), 2, "3 processes cannot run 2 stages", "2 processes", "--nproc 2")


def test_unknown_schedule(pipegraph: Command, chain: Path) -> None:
    for verb in ("run", "show"):
        fails(pipegraph(verb, chain, "--schedule", "1f1c"), 2, 'Did you mean "1f1b"?')


def test_batch_of_another_width_than_the_plan(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        MODEL.format(body="from tests.models.chain import build_model\nexample_inputs = (torch.ones(3, 9),)")
    )
    fails(
        pipegraph("run", chain, "--nproc", 1, "--model", file),
        2,
        "x has the shape [6, 9]",
        "captured microbatch is [batch, 8]",
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs enough")
def test_more_processes_than_gpus(pipegraph: Command, chain: Path) -> None:
    result = pipegraph("run", chain, "--device", "cuda")
    fails(result, 2, "2 processes need a GPU each", "Try: --device cpu")


def test_debug_shows_the_traceback(pipegraph: Command, tmp_path: Path) -> None:
    result = pipegraph("show", tmp_path / "none", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err
    assert "There is no package" in result.err


@pytest.fixture
def copied(chain: Path, tmp_path: Path) -> Path:
    """A package to be damaged."""
    return Path(shutil.copytree(chain, tmp_path / "package"))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
