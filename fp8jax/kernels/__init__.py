"""GEMM, quantization and attention: Pallas for Hopper, cuDNN's block-scaled GEMM for Blackwell."""
