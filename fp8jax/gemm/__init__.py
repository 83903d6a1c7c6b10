"""The quantized GEMM: its derivative, and the linen modules and functions that call it."""
