"""Convert torchtitan job files (`migrate`) and checkpoints (`weights`) to titanlite."""
