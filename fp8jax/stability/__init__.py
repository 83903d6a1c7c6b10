"""What is done about bad steps and growing gradients."""
