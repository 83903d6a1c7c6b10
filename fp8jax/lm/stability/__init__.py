"""Detection of bad steps and growing gradients, and the responses to them."""
