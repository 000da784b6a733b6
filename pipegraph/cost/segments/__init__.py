"""The segments of a model, and the blocks that segments of equal structure share."""
