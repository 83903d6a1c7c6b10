"""The machine: XLA flags, what the hardware supports, the device mesh."""
