"""The seconds of a graph, kernel by kernel, from a hardware profile."""
