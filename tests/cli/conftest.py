"""The command line called as a function, and a package to call it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.cli import main
from tests.cli.command import ROOT, Command, Result
from tests.equal_work import equal_work_shared, shared_work

__all__ = ["shared_work"]


@pytest.fixture
def pipegraph(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``pipegraph("split", model, …)``: `main` in this process, from the project's folder."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of ``tests/models/chain.py`` in two stages. Tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("chain") / "package"
    with equal_work_shared(), pytest.raises(SystemExit) as ended:
        main(["split", str(ROOT / "tests/models/chain.py"), "--points", "layers.2", "-o", str(folder)])
    assert ended.value.code == 0
    return folder
