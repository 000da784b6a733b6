"""Kernels recorded as CUDA graphs, which a GPU starts at once.

A GPU waits for the host where kernels take less time than the host needs to launch the next one. A recorded graph is
launched as a whole, but reads and writes the places in memory that it was recorded with. So each microbatch in flight
has graphs of its own:

inputs ─ copied ─▶ ┌ MicrobatchGraphs: F ─▶ saved ─▶ I ─▶ W ┐ ─ copied ─▶ outputs, gradients of inputs
                   └──────────── memory of its own ─────────┘
"""
