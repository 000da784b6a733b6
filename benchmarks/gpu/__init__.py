"""What one GPU does with pipegraph's kernels, in bfloat16: times, memory, streams, the roofline, and CUDA graphs."""
