"""GEMM and quantization: Pallas for Hopper, cuDNN's block-scaled GEMM for Blackwell."""
