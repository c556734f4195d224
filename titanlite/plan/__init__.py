"""What a run will take before it runs: the trainer's own step on fake tensors, and what follows from its counts.

Invariant: a plan is the trainer. No formula beside the trainer says what a step computes, stores or sends.
"""
