"""Implement the commands. Each one parses options, calls a function, and prints the result."""
