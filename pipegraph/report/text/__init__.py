"""Tables and lines for a terminal, Markdown and the cells of pages; and the same as data for ``--json``."""
