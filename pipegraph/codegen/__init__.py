"""A plan becomes a package: Python source, a manifest and weights.

In: a :class:`~pipegraph.planner.plan.Plan`. Out: the files of a package by name, or a folder with them.

``package_files`` makes the text, ``package_writer`` and ``shards`` write it, ``package_check`` compares. The folders
below build the text, the first from the last: ``classes``, ``forward``, ``expressions``, ``syntax``, ``names``.
``codegen_templates`` holds the Jinja templates of whole files.
"""
