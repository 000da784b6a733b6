"""Names and docstrings, taken from the model and its source and made safe.

In: names, nodes of a captured graph, and the source lines that made them. Out: identifiers, names of arguments and
values, docstrings. A new source of names goes into ``source_statements`` (what the source says) or ``model_names``
(which of it is used); a new rule for what Python allows into ``identifiers``.
"""
