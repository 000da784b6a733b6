"""A page in headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)")


@dataclass(frozen=True)
class Opened:
    """The document as it stands after its scripts have run, and what they said on the console."""

    dom: str
    console: tuple[str, ...]


def opened(
    file: Path,
    width: int = 1200,
    height: int = 900,
    profile: Path | None = None,
    until: str = "",
    tries: int = 3,
    fragment: str = "",
    dark: bool = False,
) -> Opened:
    """Open a file, without a network, and wait until nothing is to be done any more.

    On a busy machine Chromium may end before it has drawn a frame: it is asked again where the document lacks `until`.
    """
    assert CHROMIUM is not None
    home = profile or file.parent / "chromium"
    switches = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={home}",
        f"--window-size={width},{height}",
        "--run-all-compositor-stages-before-draw",
        "--virtual-time-budget=4000",
        "--dump-dom",
        f"--blink-settings=preferredColorScheme={int(not dark)}",
    ]
    address = f"{file.as_uri()}#{fragment}" if fragment else file.as_uri()
    done = subprocess.run([CHROMIUM, *switches, address], capture_output=True, text=True, timeout=90, check=False)
    page = Opened(done.stdout, tuple(re.findall(r"CONSOLE[^\n]*", done.stderr)))
    if until in page.dom or tries == 1:
        return page
    return opened(file, width, height, profile, until, tries - 1, fragment, dark)
