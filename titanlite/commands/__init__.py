"""The commands of titanlite. Each parses its options, calls a function that a Python program can call, too, and
prints."""
