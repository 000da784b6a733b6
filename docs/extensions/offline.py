"""A check of the built pages: they load nothing from elsewhere, so that they can be read without a network."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}


class Loads(HTMLParser):
    """The addresses that a page loads when it is opened; those that it links to are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attributes if (tag, name) in LOADED and value]


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of every page that loads something from elsewhere; `make docs` makes an error of it."""
    if exception is not None:
        return
    for page in Path(app.outdir).rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        for address in loads.addresses:
            if address.startswith(("http:", "https:", "//")):
                logging.getLogger(__name__).warning("%s loads %s", page.name, address)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
