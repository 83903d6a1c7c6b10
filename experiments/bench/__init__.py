"""Benchmarks: `python -m experiments.bench`."""
