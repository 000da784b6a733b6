"""Measure a hardware profile on this machine."""
