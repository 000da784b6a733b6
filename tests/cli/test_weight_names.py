"""``--rename`` and ``--rows`` of ``--weights``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import CHAIN, Command, fails
from tests.models.chain import build_model

RENAME = ("--rename", r"^module\.=")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The weights of the model under other names; its head has further rows."""
    state = {f"module.{name}": tensor for name, tensor in build_model().state_dict().items()}
    for name in ("module.head.weight", "module.head.bias"):
        state[name] = torch.cat([state[name], torch.ones_like(state[name])])
    (tmp_path / "saved").mkdir()
    save_file(state, tmp_path / "saved" / "model.safetensors")
    return tmp_path / "saved"


def test_weights_under_other_names(chain: Path, folder: Path, tmp_path: Path, pipegraph: Command) -> None:
    rows = ("--rows", "head.weight=2", "--rows", "head.bias=2")
    verified = pipegraph("verify", chain, CHAIN, "--weights", folder, *RENAME, *rows)
    assert verified.code == 0, verified.err
    split = pipegraph(
        "split", CHAIN, "--points", "layers.2", "-o", tmp_path / "out", "--weights", folder, *RENAME, *rows
    )
    assert split.code == 0, split.err
    verified = pipegraph("verify", tmp_path / "out", CHAIN)
    assert verified.code == 0, verified.err


def test_wrong_options(chain: Path, folder: Path, pipegraph: Command) -> None:
    run = ("run", chain, "--nproc", 1, "--steps", 1, "--kernels", "eager")
    fails(pipegraph(*run, "--weights", folder), 2, "'module.'", "--rename")
    fails(pipegraph(*run, "--weights", folder, *RENAME), 2, "head.weight", "[4, 8]", "rows=")
    fails(pipegraph(*run, "--weights", folder, "--rename", "module"), 2, "--rename", "'module'")
    fails(pipegraph(*run, "--weights", folder, "--rename", "("), 2, "--rename", "'('")
    fails(pipegraph(*run, "--weights", folder, *RENAME, "--rows", "head.weight=two"), 2, "--rows", "'two'")
    fails(pipegraph(*run, "--rows", "head.weight=2"), 2, "--weights")
