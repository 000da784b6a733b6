"""What segments and stages of a model cost: seconds of F, I and W, and bytes.

hardware/      profiles of devices: rates, links, and where each figure is from
calibration/   measure such a profile on this machine
segments/      a model's chain of segments, and its distinct blocks as graphs of F, I and W
roofline/      the seconds of a graph on a profile
measurement/   the seconds of distinct blocks, as they run on this machine
price.py       a captured model → the cost of each of its segments
"""

from pipegraph.cost.segment_cost import SegmentCost

__all__ = ["SegmentCost"]
