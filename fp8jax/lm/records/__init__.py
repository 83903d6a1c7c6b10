"""The files that a run writes and reads back: checkpoints, metrics, events."""
