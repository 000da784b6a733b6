"""Models in their authors' way, split in three: what sizes, dtypes and modes the stages take, how the source reads."""
