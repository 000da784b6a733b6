"""Sizes as symbols: one trace for many shapes, and the conditions under which it is right."""
