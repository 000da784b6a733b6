"""Kernels recorded as CUDA graphs, which a GPU starts at once.

A GPU waits for the CPU if kernels take less time than the CPU needs to launch the next one. A recorded graph is
launched as a whole, but reads and writes the places in memory that it was recorded with. So each microbatch in flight
has its own graphs:

inputs ─ copied ─▶ ┌ MicrobatchGraphs: F ─▶ saved ─▶ I ─▶ W ┐ ─ copied ─▶ outputs, gradients of inputs
                   └──────────── its own memory ────────────┘
"""
