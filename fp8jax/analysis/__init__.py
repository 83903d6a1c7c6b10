"""Which GEMMs a compiled program runs in FP8, and which linears FP8 speeds up at their size."""
