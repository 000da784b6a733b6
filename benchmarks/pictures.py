"""The pictures of the pages, drawn again: ``python -m benchmarks.pictures``.

It plans the example transformer for zb-v with times measured here, runs it on two processes, and has Chromium
photograph the report of the run. It takes some minutes of an idle machine; the guide explains each picture next to
it. Those of TensorBoard are photographed by hand: its time series draw themselves only in a window, with
``^bubble$|^time/step$|timeline`` as filter and the settings closed, and the plugin's view loads its scripts from the
web.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

IMAGES = Path("docs/images")
BUILD = Path("build/pictures")
MODEL = "examples/transformer.py"
PLAN = ["--stages", "4", "--ranks", "2", "--schedule", "zb-v", "--microbatches", "8", "--balance", "measured"]


def pipegraph(*arguments: str | Path) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", "pipegraph", *map(str, arguments)]
    print("pipegraph", *arguments[:2], flush=True)
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def photograph(address: str, file: Path, width: int, height: int) -> None:
    """Write what Chromium shows of a page."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("error: Chromium is not installed.\nTry: apt install chromium")
    with TemporaryDirectory() as profile:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        switches += [f"--window-size={width},{height}", "--virtual-time-budget=3000", f"--screenshot={file}"]
        subprocess.run([chromium, *switches, address], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Draw all of them."""
    shutil.rmtree(BUILD, ignore_errors=True)
    pipegraph("split", MODEL, *PLAN, "-o", BUILD / "package")
    pipegraph("show", BUILD / "package", "--svg", IMAGES / "package.svg")
    pipegraph("run", BUILD / "package", "--steps", "4", "--profile", BUILD / "runs")
    print(pipegraph("trace", "report", BUILD / "runs", "--html", BUILD / "report.html"))
    photograph((BUILD / "report.html").absolute().as_uri(), IMAGES / "report.png", 1280, 1000)


if __name__ == "__main__":
    main()
