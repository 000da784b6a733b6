"""How Sphinx builds these pages. `make docs` runs it; the result is in build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "extensions"), str(DOCS.parent)]

import pipegraph  # noqa: E402

project = "pipegraph"
author = "The pipegraph authors"
project_copyright = "the pipegraph authors, BSD-3-Clause"
release = version = pipegraph.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docstrings", "command_line", "offline"]
exclude_patterns = ["extensions"]
needs_sphinx = "8.0"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# The API page shows the docstrings of the public names, in the order of the source.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
default_role = "code"
highlight_language = "text"
smartquotes = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# A build needs no network, so types of other libraries link nowhere, nor do our own that the page does not list.
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "pydata_sphinx_theme"
html_title = "pipegraph"
html_static_path = ["static"]
html_css_files = ["pipegraph.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "pipegraph"},
    "navbar_align": "left",
    "header_links_before_dropdown": 9,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {"**": []}
