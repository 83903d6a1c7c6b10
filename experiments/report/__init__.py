"""One page on one or more runs: `python -m experiments.report`."""
