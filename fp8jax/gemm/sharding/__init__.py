"""Axes of a mesh that a caller handles itself."""
