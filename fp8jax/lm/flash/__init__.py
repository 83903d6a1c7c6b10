"""Flash attention for packed documents: Pallas kernels for Hopper."""
