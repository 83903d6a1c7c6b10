"""Backends: how quantized operands are multiplied."""
