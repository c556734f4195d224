"""Prove that a small version of a job computes what it should, for `titanlite prove`."""
