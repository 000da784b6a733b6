"""What the proof of the batch takes, next to the whole capture: `python -m benchmarks.batch_proof [LAYERS …]`.

Llama 3.1 with 405 B parameters is captured with these numbers of layers, by default 32 and 126, without memory for its
parameters. Printed are the seconds of the capture, those of the roles and of the proof in it, their share, and the
operations of the graph.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.planner_scale import LLAMA_405B
from pipegraph.graph import capture as capturing
from pipegraph.graph.sources import load


def timed(seconds: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds the seconds of each call to an entry."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    return call


def main() -> None:
    """Print a line for each number of layers."""
    warnings.simplefilter("ignore")
    assign, report = capturing._with_roles, capturing.report_rows
    for layers in map(int, sys.argv[1:] or (32, 126)):
        seconds: dict[str, float] = {}
        capturing._with_roles = timed(seconds, "roles", assign)
        capturing.report_rows = timed(seconds, "proof", report)
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            config.write_text(json.dumps(LLAMA_405B | {"num_hidden_layers": layers}))
            source = load(f"hf:{config}", weights=False, batch=1, seq=4096, attention_mask=True)
        begin = time.perf_counter()
        captured = capturing.capture_source(source)
        total = time.perf_counter() - begin
        share = 100 * sum(seconds.values()) / total
        print(
            f"{layers} layers: capture {total:.1f} s, roles {seconds['roles']:.2f} s, proof {seconds['proof']:.2f} s, "
            f"{share:.1f} % of it; {len(captured.nodes)} operations, {captured.batch.proof}"
        )


if __name__ == "__main__":
    main()
