"""The pictures of the pages, drawn anew: ``python -m benchmarks.pictures``.

It plans the example transformer for zb-v with times measured here, runs it on two processes, runs 1f1b as well, and has
Chromium photograph what the report and TensorBoard show. It takes some minutes of an idle machine. Not drawn is
``trace_view.png``: that view loads its scripts from the web.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from tests.tensorboard_server import tensorboard

IMAGES = Path("docs/images")
BUILD = Path("build/pictures")
MODEL = "examples/transformer.py"
SPLITS = {
    "zb-v": ["--stages", "4", "--ranks", "2", "--schedule", "zb-v", "--microbatches", "8", "--balance", "measured"],
    "1f1b": ["--points", "layers.4"],
}
TAGS = r"^bubble$|^loss$|timeline/measured"


def pipegraph(*arguments: str | Path) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", "pipegraph", *map(str, arguments)]
    print("pipegraph", *arguments[:2], flush=True)
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def photograph(address: str, file: Path, width: int, height: int, patience: int = 3000) -> None:
    """Write what Chromium shows of a page, after so many milliseconds of its time."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("error: Chromium is not installed.\nTry: apt install chromium")
    with TemporaryDirectory() as profile:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        switches += [f"--window-size={width},{height}", f"--virtual-time-budget={patience}", f"--screenshot={file}"]
        subprocess.run([chromium, *switches, address], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Draw all of them."""
    shutil.rmtree(BUILD, ignore_errors=True)
    for schedule, cuts in SPLITS.items():
        package = BUILD / schedule
        pipegraph("split", MODEL, *cuts, "-o", package)
        if schedule == "zb-v":
            pipegraph("show", package, "--svg", IMAGES / "package.svg")
        size = ["--microbatches", "8", "--steps", "4"]
        pipegraph("run", package, "--schedule", schedule, *size, "--profile", BUILD / "runs")
        if schedule == "zb-v":
            print(pipegraph("trace", "report", BUILD / "runs", "--html", BUILD / "report.html"))
    photograph((BUILD / "report.html").absolute().as_uri(), IMAGES / "report.png", 1280, 1000)
    with tensorboard(BUILD / "runs", BUILD / "log", "--load_fast", "false") as address:
        photograph(f"{address}?tagFilter={quote(TAGS)}#timeseries", IMAGES / "tensorboard.png", 1280, 980, 30_000)


if __name__ == "__main__":
    main()
