"""The kinds of memory that are told apart. This needs no torch.

Invariant: each byte on the device is of one kind of KINDS.
"""

from __future__ import annotations

# In the order in which they are printed. "loss" is what the fused loss allocates: logits and the gradients that it
# computes along. "other" is all else: batches, norms, temporaries of the optimizer.
KINDS: tuple[str, ...] = ("weights", "gradients", "optimizer state", "gathered weights", "activations", "loss", "other")
# What CPU offload keeps on the host is counted beside them.
HOST = "in host memory"
COUNTED = (*KINDS, HOST)
