"""A model that would not fit this machine is split without its weights."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.cli.command import program

SPLIT = """
import json, resource, sys
from pipegraph.cli import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), file=sys.stderr)
"""


def test_an_8b_llama_is_split_without_weights(tmp_path: Path) -> None:
    out = tmp_path / "llama"
    arguments = ["split", "hf:tests/models/llama_8b", "--seq", 4096, "--stages", 4, "--no-weights", "-o", out]
    start = time.monotonic()
    done = program("-c", SPLIT, *arguments)
    seconds = time.monotonic() - start
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "stage 0: model.embed_tokens, model.layers.0 – model.layers.7"
    lines = sum(len(file.read_text().splitlines()) for file in out.glob("*.py"))
    assert lines < 500  # 32 layers are one class
    kibibytes = json.loads(done.err.splitlines()[-1])
    assert kibibytes < 2 * 2**20  # its 16 GB of parameters are never made
    # 10 s alone on two cores; the suite runs two tests at a time on machines that others use too.
    assert seconds < 60
