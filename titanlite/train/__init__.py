"""Train a model on one rank, replay steps, and profile steps."""
