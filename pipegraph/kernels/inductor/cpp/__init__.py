"""The C++ of Inductor's kernels: found headers and instructions, and one library for the kernels of a graph."""
