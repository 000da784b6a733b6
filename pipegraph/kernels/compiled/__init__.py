"""Compiled programs: graphs become runs of Inductor's kernels."""
