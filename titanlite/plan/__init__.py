"""Plans: estimates of the memory and time of a run before the run starts.

Invariant: A plan runs the trainer's own step on fake tensors, which have shapes but no data. No
formula besides the trainer describes what a step computes, stores or sends.
"""
