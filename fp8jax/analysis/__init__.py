"""What compiled programs run, and where FP8 pays: GEMMs by precision, the size gate."""
