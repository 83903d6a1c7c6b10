"""InfiR2's pipeline as one command: pre-training, fine-tuning, evaluation, export, comparison."""
