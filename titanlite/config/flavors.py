"""The named Llama architectures.

Invariant: no torch here, so that a job file can be checked in a fraction of a second.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Every number that defines a Llama; the fields are explained in `titanlite.config.schema.Model`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int = 128256
    max_seq_len: int = 131072
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_seq_len: int = 8192
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.n_kv_heads * self.head_dim


FLAVORS = {
    # 6 million parameters. The heads have a width of 64, because attention kernels on a CPU are four times faster with
    # 64 than with 16.
    "debugmodel": Architecture(256, 6, 4, 2, 640, vocab_size=4096, max_seq_len=8192, rope_theta=10000.0),
    "150m": Architecture(640, 16, 10, 2, 1728, max_seq_len=8192, tied_embeddings=True),
    # Llama 3.2 (tied embeddings, context extended 32 times) and Llama 3.1 (8 times).
    "1b": Architecture(2048, 16, 32, 8, 8192, rope_scaling_factor=32.0, tied_embeddings=True),
    "3b": Architecture(3072, 28, 24, 8, 8192, rope_scaling_factor=32.0, tied_embeddings=True),
    "8b": Architecture(4096, 32, 32, 8, 14336, rope_scaling_factor=8.0),
    "70b": Architecture(8192, 80, 64, 8, 28672, rope_scaling_factor=8.0),
    "405b": Architecture(16384, 126, 128, 8, 53248, rope_scaling_factor=8.0),
}

# These flavors are no published models, so they take the tokenizer's vocabulary, in multiples of 128. The size above
# holds for jobs that were saved without one.
FITTED_TO_TOKENIZER = ("debugmodel", "150m")
