"""The statements of one ``forward``.

In: a ``Scope``, the operations and module calls of a class in order. Out: statements, with loops rolled and the names
of the model's source. A new kind of statement starts as an item in ``items``; ``body`` writes it.
"""
