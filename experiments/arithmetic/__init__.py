"""Arithmetic word problems: `python -m experiments.arithmetic`."""
