"""Kernels beyond plain XLA: Pallas for Hopper, the block-scaled product of Blackwell."""
