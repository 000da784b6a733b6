"""Hardware profiles: what a device and the links between devices attain."""

from pipegraph.cost.hardware.profile import Hardware, Link, Links, MeasuredLinks, check_new
from pipegraph.cost.hardware.size_table import SizeTable
from pipegraph.package.prediction import UNCORRECTED, MeasuredRatio

__all__ = [
    "UNCORRECTED",
    "Hardware",
    "Link",
    "Links",
    "MeasuredLinks",
    "MeasuredRatio",
    "SizeTable",
    "check_new",
]
