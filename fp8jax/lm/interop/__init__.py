"""Hugging Face folders in and out: shapes, names of tensors, reading and writing."""
