"""Time the distinct blocks of a model on this machine."""
