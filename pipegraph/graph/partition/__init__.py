"""Cuts of a captured graph: segments, split points, stages, and the values that cross."""
