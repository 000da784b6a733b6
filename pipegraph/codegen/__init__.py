"""A plan becomes a package: Python source, a manifest and weights.

In: a :class:`~pipegraph.planner.plan.Plan`. Out: the files of a package by name, or a folder with them.

``package_files`` builds the text and the manifest. ``package_writer`` and ``weights`` write them, or compare them with
a folder. The folders build the text, each from the ones after it: ``classes``, ``forward``, ``expressions``,
``syntax``, ``names``. ``codegen_templates`` holds the Jinja templates of whole files.
"""
