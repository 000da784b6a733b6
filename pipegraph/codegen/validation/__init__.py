"""Translation validation: the written stages are run on fake tensors and compared with the captured graph.

In: a plan and the stages of its package. Out: the differences, each with its stage, class and operator; none for a
package that computes what the captured graph computes. Both sides run operator by operator, and each value is a term:
the operator and the terms of its arguments. Two values are equal if their terms are.

Source: Necula, "Translation validation for an optimizing compiler", PLDI 2000; the terms are those of global value
numbering (Alpern, Wegman and Zadeck, "Detecting equality of variables in programs", POPL 1988).
"""
