"""The quantized linear layer: amax histories, backends, the one custom VJP, linen modules."""
