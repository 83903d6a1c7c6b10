"""Studies of precision: `python -m experiments.study`."""
