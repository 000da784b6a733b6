"""Compiling graphs with Inductor."""
