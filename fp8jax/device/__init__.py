"""The machine: XLA flags, what the hardware can do, the device mesh."""
