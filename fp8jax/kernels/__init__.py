"""GEMM and quantization kernels: Pallas for Hopper, cuDNN's block-scaled GEMM for Blackwell."""
