"""Named model architectures, called flavors, such as "8b" for Llama 3.1 8B.

Invariant: this module does not import torch, so that jobs are validated quickly.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from functools import partial
from typing import Any, ClassVar, Literal

SWITCHES = (
    "qkv_bias",
    "qk_norm",
    "norm_placement",
    "sliding_window",
    "full_attention_interval",
    "no_rope_interval",
    "logit_softcap",
)
"""Fields of `Architecture` that distinguish other model families from Llama."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Shape of a model. `titanlite.config.schema.Model` explains the fields.

    If `head_dim` is 0, it becomes dim / n_heads.

    A plugin with a different architecture registers a subclass. A job sets the additional fields of
    the subclass in a section that is named after the architecture. The subclass must also override
    `block_matrices` and `block_vectors`, which determine plans, MFU and memory checks.

    Attributes:
        model: Location ("module:name") of the module class, a subclass of `Llama`.
        tensor_parallel: Location of the function that returns the tensor-parallel plan of a block.
            See `parallel.tensor.block_plan`.
        families: Location of the list of equivalent `transformers` models. See
            `model.formats.FAMILIES`.
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
    rope_scaling: Literal["llama3", "yarn"] = "llama3"
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_attention_factor: float = 0.0
    tied_embeddings: bool = False
    head_dim: int = 0
    qkv_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    norm_placement: Literal["before", "after"] = "before"
    sliding_window: int = 0
    full_attention_interval: int = 0
    no_rope_interval: int = 0
    logit_softcap: float = 0.0
    mup_base_dim: int = 0
    mup_base_head_dim: int = 0
    architecture: str = "llama"

    def __post_init__(self) -> None:
        """If `head_dim` is 0, set it to dim / n_heads.

        If `dim` is not divisible by `n_heads`, set `head_dim` to -1, which a later validation
        reports.
        """
        if not self.head_dim:
            divides = self.dim % self.n_heads == 0
            object.__setattr__(self, "head_dim", self.dim // self.n_heads if divides else -1)

    @property
    def switches(self) -> dict[str, Any]:
        """Fields that distinguish the model from Llama, such as {"qkv_bias": True}, by name."""
        differences = {}
        for name in SWITCHES:
            value = getattr(self, name)
            if value != getattr(Architecture, name):  # the default
                differences[name] = value
        return differences

    @property
    def q_dim(self) -> int:
        """Total width of the queries of all heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Total width of the keys of all heads, which equals the total width of the values."""
        return self.n_kv_heads * self.head_dim

    def mup_factors(self, name: str, ndim: int) -> tuple[float, float]:
        """Return the factors by which muP scales a parameter's initial values and learning rate.

        With these factors, a learning rate that suits a narrow base model also suits wider models.

            Parameter                               Initial values    Learning rate
            Matrices of blocks                      q * sqrt(r)       q * r
            Output matrix or, if tied, final norm   r                 r
            All other parameters                    q                 q

        Here, r = mup_base_dim / dim, or 1 without muP, and q is 1 except for parameters of queries.
        docs/guides/mup.md explains the factors, with m = 1 / r.

        Args:
            name: Name of the parameter, for example "layers.3.attention.wo.weight".
            ndim: Number of dimensions of the parameter.

        Returns:
            The factor for the initial values, and the factor for the learning rate.
        """
        r = (self.mup_base_dim or self.dim) / self.dim  # mup_base_dim is 0 without muP
        q = self._get_query_factor(name)

        is_block_matrix = name.startswith("layers.") and ndim >= 2
        if is_block_matrix:
            # This is q * sqrt(r). Another form would change the last bit of the result.
            initial_factor = q * r / math.sqrt(r)
            return initial_factor, q * r

        # A tied output matrix is also the embedding, so scale the norm in front of it instead.
        output_name = "norm.weight" if self.tied_embeddings else "output.weight"
        if name == output_name:
            return r, r
        return q, q

    def _get_query_factor(self, name: str) -> float:
        """Return the muP factor that compensates for wider heads, which increase attention scores.

        If heads are k times as wide as in the base model, the factor is 1 / sqrt(k) for the query
        projection or, if queries are normalized, for the query norm. It is 1 for other parameters.
        """
        # A query norm undoes any scale of the query projection, so scale this norm instead.
        query_name = "attention.wq." if self.qk_norm == "none" else "attention.q_norm."
        if query_name not in name:
            return 1.0
        return math.sqrt((self.mup_base_head_dim or self.head_dim) / self.head_dim)

    def is_full_attention(self, layer: int) -> bool:
        """Return whether block number `layer`, counted from 0, ignores the sliding window.

        If `full_attention_interval` is 4, for example, these are blocks 3, 7, 11 and so on.
        """
        interval = self.full_attention_interval
        return interval > 0 and (layer + 1) % interval == 0

    def attended(self, seq_len: int, is_causal: bool = True) -> float:
        """Return how many tokens a token attends to, averaged over all tokens and blocks.

        This number determines the FLOPs of attention. Sliding windows reduce it.

        Args:
            seq_len: Sequence length in tokens.
            is_causal: Whether tokens attend only to preceding tokens.
        """
        total = 0.0
        for layer in range(self.n_layers):
            window = self._get_window(layer, seq_len)
            # With a causal mask, the first `window` tokens see window / 2 fewer tokens on average.
            # Averaged over all tokens of the sequence, this is window**2 / (2 * seq_len).
            num_hidden = window**2 / (2 * seq_len) if is_causal else 0
            total += window - num_hidden
        return total / self.n_layers

    def _get_window(self, layer: int, seq_len: int) -> int:
        """Return the attention window of block `layer` in tokens, at most the sequence length."""
        if self.sliding_window == 0 or self.is_full_attention(layer):
            return seq_len
        return min(seq_len, self.sliding_window)

    @property
    def block_matrices(self) -> int:
        """Number of parameters in the weight matrices of one block."""
        # wq and wo, wk and wv, and the three matrices of the feed-forward network.
        return self.dim * (2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn_dim)

    @property
    def block_vectors(self) -> int:
        """Number of parameters in the norms and biases of one block."""
        qk_norms = {"none": 0, "head": 2 * self.head_dim, "projection": self.q_dim + self.kv_dim}
        biases = self.q_dim + 2 * self.kv_dim if self.qkv_bias else 0
        return 2 * self.dim + biases + qk_norms[self.qk_norm]


_qwen = partial(Architecture, norm_eps=1e-6, rope_theta=1e6)
_qwen3 = partial(_qwen, vocab_size=151936, max_seq_len=40960, head_dim=128, qk_norm="head")
_olmo2 = partial(
    Architecture,
    vocab_size=100352,
    max_seq_len=4096,
    norm_eps=1e-6,
    qk_norm="projection",
    norm_placement="after",
)
_olmo3 = partial(
    _olmo2,
    vocab_size=100278,
    max_seq_len=65536,
    sliding_window=4096,
    full_attention_interval=4,
    rope_scaling="yarn",
    rope_scaling_factor=8.0,
)
FLAVORS = {
    # 6 million parameters. Heads have a width of 64, because CPU attention kernels are four times
    # faster than with 16.
    "debugmodel": Architecture(
        256, 6, 4, 2, 640, vocab_size=4096, max_seq_len=8192, rope_theta=10000.0
    ),
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
    "smollm2-135m": Architecture(
        576, 30, 9, 3, 1536, 49152, 8192, rope_theta=1e5, tied_embeddings=True
    ),
    "smollm2-360m": Architecture(
        960, 32, 15, 5, 2560, 49152, 8192, rope_theta=1e5, tied_embeddings=True
    ),
    "smollm2-1.7b": Architecture(
        2048, 24, 32, 32, 8192, 49152, 8192, rope_theta=1.3e5, tied_embeddings=True
    ),
    "qwen2.5-0.5b": _qwen(896, 24, 14, 2, 4864, 151936, 32768, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, 151936, tied_embeddings=True, qkv_bias=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, 152064, qkv_bias=True),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 9728, tied_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288),
    "smollm3-3b": Architecture(
        2048,
        36,
        16,
        4,
        11008,
        max_seq_len=65536,
        norm_eps=1e-6,
        rope_theta=5e6,
        tied_embeddings=True,
        no_rope_interval=4,
    ),
    "olmo2-1b": _olmo2(2048, 16, 16, 16, 8192),
    "olmo2-7b": _olmo2(4096, 32, 32, 32, 11008),
    "olmo3-7b": _olmo3(4096, 32, 32, 32, 11008),
    "olmo3-32b": _olmo3(5120, 64, 40, 8, 27648),
}

HUB_NAMES = {
    "meta-llama/Llama-3.2-1B": "1b",
    "meta-llama/Llama-3.2-3B": "3b",
    "meta-llama/Llama-3.1-8B": "8b",
    "meta-llama/Llama-3.1-70B": "70b",
    "meta-llama/Llama-3.1-405B": "405b",
    "meta-llama/Llama-2-7b": "llama2-7b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Mistral-Nemo-Base-2407": "mistral-nemo",
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-360M": "smollm2-360m",
    "HuggingFaceTB/SmolLM2-1.7B": "smollm2-1.7b",
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "allenai/OLMo-2-0425-1B": "olmo2-1b",
    "allenai/OLMo-2-1124-7B": "olmo2-7b",
    "allenai/Olmo-3-1025-7B": "olmo3-7b",
    "allenai/Olmo-3-1125-32B": "olmo3-32b",
}
"""Flavor with the same architecture, by name of the model on the Hugging Face Hub."""

# These flavors are not published models, so `fit_vocab_size` in titanlite/load_run.py derives their
# vocabulary size from the tokenizer. The `vocab_size` above applies only where this has not
# been done, such as in saved jobs without `model.vocab_size`.
FITTED_TO_TOKENIZER = ("debugmodel", "150m")


def find_flavor(name: str) -> str:
    """Return the flavor (built-in architecture) for a name, such as "8b" for "Llama-3.1-8B".

    Names of models on the Hugging Face Hub may omit the owner, and may have a suffix such as
    "-Instruct". Case is ignored.

    Raises:
        ValueError: If the name is unknown. The message, such as "is not the name of a flavor. Did
            you mean 8b?", is meant to follow the key that contains the name.
    """
    flavor_of_name = _list_names()  # with and without owners
    name_without_suffix = re.sub(r"-(instruct|base|hf)$", "", name.lower())
    if name_without_suffix in flavor_of_name:
        return flavor_of_name[name_without_suffix]

    name_without_owner = name_without_suffix.rpartition("/")[2]
    similar = difflib.get_close_matches(name_without_owner, flavor_of_name, n=1)
    suggestion = f" Did you mean {flavor_of_name[similar[0]]}?" if similar else ""
    raise ValueError(f"is not the name of a flavor.{suggestion} Flavors are {', '.join(FLAVORS)}")


def _list_names() -> dict[str, str]:
    """Return a mapping from all known names, in lower case, to their flavors.

    For example, "8b", "meta-llama/llama-3.1-8b" and "llama-3.1-8b" all have the flavor "8b".
    """
    flavor_of_name = {flavor: flavor for flavor in FLAVORS}
    for hub_name, flavor in HUB_NAMES.items():
        name_without_owner = hub_name.rpartition("/")[2]
        flavor_of_name[hub_name.lower()] = flavor
        flavor_of_name[name_without_owner.lower()] = flavor
    return flavor_of_name
