"""A model that would not fit this machine is split without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import program
from tests.speed import loop_seconds

# The kernel's own high-water mark of this program; getrusage would count the test's process, which started it.
SPLIT = """
import sys
import time
from pathlib import Path
from pipegraph.cli import main
try:
    main(sys.argv[1:])
finally:
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], time.process_time(), file=sys.stderr)
"""


@pytest.mark.slow
def test_an_8b_llama_is_split_without_weights(tmp_path: Path) -> None:
    out = tmp_path / "llama"
    arguments = ["split", "hf:tests/models/llama_8b", "--seq", 4096, "--stages", 4, "--no-weights", "-o", out]
    done = program("-c", SPLIT, *arguments)
    assert done.code == 0, done.err
    assert done.out.startswith("stage 0: model.embed_tokens, model.layers.0 – model.layers.7")
    files = [out / "blocks.py", *out.glob("stage_*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) < 500  # 32 layers are one class
    kibibytes, seconds = map(float, done.err.splitlines()[-1].split())
    assert kibibytes < 2 * 2**20  # its 16 GB of parameters are never made
    assert seconds < 400 * loop_seconds()  # a third of it on an idle machine
