"""Python source: literals, expressions and line breaks.

In: values and parts of expressions. Out: text as a formatter would leave it. A new kind of literal or expression goes
here; which operation is written with it is decided in ``expressions``.
"""
