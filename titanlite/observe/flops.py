"""Parameters and FLOPs per token of a Llama, and the peak FLOP/s of known accelerators.

Invariant: everything is computed from an `Architecture`. No model is built and no profiler is used, because
`FlopCounterMode` does not see every attention kernel.
"""

from __future__ import annotations

import re

from titanlite.config.flavors import Architecture

# Dense bfloat16 FLOP/s with float32 accumulation, from the data sheets. For NVIDIA's newer devices these print twice
# the number, for 2:4 sparsity. The first entry whose words are all in the device's name is taken, so variants with a
# lower clock must be listed before the plain name.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),
    ("B300", 2250e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800 PCIe", 756e12),
    ("H800", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI355X", 2516e12),
    ("MI350X", 2309e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),  # a device is one of the two dies of the package
)


def num_params(arch: Architecture) -> int:
    """Number of trainable parameters; tied embeddings count once."""
    embedding = arch.vocab_size * arch.dim
    norms = (2 * arch.n_layers + 1) * arch.dim
    return _matmul_params(arch) + norms + (0 if arch.tied_embeddings else embedding)


def flops_per_token(arch: Architecture, seq_len: int) -> float:
    """Training FLOPs (forward and backward) of one token in a row of `seq_len` tokens, causal attention.

    - A matmul with a weight of n entries costs 2n FLOPs a token forward (a multiplication and an addition each), and
      twice that backward (gradients of the input and of the weight): 6n. The output projection is such a matmul,
      tied or not; the embedding look-up is none.
    - Attention in a block: a query meets T keys in D channels (all heads together), 2TD FLOPs for the scores and 2TD
      for the weighted values: 4TD forward, 8TD backward, 12TD in all. The causal mask leaves half: 6TD. Grouped
      key/value heads change the memory traffic, not this count.
    - Norms, rotary embedding, SwiGLU's product, softmax and the loss are left out: below 1% from 1B parameters on.
    - Recomputation by activation checkpointing does not count: MFU is about useful work.

    The PaLM paper (2204.02311, appendix B) counts the same way, but attention without the causal half.
    """
    attention = 6 * arch.n_layers * seq_len * arch.dim
    return float(6 * _matmul_params(arch) + attention)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by its name, as `torch.cuda.get_device_name()` gives it.

    None if it is not in the table, and for a MIG slice, whose share of the chip the name does not tell exactly.
    """
    words = set(re.split(r"[\s\-_]+", device_name.upper()))
    if "MIG" in words:
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS if set(name.upper().split()) <= words), None)


def _matmul_params(arch: Architecture) -> int:
    """Weights that a token is multiplied with: all blocks and the output projection."""
    head_dim = arch.dim // arch.n_heads
    query_and_output = 2 * arch.dim * arch.dim
    key_and_value = 2 * arch.dim * arch.n_kv_heads * head_dim
    feed_forward = 3 * arch.dim * arch.ffn_dim
    return arch.n_layers * (query_and_output + key_and_value + feed_forward) + arch.vocab_size * arch.dim
