"""Graphs: the joint graph of forward and backward, and its division into F, I and W."""
