"""Checkpoints: the state of a training run, written and read by all ranks together."""
