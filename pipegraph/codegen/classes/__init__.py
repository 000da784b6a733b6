"""The classes of a package: one per stage, and one per distinct block.

In: the stages of a plan. Out: ``ClassSource``, ready for a template. ``block_classes`` finds which modules share a
class, ``stage_class`` writes the class of a stage, ``merge_classes`` joins classes that differ in numbers only.
"""
