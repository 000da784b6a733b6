"""Operations, modules of torch and the tree of modules as the expressions that a person would write.

In: a node of a captured graph, a call of a module, or the modules of a class. Out: expressions and constructors. To
spell another operator, fill the column ``spelling`` of its row in ``graph/operators.py``; a spelling that is new needs
a function in ``operator_spellings``.
"""
