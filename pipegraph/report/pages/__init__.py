"""HTML pages that need nothing else; their templates, styles and scripts."""
