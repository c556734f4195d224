"""The commands of titanlite: each parses its options, calls what a Python user can call, too, and prints."""
