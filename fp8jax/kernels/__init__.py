"""Products and casts that leave plain XLA."""
