"""Text in, batches out: sources, tokenizers, token files, packed rows, mixtures."""
