"""The statements of one ``forward``.

In: ``ClassContents``, the operations and module calls of a class in order. Out: statements, with loops rolled and the
names of the model's source. A new kind of statement needs an item in ``items`` and a method in ``writer``.
"""
