"""The classes of a package: one per stage, and one per distinct block.

In: the stages of a plan. Out: ``ClassSource``, ready for a template. ``block_classes`` finds which modules share a
class, ``attributes`` writes ``__init__``, ``merge_classes`` joins classes that differ in numbers only.
"""
