"""Prove that a small version of a job computes correct results, for `titanlite prove`."""
