"""Python source as data: expressions, statements, classes, and the line breaks of their text.

In: values and parts of expressions. Out: text as a formatter would leave it. A new kind of literal or expression goes
here. The folder ``expressions`` decides which operation is written with it.
"""
