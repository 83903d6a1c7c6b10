"""Optimizers, learning-rate schedules, and how moments are stored."""
