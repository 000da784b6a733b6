"""The rows of a batch: the role of each input, and the proof that a batch may be cut into microbatches."""
