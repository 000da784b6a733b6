"""What kernels need on a CPU alone."""
