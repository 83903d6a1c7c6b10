"""Text in, batches out: files, tokenizers, token files, packed rows, mixtures."""
