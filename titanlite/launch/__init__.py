"""Validate a job, start the ranks of a node, and report how they end."""
