"""Blocks: repeated modules, traced and divided once."""
