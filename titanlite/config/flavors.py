"""The named architectures.

Invariant: no torch here, so that a job file can be checked in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

SWITCHES = ("qkv_bias", "qk_norm", "norm_placement", "sliding_window", "no_rope_interval")
"""Fields in which other families of models differ from Llama."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Every number that defines a model; the fields are explained in `titanlite.config.schema.Model`.

    The number of heads must divide dim if head_dim is 0, which stands for dim / n_heads.

    A model of a plugin has a subclass, whose further fields are the keys of its own table. It names what the model is
    made of, and corrects the counts below, from which follow plans, MFU and the checks of memory.

    Attributes:
        model: place of the module, a class on `Llama`.
        tensor_parallel: place of the function that gives the plan of its blocks: see `parallel.tensor.block_plan`.
        families: place of the models of transformers that compute the same: see `model.formats.FAMILIES`.
    """

    model: ClassVar[str] = "titanlite.model.llama:Llama"
    tensor_parallel: ClassVar[str] = "titanlite.parallel.tensor:block_plan"
    families: ClassVar[str] = "titanlite.model.formats:FAMILIES"

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
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    norm_placement: Literal["before", "after"] = "before"
    sliding_window: int = 0
    no_rope_interval: int = 0
    architecture: str = "llama"

    def __post_init__(self) -> None:
        if not self.head_dim:  # what does not divide becomes an odd width, which is refused
            width = -1 if self.dim % self.n_heads else self.dim // self.n_heads
            object.__setattr__(self, "head_dim", width)

    @property
    def switches(self) -> dict[str, Any]:
        """What is not as in a Llama: name of the field -> value."""
        fields = [field for field in dataclasses.fields(self) if field.name in SWITCHES]
        return {each.name: getattr(self, each.name) for each in fields if getattr(self, each.name) != each.default}

    @property
    def q_dim(self) -> int:
        """Width of all queries of a token."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.n_kv_heads * self.head_dim

    def attended(self, seq_len: int) -> float:
        """Number of tokens that a token of a row attends to, in the mean: half of the row without a window."""
        window = min(seq_len, self.sliding_window or seq_len)
        return window - window * window / (2 * seq_len)

    @property
    def parameter_names(self) -> list[str]:
        """The names of all parameters."""
        biased = [f"attention.{name}" for name in ("wq", "wk", "wv")]
        weights = [*biased, "attention.wo", *(f"feed_forward.w{i}" for i in (1, 2, 3)), "attention_norm", "ffn_norm"]
        weights += ["attention.q_norm", "attention.k_norm"] * (self.qk_norm != "none")
        block = [f"{name}.weight" for name in weights] + [f"{name}.bias" for name in biased] * self.qkv_bias
        names = [f"layers.{i}.{name}" for i in range(self.n_layers) for name in block]
        return ["tok_embeddings.weight", *names, "norm.weight", *["output.weight"] * (not self.tied_embeddings)]

    @property
    def block_matrices(self) -> int:
        """Weights of the matrices of a block: those that a token is multiplied with."""
        return self.dim * (2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn_dim)

    @property
    def block_vectors(self) -> int:
        """Weights of the norms and biases of a block."""
        qk_norms = {"none": 0, "head": 2 * self.head_dim, "projection": self.q_dim + self.kv_dim}[self.qk_norm]
        return 2 * self.dim + self.qkv_bias * (self.q_dim + 2 * self.kv_dim) + qk_norms


_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3 = _QWEN | {"vocab_size": 151936, "max_seq_len": 40960, "head_dim": 128, "qk_norm": "head"}
_SMOLLM3: dict[str, Any] = {"norm_eps": 1e-6, "rope_theta": 5e6, "tied_embeddings": True, "no_rope_interval": 4}
_OLMO2: dict[str, Any] = {"vocab_size": 100352, "max_seq_len": 4096, "norm_eps": 1e-6}
_OLMO2 |= {"qk_norm": "projection", "norm_placement": "after"}
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
    "llama2-7b": Architecture(4096, 32, 32, 32, 11008, 32000, 4096, rope_theta=1e4),
    "mistral-7b": Architecture(4096, 32, 32, 8, 14336, 32768, 32768, rope_theta=1e6),  # v0.3
    "mistral-nemo": Architecture(5120, 40, 32, 8, 14336, 131072, rope_theta=1e6, head_dim=128),
    "smollm2-135m": Architecture(576, 30, 9, 3, 1536, 49152, 8192, rope_theta=1e5, tied_embeddings=True),
    "smollm2-360m": Architecture(960, 32, 15, 5, 2560, 49152, 8192, rope_theta=1e5, tied_embeddings=True),
    "smollm2-1.7b": Architecture(2048, 24, 32, 32, 8192, 49152, 8192, rope_theta=1.3e5, tied_embeddings=True),
    "qwen2.5-0.5b": Architecture(896, 24, 14, 2, 4864, 151936, 32768, **_QWEN, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-1.5b": Architecture(1536, 28, 12, 2, 8960, 151936, **_QWEN, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-7b": Architecture(3584, 28, 28, 4, 18944, 152064, **_QWEN, qkv_bias=True),
    "qwen3-0.6b": Architecture(1024, 28, 16, 8, 3072, **_QWEN3, tied_embeddings=True),
    "qwen3-1.7b": Architecture(2048, 28, 16, 8, 6144, **_QWEN3, tied_embeddings=True),
    "qwen3-4b": Architecture(2560, 36, 32, 8, 9728, **_QWEN3, tied_embeddings=True),
    "qwen3-8b": Architecture(4096, 36, 32, 8, 12288, **_QWEN3),
    "smollm3-3b": Architecture(2048, 36, 16, 4, 11008, max_seq_len=65536, **_SMOLLM3),
    "olmo2-1b": Architecture(2048, 16, 16, 16, 8192, **_OLMO2),
    "olmo2-7b": Architecture(4096, 32, 32, 32, 11008, **_OLMO2),
}

# These flavors are no published models, so they take the tokenizer's vocabulary, in multiples of 128. The size above
# holds for jobs that were saved without one.
FITTED_TO_TOKENIZER = ("debugmodel", "150m")
