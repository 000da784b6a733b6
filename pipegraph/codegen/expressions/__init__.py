"""Operations and calls of torch's own modules as the expressions that a person would write.

In: a node of a captured graph, or a call of a module. Out: an expression, or the constructor of the module. The
spelling of another operator is one line of the table in ``operator_spellings``.
"""
