"""Hooks, whose methods the trainer calls during a run, such as the checkpointer and guards."""
