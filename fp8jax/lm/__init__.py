"""The language-model stack: the transformer, its data, training and inference."""
