"""What a user of torchtitan brings along: job files (`migrate`) and checkpoints (`weights`)."""
