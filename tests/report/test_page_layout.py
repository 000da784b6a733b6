"""The pages in a real browser, as narrow as a telephone and as wide as a desk, light and dark, with 1 stage and 64."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipegraph.report.html_pages import package_page, trace_page
from pipegraph.schedule import build
from tests.report.browser import needs_chromium, opened
from tests.report.test_package_picture import PRICED, package
from tests.report.test_trace_page import analysed

WIDTHS = (390, 700, 1280)
LONG = "a_module_with_a_long_name_" * 4

# Says of a page what reaches beyond it, which texts are hard to read, and whether a tooltip stays inside.
PROBE = """
<script>
setTimeout(() => {
  const wide = document.documentElement.clientWidth, all = [...document.body.querySelectorAll("*")];
  const isSeen = (each) => each.getClientRects().length && !each.closest(".unseen, .scroll *, noscript");
  const name = (each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 40)}`;
  const beyond = all.filter((each) => isSeen(each) && each.getBoundingClientRect().right > wide + 1);
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (text) => channels(text).slice(0, 3).map((part) => part / 255).map(
    (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  ).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (each) => {
    for (; each; each = each.parentElement) {
      const fill = getComputedStyle(each).backgroundColor;
      if ((channels(fill)[3] ?? 1) === 1) return fill;
    }
    return "rgb(255, 255, 255)";
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const has = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const faint = all.filter((each) => !each.closest("script, noscript") && each.getClientRects().length && has(each) &&
    contrast(getComputedStyle(each).color, ground(each)) < 4.5);
  const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
  const tips = [];
  for (let x = 0; x < box.width; x += 5) {
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.x + x, clientY: box.y + 30 }));
    const tip = document.getElementById("tip"), place = tip.getBoundingClientRect();
    if (!tip.hidden) tips.push(place.left >= 0 && place.right <= wide + 1);
  }
  const found = {
    width: innerWidth, theme: matchMedia("(prefers-color-scheme: dark)").matches,
    scrolls: document.documentElement.scrollWidth - wide,
    beyond: beyond.map(name), faint: faint.map(name), tips: tips.length, lost: tips.filter((inside) => !inside).length,
  };
  parent.postMessage(JSON.stringify(found), "*");
}, 300);
</script>
"""
FRAMES = """<script>
const found = [];
addEventListener("message", (event) => {
  found.push(JSON.parse(event.data));
  if (found.length === document.querySelectorAll("iframe").length) document.body.dataset.found = JSON.stringify(found);
});
</script>"""


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that shows every page in every width."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "run": trace_page(analysed(folder, "zb-v", 2, 4)),
        "one": package_page(package(1, PRICED, name=LONG), build("1f1b", 1, 4)),
        "many": package_page(
            package(64, PRICED, skips=((0, 63), (3, 9)), name=LONG), build("interleaved-1f1b", 32, 32)
        ),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    embeds = (f'<iframe src="{name}.html" width="{width}" height="900"></iframe>' for name in pages for width in WIDTHS)
    (folder / "frames.html").write_text(f"<!doctype html><body>{FRAMES}{''.join(embeds)}")
    return folder / "frames.html"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_and_can_be_read(dark: bool, frames: Path) -> None:
    page = opened(frames, 1400, until=' data-found="', dark=dark)
    assert page.console == ()
    (attribute,) = re.findall(r'data-found="([^"]*)"', page.dom)
    findings: list[dict[str, Any]] = json.loads(html.unescape(attribute))
    assert sorted(finding["width"] for finding in findings) == sorted(3 * WIDTHS)
    for finding in findings:
        assert finding["theme"] == dark
        assert (finding["scrolls"], finding["beyond"], finding["faint"]) == (0, [], []), finding["width"]
        assert finding["tips"] > 5 and finding["lost"] == 0
