"""Names and docstrings, taken from the model and its source and made safe.

In: names, nodes of a captured graph, and the source lines that made them. Out: identifiers, names of arguments and
values, docstrings. ``source_statements`` finds the names that the model's source has, ``model_names`` chooses among
them, ``identifiers`` makes them valid Python.
"""
