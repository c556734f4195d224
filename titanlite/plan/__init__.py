"""Estimate the memory and time of a run before it starts.

Invariant: A plan runs the training step of the trainer on fake tensors, which have shapes but no
data. No separate formulas describe what a step computes, stores or sends.
"""
