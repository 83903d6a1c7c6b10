"""The quantized linear layer: amax histories, backends, the one VJP, linen modules."""
