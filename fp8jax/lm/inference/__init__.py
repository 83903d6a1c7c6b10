"""Generation with a KV cache, sampling, and the likelihood of given text."""
