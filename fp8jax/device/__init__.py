"""The machine: XLA flags, and what the hardware supports."""
