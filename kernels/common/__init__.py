"""What kernels share: the choice of a backend, launching, and compiling without a GPU."""
